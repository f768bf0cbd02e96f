-- Pools as they change: places installed, resized, removed; bindings that shrink.

-- Ends the newest bindings at a place until `enough` of them are gone.
local function lose_at(place, enough)
  if enough() then return end
  local there = {}
  local all = call('HGETALL', P .. 'bindings')
  for i = 1, #all, 2 do
    local rec = unpack_record(all[i + 1])
    for j = 1, #rec.allocs, 3 do
      if rec.allocs[j] == place then
        there[#there + 1] = { all[i], rec }
        break
      end
    end
  end
  table.sort(there, function(a, b) return a[2].token > b[2].token end)
  for _, entry in ipairs(there) do
    if enough() then return end
    lose(entry[1], entry[2], 'pool')
  end
end

local function never() return false end

-- Removes the places of a pool that its new definition does not have, or has in another class or with other fractions.
local function evict(pool, wanted)
  for _, place in ipairs(call('SMEMBERS', P .. 'pool:' .. pool)) do
    local old = info(place)
    local new = wanted[place] and cmsgpack.unpack(wanted[place])
    if not new or new[1] ~= old[1] or new[2] % UNIT ~= old[2] % UNIT then
      lose_at(place, never)
      call('ZREM', P .. 'free:' .. old[1], place)
      call('ZREM', P .. 'share:' .. old[1], place .. '\ntail')
      call('HDEL', P .. 'places', place)
      call('SREM', P .. 'pool:' .. pool, place)
    end
  end
end

-- Makes a place what its definition says; when it has become smaller, its newest bindings end until the rest fit.
local function install(pool, place, packed)
  local new = cmsgpack.unpack(packed)
  local class, total = new[1], new[2]
  local old = call('HGET', P .. 'places', place)
  local before = old and cmsgpack.unpack(old)[2] or 0
  if not old and total % UNIT > 0 then call('ZADD', P .. 'share:' .. class, total % UNIT, place .. '\ntail') end
  call('HSET', P .. 'places', place, packed)
  call('SADD', P .. 'pool:' .. pool, place)
  call('ZINCRBY', P .. 'free:' .. class, math.floor(total / UNIT) - math.floor(before / UNIT), place)
  lose_at(place, function() return tonumber(call('ZSCORE', P .. 'free:' .. class, place)) >= 0 end)
end

-- A binding's allocations, those on a node last.
local function with_last(allocs, node)
  local sorted = {}
  for _, last in ipairs({ false, true }) do
    for i = 1, #allocs, 3 do
      if (node_of(allocs[i]) == node) == last then
        for j = i, i + 2 do sorted[#sorted + 1] = allocs[j] end
      end
    end
  end
  return sorted
end

-- Gives `amount` of a binding back: what is on the node `leave` first, then the last taken; a whole unit that is cut
-- becomes a shared one.
local function shrink(id, rec, amount, leave)
  mark(rec, -1)
  rec.allocs = with_last(rec.allocs, leave)
  touched[rec.class] = true
  rec.amount = rec.amount - amount
  while amount > 0 do
    local last = #rec.allocs
    local place, slot, held = rec.allocs[last - 2], rec.allocs[last - 1], rec.allocs[last]
    local back = math.min(amount, held)
    if slot == '' and back % UNIT > 0 then
      local cut = call('HINCRBY', P .. 'meta', 'slot', 1)
      back = back % UNIT
      rec.allocs[last] = held - UNIT
      rec.allocs[last + 1], rec.allocs[last + 2], rec.allocs[last + 3] = place, tostring(cut), UNIT - back
      call('ZADD', P .. 'share:' .. rec.class, back, place .. '\n' .. cut)
    else
      rec.allocs[last] = held - back
      free(rec.class, place, slot, back)
    end
    amount = amount - back
    for n = #rec.allocs, 1, -3 do
      if rec.allocs[n] == 0 then
        for _ = 1, 3 do table.remove(rec.allocs, n - 2) end
      end
    end
  end
  mark(rec, 1)
  store(id, rec)
  emit('reconfigured', id, rec)
  return granted({ rec })
end
