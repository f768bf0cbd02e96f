-- The queue: who waits for which class, in order of priority, then of arrival.
--
--   waiters        hash  id -> packed {owner, spec, rank, grows, classes}
--   waits:SESSION  set   ids that leave the queue with the session's lease
--   queue:CLASS    zset  id -> rank
-- A waiter stands in the queue of every class that could ever hold it, and is served by the first that can. Nobody
-- overtakes it there, except onto places that its labels exclude; so it cannot starve, and a class it cannot use goes on.

local MOST_CLAIMS = 16

local function waiter(id)
  local packed = call('HGET', P .. 'waiters', id)
  if not packed then return nil end
  local row = cmsgpack.unpack(packed)
  return { id = id, owner = row[1], spec = read_spec(row[2]), grows = row[4], classes = row[5] }
end

local function enqueue(id, owner, spec, classes, front, grows)
  local arrival = call('HINCRBY', P .. 'meta', 'arrivals', 1)
  local rank = -spec.priority * 2 ^ 40 + (front and 0 or arrival)
  call('HSET', P .. 'waiters', id, cmsgpack.pack({ owner, spec.packed, rank, grows, classes }))
  call('SADD', P .. 'waits:' .. owner, id)
  for _, class in ipairs(classes) do call('ZADD', P .. 'queue:' .. class, rank, id) end
end

local function dequeue(w)
  call('HDEL', P .. 'waiters', w.id)
  call('SREM', P .. 'waits:' .. w.owner, w.id)
  for _, class in ipairs(w.classes) do
    call('ZREM', P .. 'queue:' .. class, w.id)
    touched[class] = true
  end
end

-- Adds what a growing binding took.
local function extend(id, allocs, amount)
  local rec = binding(id)
  mark(rec, -1)
  for _, value in ipairs(allocs) do rec.allocs[#rec.allocs + 1] = value end
  mark(rec, 1)
  rec.amount = rec.amount + amount
  local packed = pack(rec)
  call('HSET', P .. 'bindings', id, packed)
  emit('reconfigured', id, rec)
  return packed
end

-- Grants a waiter, or a request about to wait, what it asks of one class; nil when that does not fit now.
local function serve(w, class, claimed)
  local used = {}
  if w.grows ~= '' then
    for _, part in ipairs(binding(w.grows).allocs) do used[part] = true end
  end
  local allocs, amount = take(class, w.spec, admission(w.spec, claimed), used)
  if not allocs then return nil end
  if w.grows ~= '' then return extend(w.grows, allocs, amount) end
  return grant(w.id, w.owner, w.spec, class, allocs, amount)
end

-- Serves the queue of a class as far as its order allows.
local function drain(class, asker)
  local claimed, at, served = {}, 0, nil
  while true do
    local id = call('ZRANGE', P .. 'queue:' .. class, at, at)[1]
    if not id then return served end
    local w = waiter(id)
    local packed = serve(w, class, claimed)
    if packed then
      dequeue(w)
      if id == asker then served = packed else tell(w.owner, 'granted', id, packed) end
    elseif next(w.spec.labels) == nil or #claimed == MOST_CLAIMS then
      return served
    else
      claimed[#claimed + 1] = w.spec.labels
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

-- A binding that ends takes its wish to grow with it.
local function finish(id, rec, kind, reason)
  local grow = waiter(id .. '+')
  if grow then dequeue(grow) end
  drop(id, rec, kind, reason)
end

local function lose(id, rec, reason)
  finish(id, rec, 'lost', reason)
  tell(rec.owner, 'lost', id, string.format('%.0f', rec.token))
end
