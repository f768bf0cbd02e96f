-- The queue: who waits for which class, in order of priority, then of arrival.
--
--   waiters        hash  id -> packed {owner, grows, classes, {part id, spec, ...}}
--   waits:SESSION  set   ids that leave the queue with the session's lease
--   queue:CLASS    zset  id -> rank
-- A waiter stands in the queue of every class that could ever hold it, and is served by the first that can. Nobody
-- overtakes it there, except onto places that its labels exclude; so it cannot starve, and a class it cannot use goes on.
-- Ranks are the same in all queues, so of two that ask for several classes at once one is ahead everywhere.

local MOST_CLAIMS = 16
-- Of one search for a place for several requests at once, beyond one for each; what has not been found by then counts
-- as not there.
local MOST_TRIES = 512

-- A waiter asks for one binding (`grows` '' or the binding that grows) or for several at once, its parts.
local function waiter_of(id, owner, parts, grows)
  local w = { id = id, owner = owner, parts = parts, grows = grows, priority = -math.huge, wanted = {}, amount = 0 }
  local seen, roles = {}, {}
  for i, part in ipairs(parts) do
    w.priority = math.max(w.priority, part.spec.priority)
    w.amount = w.amount + part.spec.count * part.spec.chunk + part.spec.tail
    roles[i] = part.spec.role
    for _, class in ipairs(part.spec.classes) do
      if not seen[class] then w.wanted[#w.wanted + 1] = class end
      seen[class] = true
    end
  end
  w.role = table.concat(roles, '+')
  return w
end

local function waiter(id)
  local packed = call('HGET', P .. 'waiters', id)
  if not packed then return nil end
  local row, parts = cmsgpack.unpack(packed), {}
  for i = 1, #row[4], 2 do parts[#parts + 1] = { id = row[4][i], spec = read_spec(row[4][i + 1]) } end
  local w = waiter_of(id, row[1], parts, row[2])
  w.classes = row[3]
  return w
end

-- Puts a waiter into the queues of its `classes`.
local function stand(w, rank)
  local flat = {}
  for _, part in ipairs(w.parts) do flat[#flat + 1], flat[#flat + 2] = part.id, part.spec.packed end
  call('HSET', P .. 'waiters', w.id, cmsgpack.pack({ w.owner, w.grows, w.classes, flat }))
  for _, class in ipairs(w.classes) do call('ZADD', P .. 'queue:' .. class, rank, w.id) end
end

local function enqueue(w, front)
  local arrival = call('HINCRBY', P .. 'meta', 'arrivals', 1)
  call('SADD', P .. 'waits:' .. w.owner, w.id)
  stand(w, -w.priority * 2 ^ 40 + (front and 0 or arrival))
end

-- Whether a waiter does not stand in the queue of a class that could hold a part of it.
local function is_missing_at(w, class)
  for _, name in ipairs(w.classes) do
    if name == class then return false end
  end
  for _, part in ipairs(w.parts) do
    for _, name in ipairs(part.spec.classes) do
      if name == class then
        local _, _, fits = capacity(class, part.spec)
        if fits >= part.spec.least then return true end
      end
    end
  end
  return false
end

-- A class that has changed may be able to hold those who wait elsewhere: they stand in its queue too, at their rank.
local function join(class)
  for _, id in ipairs(call('HKEYS', P .. 'waiters')) do
    local w = waiter(id)
    if is_missing_at(w, class) then
      local rank = call('ZSCORE', P .. 'queue:' .. w.classes[1], id)
      w.classes[#w.classes + 1] = class
      stand(w, rank)
    end
  end
end

local function dequeue(w)
  call('HDEL', P .. 'waiters', w.id)
  call('SREM', P .. 'waits:' .. w.owner, w.id)
  for _, class in ipairs(w.classes) do
    call('ZREM', P .. 'queue:' .. class, w.id)
    touched[class] = true
  end
end

-- Takes what every part asks, each of the first class in its order with which all others find a place too: a list of
-- {class, allocs, amount}, marked at their places; nil, and nothing taken, when there is none.
local function assign(parts, may_use, claimed, used)
  local found, tries, most = {}, 0, MOST_TRIES + #parts
  local function search(i)
    if i > #parts then return true end
    local spec = parts[i].spec
    for _, class in ipairs(spec.classes) do
      tries = tries + 1
      if tries > most then return false end
      local allocs, amount
      if may_use(class) then allocs, amount = take(class, spec, admission(spec, claimed), used or {}) end
      if allocs then
        local at = { role = spec.role, apart = spec.apart, allocs = allocs }
        mark(at, 1)
        found[i] = { class, allocs, amount }
        if search(i + 1) then return true end
        mark(at, -1)
        free_all(class, allocs)
      end
    end
    return false
  end
  return search(1) and found or nil
end

-- Grants a binding what it asks to grow by.
local function grow(w, may_use, claimed)
  local rec, used = binding(w.grows), {}
  for i = 1, #rec.allocs, 3 do used[rec.allocs[i]] = true end
  local found = assign(w.parts, may_use, claimed, used)
  if not found then return nil end
  local _, allocs, amount = unpack(found[1])
  mark({ role = rec.role, apart = rec.apart, allocs = allocs }, -1)
  mark(rec, -1)
  for _, value in ipairs(allocs) do rec.allocs[#rec.allocs + 1] = value end
  rec.amount = rec.amount + amount
  mark(rec, 1)
  store(w.grows, rec)
  emit('reconfigured', w.grows, rec)
  return granted({ rec })
end

-- Grants a waiter, or a request about to wait, all that it asks; nil when that does not fit now.
local function serve(w, may_use, claimed)
  if w.grows ~= '' then return grow(w, may_use, claimed) end
  local found = assign(w.parts, may_use, claimed)
  if not found then return nil end
  local recs = {}
  for i, part in ipairs(w.parts) do
    recs[i] = grant(part.id, w.owner, part.spec, found[i][1], found[i][2], found[i][3])
  end
  return granted(recs)
end

-- Which classes a waiter may use when `class` is served: this one; for several parts at once also those in whose queues
-- it is the first, for they belong together.
local function in_turn(w, class)
  if #w.parts == 1 then return function(name) return name == class end end
  return function(name) return call('ZRANGE', P .. 'queue:' .. name, 0, 0)[1] == w.id end
end

-- Serves the queue of a class as far as its order allows.
local function drain(class, asker)
  local claimed, at, served = {}, 0, nil
  while true do
    local id = call('ZRANGE', P .. 'queue:' .. class, at, at)[1]
    if not id then return served end
    local w = waiter(id)
    local answer = serve(w, in_turn(w, class), claimed)
    local labels = w.parts[1].spec.labels
    if answer then
      dequeue(w)
      if id == asker then served = answer else tell(w.owner, 'granted', id, answer) end
    elseif #w.parts > 1 or next(labels) == nil or #claimed == MOST_CLAIMS then
      return served
    else
      claimed[#claimed + 1] = labels
      at = at + 1
    end
  end
end

-- Serves every class in which something became free, until nothing more can be granted.
local function settle()
  local class = next(touched)
  while class do
    touched[class] = nil
    drain(class)
    class = next(touched)
  end
end

-- A binding that ends takes its wish to grow with it, and whoever waits for that hears of it.
local function finish(id, rec, kind, reason)
  local grow = waiter(id .. '+')
  if grow then
    dequeue(grow)
    tell(grow.owner, 'ended', grow.id, '')
  end
  drop(id, rec, kind, reason)
end

local function lose(id, rec, reason)
  finish(id, rec, 'lost', reason)
  tell(rec.owner, 'lost', id, string.format('%.0f', rec.token))
end
