-- Leases: a session lives while its manager's heartbeats arrive.
--
--   leases   zset   session -> when it ends, on the lease clock
--   dying    set    ended sessions whose bindings have not all been taken back yet
--   meta     hash   clock, last, ttl, schema, counters
-- The lease clock counts the time in which the store answered: an outage, however long, moves it by half a TTL at most,
-- so that a restart or a partition of the store ends nobody's lease before its holder could reconnect.

local SWEPT_AT_ONCE = 256
local OFFER_AGAIN = 10

local function tick()
  local meta = call('HMGET', P .. 'meta', 'clock', 'last', 'ttl')
  local now = call('TIME')
  now = now[1] * 1000 + math.floor(now[2] / 1000)
  local passed = math.max(0, math.min(now - tonumber(meta[2]), tonumber(meta[3]) / 2))
  local clock = math.floor(tonumber(meta[1]) + passed)
  call('HSET', P .. 'meta', 'clock', clock, 'last', now)
  return clock, tonumber(meta[3])
end

-- Takes back what ended sessions held, a bounded part at a time; true when more is left.
local function sweep(clock)
  local ended = call('ZRANGEBYSCORE', P .. 'leases', '-inf', clock)
  for _, session in ipairs(ended) do
    call('ZREM', P .. 'leases', session)
    call('SADD', P .. 'dying', session)
  end
  local budget = SWEPT_AT_ONCE
  for _, session in ipairs(call('SMEMBERS', P .. 'dying')) do
    for _, id in ipairs(call('SRANDMEMBER', P .. 'waits:' .. session, budget)) do
      dequeue(waiter(id))
      budget = budget - 1
    end
    for _, id in ipairs(call('SRANDMEMBER', P .. 'held:' .. session, budget)) do
      lose(id, binding(id), 'lease')
      budget = budget - 1
    end
    if budget <= 0 then return true end
    call('SREM', P .. 'dying', session)
    call('DEL', P .. 'inbox:' .. session, P .. 'fell:' .. session)
  end
  return false
end

-- The preferred class that could take a fallen binding now, past everybody who waits; `spec` becomes its present amount.
local function better(spec, amount)
  spec.count, spec.tail, spec.least = math.floor(amount / spec.chunk), amount % spec.chunk, amount
  for _, class in ipairs(spec.prefer) do
    if call('EXISTS', P .. 'queue:' .. class) == 0 then
      local allocs = take(class, spec, admission(spec, {}), {})
      if allocs then
        free_all(class, allocs)
        return class
      end
    end
  end
  return nil
end

-- Whether a fallen binding has a second one, to which it moves: then nothing better is offered.
local function moved(row)
  return row[3] and call('HEXISTS', P .. 'bindings', row[3]) == 1
end

-- Offers one fallen binding of a session its preferred class, when that has had room for `settle_ms` without a break.
local function offer(session, clock, settle_ms, cursor)
  local page = call('HSCAN', P .. 'fell:' .. session, cursor, 'COUNT', 64)
  local offered = false
  for i = 1, #page[2], 2 do
    local id, row = page[2][i], cmsgpack.unpack(page[2][i + 1])
    local rec = binding(id)
    local class = not moved(row) and better(read_spec(row[1]), rec.amount)
    local since = class and (row[2] < 0 and clock or row[2]) or -1
    if class and not offered and clock - since >= settle_ms then
      offered = true
      since = clock + (OFFER_AGAIN - 1) * settle_ms
      rec.class = class
      emit('move_offered', id, rec)
    end
    if since ~= row[2] then call('HSET', P .. 'fell:' .. session, id, cmsgpack.pack({ row[1], since, row[3] })) end
  end
  return page[1]
end
