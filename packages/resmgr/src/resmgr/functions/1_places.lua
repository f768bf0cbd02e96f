-- Places: what is free where, and how amounts are taken and given back.
--
-- A place is one node of a pool (or a whole pool that names no nodes). Amounts are thousandths of a unit.
--   places        hash   place -> packed {hardware, total, labels}
--   free:CLASS    zset   place -> whole units nobody uses
--   share:CLASS   zset   place "\n" slot -> what is left of a unit that is used in fractions
--   roles, antis  hash   place "\n" role -> how many bindings there have the role, or refuse it
-- A fraction lies within one unit. Nothing is written until the whole part of a request is known to fit.

-- The prefix of all keys, that of `places` (the same, but in what-if searches), and redis.call.
local P, PLACES, call

local UNIT = 1000

local function info(place)
  return cmsgpack.unpack(call('HGET', PLACES, place))
end

local function place_of(member)
  return string.match(member, '^[^\n]+')
end

local function matches(labels, wanted)
  for name, value in pairs(wanted) do
    if labels[name] ~= value then return false end
  end
  return true
end

-- A node's name; a pool without nodes is one itself.
local function node_of(place)
  return string.match(place, '/(.*)$') or place
end

local function avoided(spec, place)
  local node = node_of(place)
  for _, name in ipairs(spec.avoid) do
    if name == node then return true end
  end
  return false
end

local function anywhere() return true end

-- Which places a request may use: its labels, none that it avoids, anti-affinity in both directions, and none that an
-- earlier waiter claims.
local function admission(spec, claimed)
  local labelled = next(spec.labels) ~= nil or #claimed > 0
  local apart = #spec.apart > 0 or call('EXISTS', P .. 'antis') == 1
  if not labelled and not apart and #spec.avoid == 0 then return anywhere end
  return function(place)
    if avoided(spec, place) then return false end
    if labelled then
      local labels = info(place)[3]
      if not matches(labels, spec.labels) then return false end
      for _, wanted in ipairs(claimed) do
        if matches(labels, wanted) then return false end
      end
    end
    if apart then
      if call('HEXISTS', P .. 'antis', place .. '\n' .. spec.role) == 1 then return false end
      for _, role in ipairs(spec.apart) do
        if call('HEXISTS', P .. 'roles', place .. '\n' .. role) == 1 then return false end
      end
    end
    return true
  end
end

-- The member with the least room that still has `least`, so that large holes stay whole.
local function tightest(zset, least, admits)
  local from, size = 0, 1
  repeat
    local page = call('ZRANGEBYSCORE', zset, least, '+inf', 'LIMIT', from, size)
    for _, member in ipairs(page) do
      if admits(place_of(member)) then return member end
    end
    from = from + #page
    local full = #page == size
    size = 64
  until not full
end

-- Where `count` chunks of `units` whole units go: one place if one has room, else as few as possible.
local function plan(class, count, units, spread, admits)
  if not spread then
    local one = tightest(P .. 'free:' .. class, count * units, admits)
    if one then return { one, count }, count end
  end
  local places, got, from = {}, 0, 0
  repeat
    local page = call('ZRANGE', P .. 'free:' .. class, from, from + 63, 'REV', 'WITHSCORES')
    for i = 1, #page, 2 do
      local fits = math.floor(tonumber(page[i + 1]) / units)
      if fits < 1 then return places, got end
      if admits(page[i]) then
        local n = math.min(spread and 1 or fits, count - got)
        places[#places + 1], places[#places + 2] = page[i], n
        got = got + n
        if got == count then return places, got end
      end
    end
    from = from + 64
  until #page < 128
  return places, got
end

-- Takes `amount` (less than a unit) from a unit already shared, or opens another unit.
local function take_fraction(class, amount, admits)
  local zset = P .. 'share:' .. class
  local member = tightest(zset, amount, admits)
  if member then
    if tonumber(call('ZINCRBY', zset, -amount, member)) == 0 then call('ZREM', zset, member) end
  else
    local place = tightest(P .. 'free:' .. class, 1, admits)
    if not place then return nil end
    call('ZINCRBY', P .. 'free:' .. class, -1, place)
    member = place .. '\n' .. call('HINCRBY', P .. 'meta', 'slot', 1)
    call('ZADD', zset, UNIT - amount, member)
  end
  return place_of(member), string.match(member, '\n(.*)$')
end

-- Gives back `amount` of a place; slot "" means whole units.
local function free(class, place, slot, amount)
  if slot == '' then
    call('ZINCRBY', P .. 'free:' .. class, amount / UNIT, place)
    return
  end
  local member = place .. '\n' .. slot
  local left = tonumber(call('ZINCRBY', P .. 'share:' .. class, amount, member))
  if slot ~= 'tail' and left == UNIT then
    call('ZREM', P .. 'share:' .. class, member)
    call('ZINCRBY', P .. 'free:' .. class, 1, place)
  end
end

local function free_all(class, allocs)
  for i = 1, #allocs, 3 do free(class, allocs[i], allocs[i + 1], allocs[i + 2]) end
end

-- Takes what `spec` asks from one class: a flat list of place, slot, amount, and their sum; nil when `least` does not fit.
-- `used` are the places that a spread binding has already.
local function take(class, spec, admits, used)
  local allocs, got = {}, 0
  local function add(place, slot, amount)
    local n = #allocs
    allocs[n + 1], allocs[n + 2], allocs[n + 3] = place, slot, amount
    got = got + amount
    used[place] = true
  end
  local function unused(place) return not (spec.spread and used[place]) and admits(place) end
  local function add_fraction(amount)
    local place, slot = take_fraction(class, amount, unused)
    if place then add(place, slot, amount) end
    return place
  end
  if spec.count > 0 and spec.chunk >= UNIT then
    local units = spec.chunk / UNIT
    local places, n = plan(class, spec.count, units, spec.spread, unused)
    if n < spec.count and n * spec.chunk < spec.least then return nil end
    for i = 1, #places, 2 do
      call('ZINCRBY', P .. 'free:' .. class, -places[i + 1] * units, places[i])
      add(places[i], '', places[i + 1] * spec.chunk)
    end
  else
    for _ = 1, spec.count do
      if not add_fraction(spec.chunk) then break end
    end
  end
  if spec.tail > 0 and got == spec.count * spec.chunk then add_fraction(spec.tail) end
  if got < spec.least or got == 0 then
    free_all(class, allocs)
    return nil
  end
  return allocs, got
end

-- Takes those places of `near` again that are still free, and what is missing elsewhere in the class; so the part of a
-- binding that did not die stays where it is. Fractions are not taken again.
local function take_again(class, spec, near, admits)
  local allocs, kept, used = {}, 0, {}
  if #near == 0 or spec.chunk < UNIT or spec.tail > 0 then return nil end
  for i = 1, #near, 3 do
    local place, amount = near[i], near[i + 2]
    local room = call('ZSCORE', P .. 'free:' .. class, place)
    if room and tonumber(room) * UNIT >= amount and amount % spec.chunk == 0 and admits(place) then
      call('ZINCRBY', P .. 'free:' .. class, -amount / UNIT, place)
      allocs[#allocs + 1], allocs[#allocs + 2], allocs[#allocs + 3] = place, '', amount
      kept, used[place] = kept + amount, true
    end
  end
  local missing = spec.count * spec.chunk - kept
  if kept == 0 then return nil end
  if missing == 0 then return allocs, kept end
  local rest = { count = missing / spec.chunk, chunk = spec.chunk, tail = 0, least = missing, spread = spec.spread }
  local more = take(class, rest, admits, used)
  if not more then
    free_all(class, allocs)
    return nil
  end
  for _, part in ipairs(more) do allocs[#allocs + 1] = part end
  return allocs, kept + missing
end

-- Counts a binding's role, and the roles it refuses, at its places. `rec` has .role .apart .allocs.
local function mark(rec, step)
  local seen = {}
  local function count(name, field)
    if call('HINCRBY', P .. name, field, step) == 0 and step < 0 then call('HDEL', P .. name, field) end
  end
  for i = 1, #rec.allocs, 3 do
    local place = rec.allocs[i]
    if not seen[place] then
      seen[place] = true
      count('roles', place .. '\n' .. rec.role)
      for _, role in ipairs(rec.apart) do count('antis', place .. '\n' .. role) end
    end
  end
end

-- What a class could ever give a request: all that matches, the most on one place, and how much of the amount fits.
local function capacity(class, spec)
  local all, largest, chunks, units, tail = 0, 0, 0, 0, 0
  for _, place in ipairs(call('ZRANGE', P .. 'free:' .. class, 0, -1)) do
    local p = info(place)
    if matches(p[3], spec.labels) and not avoided(spec, place) then
      local whole, rest = math.floor(p[2] / UNIT), p[2] % UNIT
      all, largest, units, tail = all + p[2], math.max(largest, p[2]), units + whole, math.max(tail, rest)
      local fits
      if spec.chunk >= UNIT then
        fits = math.floor(whole * UNIT / spec.chunk)
      else
        fits = whole * math.floor(UNIT / spec.chunk) + math.floor(rest / spec.chunk)
      end
      chunks = chunks + (spec.spread and math.min(fits, 1) or fits)
    end
  end
  local fits = math.min(chunks, spec.count) * spec.chunk
  if units > spec.count or (units == spec.count and tail >= spec.tail) then fits = fits + spec.tail end
  return all, largest, fits
end
