-- The calls a manager makes: each is one atomic change, safe to repeat after a lost answer.

local SCHEMA = '1'

local calls = {}

function calls.hello(session, ttl)
  local waiting = {}
  for _, id in ipairs(call('HKEYS', P .. 'waiters')) do
    local w = waiter(id)
    local amount = w.spec.count * w.spec.chunk + w.spec.tail
    waiting[#waiting + 1] = cmsgpack.pack({ id, w.spec.role, amount, w.classes, w.spec.priority })
  end
  local meta = call('HMGET', P .. 'meta', 'schema', 'ttl')
  if meta[1] and meta[1] ~= SCHEMA then return { 'schema', meta[1], SCHEMA } end
  local now = call('TIME')
  if not meta[1] then
    local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
    -- Tokens begin at the time in microseconds, so that they go on rising when a store has lost everything.
    call('HSET', P .. 'meta', 'schema', SCHEMA, 'clock', 0, 'last', now_ms, 'token', now[1] .. string.format('%06d', now[2]))
  end
  if ttl == '' then ttl = meta[2] or '10000' end
  if meta[2] and meta[2] ~= ttl then
    sweep(tick())
    if call('EXISTS', P .. 'leases') == 1 then return { 'ttl', meta[2] } end
  end
  call('HSET', P .. 'meta', 'ttl', ttl)
  call('ZADD', P .. 'leases', tick() + tonumber(ttl), session)
  return { 'ok', ttl }
end

function calls.beat(session, settle_ms, seen, cursor)
  if not alive(session) then return { 'session' } end
  local clock, ttl = tick()
  call('ZADD', P .. 'leases', clock + ttl, session)
  call('XTRIM', P .. 'inbox:' .. session, 'MINID', seen)
  local more = sweep(clock)
  return { 'ok', more and 1 or 0, offer(session, clock, tonumber(settle_ms), cursor) }
end

function calls.sessions()
  return { 'ok', unpack(call('ZRANGE', P .. 'leases', 0, -1)) }
end

-- A session is known to be dead: the next heartbeat takes back what it held.
function calls.expire(session)
  if call('ZREM', P .. 'leases', session) == 1 then call('SADD', P .. 'dying', session) end
  return { 'ok' }
end

-- Ends a session at once: gives up the bindings that it owns, the ones it only holds, and its places in the queue.
function calls.bye(session, owned)
  for _, id in ipairs(cmsgpack.unpack(owned)) do
    local rec = binding(id)
    if rec and rec.owner == session then finish(id, rec, 'released', 'closed') end
  end
  for _, id in ipairs(call('SMEMBERS', P .. 'waits:' .. session)) do dequeue(waiter(id)) end
  for _, id in ipairs(call('SMEMBERS', P .. 'held:' .. session)) do
    local rec = binding(id)
    if rec.owner == session then finish(id, rec, 'released', 'closed') else lose(id, rec, 'closed') end
  end
  call('ZREM', P .. 'leases', session)
  call('DEL', P .. 'inbox:' .. session, P .. 'fell:' .. session)
  return { 'ok' }
end

-- Adds a pool; `nodes` is packed {place, total, labels, ...}. With another definition of the same name: "replace" puts it
-- in place and ends the bindings that no longer fit, "missing" leaves the old one, "new" refuses.
function calls.register(name, definition, class, nodes, mode)
  local old = call('HGET', P .. 'pools', name)
  if old == definition then return { 'ok' } end
  if old and mode == 'new' then return { 'mismatch', old } end
  if old and mode == 'missing' then return { 'ok' } end
  local wanted = {}
  nodes = cmsgpack.unpack(nodes)
  for i = 1, #nodes, 3 do wanted[nodes[i]] = cmsgpack.pack({ class, nodes[i + 1], nodes[i + 2] }) end
  evict(name, wanted)
  for place, packed in pairs(wanted) do install(name, place, packed) end
  call('HSET', P .. 'pools', name, definition)
  call('SADD', P .. 'classes', class)
  touched[class] = true
  emit('registered', name, { role = '', class = class, amount = 0, token = 0, owner = '' })
  return { 'ok' }
end

local function unknown(spec)
  for _, class in ipairs(spec.classes) do
    if call('SISMEMBER', P .. 'classes', class) == 0 then
      return { 'unknown', class, call('SMEMBERS', P .. 'classes') }
    end
  end
  return nil
end

-- The classes that could ever hold a request, and a report on each for the error when there is none.
local function feasible(spec)
  local could, report = {}, {}
  for _, class in ipairs(spec.classes) do
    local all, largest, fits = capacity(class, spec)
    if fits >= spec.least then could[#could + 1] = class end
    report[#report + 1] = { class, all, largest, fits }
  end
  return could, report
end

-- Grants now what `w` asks, or lets it wait if it may; `w` is a waiter that stands in no queue yet.
local function ask(w, near, front, wait)
  local idle = true
  for _, class in ipairs(w.spec.classes) do
    if call('EXISTS', P .. 'queue:' .. class) == 1 then idle = false end
  end
  if idle then
    for _, class in ipairs(w.spec.classes) do
      local packed = near(class) or serve(w, class, {})
      if packed then return { 'granted', packed } end
    end
  end
  local could, report = feasible(w.spec)
  if #could == 0 then return { 'infeasible', cmsgpack.pack(report) } end
  enqueue(w.id, w.owner, w.spec, could, front, w.grows)
  w.classes = could
  for _, class in ipairs(could) do
    local packed = not idle and drain(class, w.id)
    if packed then return { 'granted', packed } end
  end
  if wait then return { 'queued' } end
  dequeue(w)
  return { 'busy' }
end

-- Another process runs on the binding: its owner is back, under a new session.
local function adopt(id, rec, session)
  local fallen = call('HGET', P .. 'fell:' .. rec.owner, id)
  if fallen then call('HSET', P .. 'fell:' .. session, id, fallen) end
  rec.owner = session
  local packed = pack(rec)
  call('HSET', P .. 'bindings', id, packed)
  return packed
end

function calls.bind(session, id, packed, wait, last_class, last_allocs)
  if not alive(session) then return { 'session' } end
  local rec = binding(id)
  if rec and rec.owner == session then return { 'granted', pack(rec) } end
  if rec and rec.holder ~= rec.owner and alive(rec.holder) then return { 'granted', adopt(id, rec, session) } end
  if rec then finish(id, rec, 'lost', 'lease') end -- of a session that has ended and was not swept yet
  local w = waiter(id)
  if w and w.owner == session then return { 'queued' } end
  if w then dequeue(w) end
  if call('EXISTS', P .. 'gone:' .. id) == 1 then return { 'withdrawn' } end
  local spec = read_spec(packed)
  local refused = unknown(spec)
  if refused then return refused end
  local function near(class)
    if class ~= last_class then return nil end
    local allocs, amount = take_again(class, cmsgpack.unpack(last_allocs), admission(spec, {}))
    return allocs and grant(id, session, spec, class, allocs, amount)
  end
  return ask({ id = id, owner = session, spec = spec, grows = '' }, near, last_class ~= '', wait == '1')
end

local REMEMBERED = 60000

-- Leaves the queue. `target` is the binding that waiting was for: what it was granted in the meantime is kept for a
-- caller that takes it, and released for one that does not. A request that has not arrived yet finds itself withdrawn.
function calls.withdraw(id, target, keep)
  local w = waiter(id)
  if w then
    dequeue(w)
    return { 'withdrawn' }
  end
  local packed = call('HGET', P .. 'bindings', target)
  if not packed then
    if id == target then call('SET', P .. 'gone:' .. id, '', 'PX', REMEMBERED) end
    return { 'withdrawn' }
  end
  if keep == '1' then return { 'granted', packed } end
  finish(target, unpack_record(packed), 'released', 'cancelled')
  return { 'withdrawn' }
end

function calls.release(id, token, repeated)
  local rec, answer = current(id, token)
  if not rec then return repeated == '1' and { 'ok' } or answer end
  finish(id, rec, 'released')
  return { 'ok' }
end

-- Changes a binding from one amount to another: what it gives up is free at once, what it gains may have to wait.
function calls.reconfigure(session, id, token, from, to, packed, wait)
  if not alive(session) then return { 'session' } end
  local rec, answer = current(id, token)
  if not rec then return answer end
  if rec.amount == tonumber(to) then return { 'granted', pack(rec) } end
  if rec.amount ~= tonumber(from) then return { 'changed', pack(rec) } end
  if tonumber(to) < rec.amount then return { 'granted', shrink(id, rec, rec.amount - tonumber(to)) } end
  local grow = id .. '+'
  if call('HEXISTS', P .. 'waiters', grow) == 1 then return { 'queued' } end
  local w = { id = grow, owner = session, spec = read_spec(packed), grows = id }
  return ask(w, function() return nil end, false, wait == '1')
end

-- Takes the preferred class for a fallen binding, as a second binding: the first is released when its work has moved.
function calls.move_back(session, id, token, new)
  if not alive(session) then return { 'session' } end
  local have = call('HGET', P .. 'bindings', new)
  if have then return { 'granted', have } end
  local rec, answer = current(id, token)
  if not rec then return answer end
  if call('EXISTS', P .. 'gone:' .. new) == 1 then return { 'withdrawn' } end
  local fallen = call('HGET', P .. 'fell:' .. rec.owner, id)
  local spec = fallen and read_spec(cmsgpack.unpack(fallen)[1])
  local class = spec and better(spec, rec.amount)
  if not class then return { 'busy' } end
  local allocs, amount = take(class, spec, admission(spec, {}), {})
  local packed = grant(new, session, spec, class, allocs, amount, 'moved_back', id)
  call('HDEL', P .. 'fell:' .. rec.owner, id)
  return { 'granted', packed }
end

-- Puts a binding under the lease of another session: the one that runs on it.
function calls.hold(session, id, token)
  if not alive(session) then return { 'session' } end
  local rec, answer = current(id, token)
  if not rec then return answer end
  call('SMOVE', P .. 'held:' .. rec.holder, P .. 'held:' .. session, id)
  rec.holder = session
  local packed = pack(rec)
  call('HSET', P .. 'bindings', id, packed)
  return { 'granted', packed }
end

function calls.annotate(id, token, note)
  local rec, answer = current(id, token)
  if not rec then return answer end
  if note ~= '' then call('HSET', P .. 'notes', id, note) end
  return { 'ok' }
end

-- The first event still kept, and the last.
function calls.position()
  local first = call('XRANGE', P .. 'events', '-', '+', 'COUNT', 1)[1]
  return { 'ok', first and first[1] or '', call('HGET', P .. 'meta', 'events') or '0' }
end

-- Everything, at one instant.
function calls.snapshot()
  local room = {}
  for _, class in ipairs(call('SMEMBERS', P .. 'classes')) do
    room[#room + 1] = call('ZRANGE', P .. 'free:' .. class, 0, -1, 'WITHSCORES')
    room[#room + 1] = call('ZRANGE', P .. 'share:' .. class, 0, -1, 'WITHSCORES')
  end
  local waiting = {}
  for _, id in ipairs(call('HKEYS', P .. 'waiters')) do
    local w = waiter(id)
    local amount = w.spec.count * w.spec.chunk + w.spec.tail
    waiting[#waiting + 1] = cmsgpack.pack({ id, w.spec.role, amount, w.classes, w.spec.priority })
  end
  local meta = call('HMGET', P .. 'meta', 'schema', 'ttl', 'clock', 'events')
  return { 'ok', meta, call('HGETALL', P .. 'pools'), room, call('HGETALL', P .. 'bindings'), waiting,
    call('ZRANGE', P .. 'leases', 0, -1, 'WITHSCORES'), call('HGETALL', P .. 'notes'), call('HGETALL', P .. 'counts') }
end

local function enter(keys, args)
  P, call, touched = keys[1], redis.call, {}
  local answer = calls[args[1]](unpack(args, 2))
  settle()
  return answer
end
