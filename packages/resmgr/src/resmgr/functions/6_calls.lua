-- The calls a manager makes: each is one atomic change, safe to repeat after a lost answer.

local SCHEMA = '2'

local calls = {}

function calls.hello(session, ttl)
  local meta = call('HMGET', P .. 'meta', 'schema', 'ttl')
  if meta[1] and meta[1] ~= SCHEMA then return { 'schema', meta[1], SCHEMA } end
  local now = call('TIME')
  if not meta[1] then
    local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
    call('HSET', P .. 'meta', 'schema', SCHEMA, 'clock', 0, 'last', now_ms, 'token', 0)
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
  return { 'ok', call('ZRANGE', P .. 'leases', 0, -1) }
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
  join(class)
  call('HSET', P .. 'pools', name, definition)
  call('SADD', P .. 'classes', class)
  touched[class] = true
  emit('registered', name, { role = '', class = class, amount = 0, token = 0, owner = '' })
  return { 'ok' }
end

local function unknown(w)
  for i, is in ipairs(call('SMISMEMBER', P .. 'classes', unpack(w.wanted))) do
    if is == 0 then return { 'unknown', w.wanted[i], call('SMEMBERS', P .. 'classes') } end
  end
  return nil
end

-- Whether all parts of a waiter could be granted together if nothing were bound: the same search on an empty copy.
local function together(w, classes)
  local real, keys = P, {}
  P = real .. 'what-if:'
  for _, class in ipairs(classes) do
    for _, place in ipairs(call('ZRANGE', real .. 'free:' .. class, 0, -1)) do
      local total = info(place)[2]
      call('ZADD', P .. 'free:' .. class, math.floor(total / UNIT), place)
      if total % UNIT > 0 then call('ZADD', P .. 'share:' .. class, total % UNIT, place .. '\ntail') end
    end
    keys[#keys + 1], keys[#keys + 2] = P .. 'free:' .. class, P .. 'share:' .. class
  end
  local found = assign(w.parts, function() return true end, {})
  call('DEL', P .. 'roles', P .. 'antis', P .. 'meta', unpack(keys))
  P = real
  return found
end

-- The classes that could ever hold a waiter's parts; nil, and a report for the error, when they cannot.
local function feasible(w)
  local could, listed = {}, {}
  for i, part in ipairs(w.parts) do
    local some, report = false, {}
    for _, class in ipairs(part.spec.classes) do
      local all, largest, fits = capacity(class, part.spec)
      report[#report + 1] = { class, all, largest, fits }
      if fits >= part.spec.least then
        some = true
        if not listed[class] then could[#could + 1] = class end
        listed[class] = true
      end
    end
    if not some then return nil, { 'infeasible', cmsgpack.pack(report), i - 1 } end
  end
  if #w.parts > 1 and not together(w, could) then return nil, { 'infeasible', cmsgpack.pack({}), 0 } end
  return could
end

-- Serves a request that nobody is ahead of, from the first class that can; `near` knows better places in a class.
local function serve_first(w, near)
  if #w.parts > 1 then return serve(w, function() return true end, {}) end
  for _, class in ipairs(w.wanted) do
    local answer = near and near(class) or serve(w, function(name) return name == class end, {})
    if answer then return answer end
  end
end

local function idle(classes)
  local queues = {}
  for i, class in ipairs(classes) do queues[i] = P .. 'queue:' .. class end
  return call('EXISTS', unpack(queues)) == 0
end

-- Grants now what `w` asks, or lets it wait if it may; `w` is a waiter that stands in no queue yet.
local function ask(w, near, front, wait)
  local first = idle(w.wanted)
  if first then
    local answer = serve_first(w, near)
    if answer then return { 'granted', answer } end
  end
  local could, refused = feasible(w)
  if not could then return refused end
  w.classes = could
  enqueue(w, front)
  for _, class in ipairs(could) do
    local answer = not first and drain(class, w.id)
    if answer then return { 'granted', answer } end
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
  store(id, rec)
  return granted({ rec })
end

-- The places where a binding was, for `id` that was lost and is asked for again.
local function old_places(id, session, spec, last_class, last_allocs)
  return function(class)
    if class ~= last_class then return nil end
    local allocs, amount = take_again(class, spec, cmsgpack.unpack(last_allocs), admission(spec, {}))
    if not allocs then return nil end
    mark({ role = spec.role, apart = spec.apart, allocs = allocs }, 1)
    return granted({ grant(id, session, spec, class, allocs, amount) })
  end
end

function calls.bind(session, id, packed, wait, last_class, last_allocs)
  if not alive(session) then return { 'session' } end
  local rec = binding(id)
  if rec and rec.owner == session then return { 'granted', granted({ rec }) } end
  if rec and rec.holder ~= rec.owner and alive(rec.holder) then return { 'granted', adopt(id, rec, session) } end
  if rec then finish(id, rec, 'lost', 'lease') end -- of a session that has ended and was not swept yet
  local w = waiter(id)
  if w and w.owner == session then return { 'queued' } end
  if w then dequeue(w) end
  if call('EXISTS', P .. 'gone:' .. id) == 1 then return { 'withdrawn' } end
  local spec = read_spec(packed)
  w = waiter_of(id, session, { { id = id, spec = spec } }, '')
  local refused = unknown(w)
  if refused then return refused end
  local again = last_class ~= '' and old_places(id, session, spec, last_class, last_allocs)
  return ask(w, again, last_class ~= '', wait == '1')
end

-- Those of these bindings that there are, and whether these are all.
local function bindings_of(ids)
  local recs, all = {}, true
  for i, id in ipairs(ids) do
    recs[i] = binding(id) or false
    all = all and recs[i] and true
  end
  return recs, all
end

-- Several requests, all granted in one step or none: each an id and a packed spec.
function calls.bind_all(session, id, wait, ...)
  if not alive(session) then return { 'session' } end
  local rows, parts, ids = { ... }, {}, {}
  for i = 1, #rows, 2 do
    ids[#ids + 1] = rows[i]
    parts[#parts + 1] = { id = rows[i], spec = read_spec(rows[i + 1]) }
  end
  local recs, all = bindings_of(ids)
  if all and recs[1].owner == session then return { 'granted', granted(recs) } end
  for i, rec in ipairs(recs) do -- of a session that has ended, or what is left when a part was lost before it was known
    if rec then finish(ids[i], rec, 'lost', 'lease') end
  end
  local w = waiter(id)
  if w and w.owner == session then return { 'queued' } end
  if w then dequeue(w) end
  if call('EXISTS', P .. 'gone:' .. id) == 1 then return { 'withdrawn' } end
  w = waiter_of(id, session, parts, '')
  return unknown(w) or ask(w, nil, false, wait == '1')
end

local REMEMBERED = 60000

-- Leaves the queue. `targets` are the bindings that waiting was for: what was granted in the meantime is kept for a
-- caller that takes it, and released for one that does not. A request that has not arrived yet finds itself withdrawn.
function calls.withdraw(id, targets, keep)
  local w = waiter(id)
  if w then
    dequeue(w)
    return { 'withdrawn' }
  end
  local ids = cmsgpack.unpack(targets)
  local recs, all = bindings_of(ids)
  if all and keep == '1' then return { 'granted', granted(recs) } end
  local grows = ids[1] .. '+' == id
  for i, rec in ipairs(recs) do
    if rec and not grows then finish(ids[i], rec, 'released', 'cancelled') end
  end
  if not all and not grows then call('SET', P .. 'gone:' .. id, '', 'PX', REMEMBERED) end
  return { 'withdrawn' }
end

function calls.release(id, token, repeated)
  local rec, answer = current(id, token)
  if not rec then return repeated == '1' and { 'ok' } or answer end
  finish(id, rec, 'released')
  return { 'ok' }
end

-- Changes a binding from one amount to another: what it gives up is free at once, what it gains may have to wait.
-- `packed` is the spec of what it gains, `whole` that of all it would have then.
function calls.reconfigure(session, id, token, from, to, packed, whole, wait, leave)
  if not alive(session) then return { 'session' } end
  local rec, answer = current(id, token)
  if not rec then return answer end
  if rec.amount == tonumber(to) then return { 'granted', granted({ rec }) } end
  if rec.amount ~= tonumber(from) then return { 'changed', granted({ rec }) } end
  if tonumber(to) < rec.amount then return { 'granted', shrink(id, rec, rec.amount - tonumber(to), leave) } end
  local growth = id .. '+'
  if call('HEXISTS', P .. 'waiters', growth) == 1 then return { 'queued' } end
  local _, refused = feasible(waiter_of(growth, session, { { id = growth, spec = read_spec(whole) } }, id))
  if refused then return refused end
  local w = waiter_of(growth, session, { { id = growth, spec = read_spec(packed) } }, id)
  return ask(w, nil, false, wait == '1')
end

-- Takes the preferred class for a fallen binding, as a second binding: the first is released when its work has moved.
function calls.move_back(session, id, token, new)
  if not alive(session) then return { 'session' } end
  local have = binding(new)
  if have then return { 'granted', granted({ have }) } end
  local rec, answer = current(id, token)
  if not rec then return answer end
  if call('EXISTS', P .. 'gone:' .. new) == 1 then return { 'withdrawn' } end
  local packed = call('HGET', P .. 'fell:' .. rec.owner, id)
  local row = packed and cmsgpack.unpack(packed)
  local spec = row and not moved(row) and read_spec(row[1])
  local class = spec and better(spec, rec.amount)
  if not class then return { 'busy' } end
  local allocs, amount = take(class, spec, admission(spec, {}), {})
  mark({ role = spec.role, apart = spec.apart, allocs = allocs }, 1)
  local second = grant(new, session, spec, class, allocs, amount, 'moved_back', id)
  call('HSET', P .. 'fell:' .. rec.owner, id, cmsgpack.pack({ row[1], -1, new }))
  return { 'granted', granted({ second }) }
end

-- Puts a binding under the lease of another session: the one that runs on it.
function calls.hold(session, id, token)
  if not alive(session) then return { 'session' } end
  local rec, answer = current(id, token)
  if not rec then return answer end
  call('SMOVE', P .. 'held:' .. rec.holder, P .. 'held:' .. session, id)
  rec.holder = session
  store(id, rec)
  return { 'granted', granted({ rec }) }
end

function calls.annotate(id, token, note)
  local rec, answer = current(id, token)
  if not rec then return answer end
  if note ~= '' then call('HSET', P .. 'notes', id, note) end
  return { 'ok' }
end

local function last_event()
  local last = call('XREVRANGE', P .. 'events', '+', '-', 'COUNT', 1)[1]
  return last and last[1] or '0-0'
end

-- The first event still kept, and the last.
function calls.position()
  local first = call('XRANGE', P .. 'events', '-', '+', 'COUNT', 1)[1]
  return { 'ok', first and first[1] or '', last_event() }
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
    waiting[#waiting + 1] = cmsgpack.pack({ id, w.role, w.amount, w.classes, w.priority })
  end
  local meta = call('HMGET', P .. 'meta', 'schema', 'ttl', 'clock')
  return { 'ok', meta, last_event(), call('HGETALL', P .. 'pools'), room, call('HGETALL', P .. 'bindings'), waiting,
    call('ZRANGE', P .. 'leases', 0, -1, 'WITHSCORES'), call('HGETALL', P .. 'notes'), call('HGETALL', P .. 'counts') }
end

local function enter(keys, args)
  P, PLACES, call, touched = keys[1], keys[1] .. 'places', redis.call, {}
  local answer = calls[args[1]](unpack(args, 2))
  settle()
  return answer
end
