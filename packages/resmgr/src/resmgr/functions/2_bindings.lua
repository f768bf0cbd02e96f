-- Bindings: what is granted to whom, under which fencing token, and the events that say so.
--
--   bindings      hash   id -> packed {owner, holder, token, class, fell_back, amount, chunk, role, apart, allocs}
--   held:SESSION  set    ids that end with the session's lease
--   fell:SESSION  hash   id -> packed {spec, fits_since, moved_to} of bindings on a fallback class
--   counts        hash   event kind -> how often since the store began
--   notes         hash   id -> what the holder wrote beside its binding
--   events        stream "0-N", N without gaps: a reader that misses one sees it
--   inbox:SESSION stream what the store did for a session on its own: granted, lost

local EVENTS_KEPT = 10000

-- Classes in which something became free during this call: their queues are served before it ends.
local touched

local function emit(kind, id, rec, reason, previous)
  call('HINCRBY', P .. 'counts', kind, 1)
  local now = call('TIME')
  local event = { kind, id, rec.role, rec.class, rec.amount, rec.token, rec.owner, reason or '', previous or '',
    now[1] * 1000 + math.floor(now[2] / 1000) }
  call('XADD', P .. 'events', 'MAXLEN', '~', EVENTS_KEPT, '0-*', 'e', cmsgpack.pack(event))
end

local function alive(session)
  return call('ZSCORE', P .. 'leases', session)
end

local function tell(session, kind, id, body)
  if alive(session) then call('XADD', P .. 'inbox:' .. session, '*', 'm', kind .. '\n' .. id .. '\n' .. body) end
end

local FIELDS = { 'owner', 'holder', 'token', 'class', 'fell_back', 'amount', 'chunk', 'role', 'apart', 'allocs' }

local function row_of(rec)
  local row = {}
  for i, name in ipairs(FIELDS) do row[i] = rec[name] end
  return row
end

local function store(id, rec)
  call('HSET', P .. 'bindings', id, cmsgpack.pack(row_of(rec)))
end

-- The answer that these bindings are the caller's.
local function granted(recs)
  local rows = {}
  for i, rec in ipairs(recs) do rows[i] = row_of(rec) end
  return cmsgpack.pack(rows)
end

local function unpack_record(packed)
  local row, rec = cmsgpack.unpack(packed), {}
  for i, name in ipairs(FIELDS) do rec[name] = row[i] end
  return rec
end

local function binding(id)
  local packed = call('HGET', P .. 'bindings', id)
  return packed and unpack_record(packed)
end

-- The binding, if `token` is its own; otherwise nil and the answer to give.
local function current(id, token)
  local rec = binding(id)
  if not rec then return nil, { 'stale', '' } end
  if string.format('%.0f', rec.token) ~= token then return nil, { 'stale', string.format('%.0f', rec.token) } end
  return rec
end

local function read_spec(packed)
  local s = cmsgpack.unpack(packed)
  local classes = {}
  for _, class in ipairs(s[2]) do classes[#classes + 1] = class end
  for _, class in ipairs(s[3]) do classes[#classes + 1] = class end
  return { packed = packed, role = s[1], prefer = s[2], classes = classes, count = s[4], chunk = s[5], tail = s[6],
    least = s[7], spread = s[8], apart = s[9], labels = s[10], priority = s[11], avoid = s[12] }
end

local function preferred(spec, class)
  for _, name in ipairs(spec.prefer) do
    if name == class then return true end
  end
  return false
end

-- Higher than all before, and no lower than the time in microseconds: so it goes on rising where the last writes are lost.
local function next_token()
  local now = call('TIME')
  local token = math.max(tonumber(call('HGET', P .. 'meta', 'token')) + 1, now[1] * 1000000 + now[2])
  call('HSET', P .. 'meta', 'token', string.format('%.0f', token))
  return token
end

-- Makes amounts that were taken and marked a binding.
local function grant(id, owner, spec, class, allocs, amount, kind, previous)
  local fell = not preferred(spec, class)
  local rec = { owner = owner, holder = owner, token = next_token(), class = class,
    fell_back = fell and 1 or 0, amount = amount, chunk = spec.chunk, role = spec.role, apart = spec.apart, allocs = allocs }
  store(id, rec)
  call('SADD', P .. 'held:' .. owner, id)
  if fell then call('HSET', P .. 'fell:' .. owner, id, cmsgpack.pack({ spec.packed, -1 })) end
  emit(kind or (fell and 'fell_back' or 'bound'), id, rec, '', previous)
  return rec
end

-- Ends a binding; its amounts return here and nowhere else.
local function drop(id, rec, kind, reason)
  call('HDEL', P .. 'bindings', id)
  call('HDEL', P .. 'notes', id)
  call('SREM', P .. 'held:' .. rec.holder, id)
  if rec.fell_back == 1 then call('HDEL', P .. 'fell:' .. rec.owner, id) end
  mark(rec, -1)
  free_all(rec.class, rec.allocs)
  touched[rec.class] = true
  emit(kind, id, rec, reason)
end
