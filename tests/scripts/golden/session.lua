#!lua flags=allow-oom
-- session: closes a session, gives the next serial command its turn, turns a closed session into tombstones, and moves
-- a client's cursor forward.
-- KEYS close  1 meta  2 session  3 due
--      turn   1 meta  2 session  3 due  4 queue  5 op that is busy (or op of next)  6 op of next  7 outbox of its peer
--      purge  1 meta  2 session  3 due  4 queue  5 updates  6 cursors, then the ops to reduce
--      cursor 1 meta  2 session  3 due  4 cursors
-- ARGV 1 verb  2 authority  3 policy revision  4 not after ms  5 wake message  6 session id, then
--      turn   7 busy as loaded ('' none)  8 next as loaded ('' none)  9 claim timeout ms  10 message id
--      purge  7 last chunk (1 or 0)
--      cursor 7 client  8 cursor  9 clients a session may have
-- Replies {code, now, ...}: close OK phase · turn OK which (dispatched, idle) · purge OK phase
--   cursor OK cursor (the one now held) · EXHAUSTED (too many clients) · INVALID head (beyond it)
--   NOT_FOUND · SESSION_CLOSING · HALTED · CONFLICT (what was loaded moved) · HELD until · TERMINAL · AUTHORITY_LOST
--   EPOCH_MOVED · STALE_SNAPSHOT which revision · CLOCK_ROLLBACK by-ms · OUTSIDE_WINDOW which · INVALID which
-- Facts written: none; a closed session never gets another fact.
-- Invariants: one command at a time, in admission order; a seat behind an open gate is free only when its lease has run
--   out; a purge touches settled operations only and the session closes when all of its commands are tombstones; ids
--   stay unusable (DASP-CORE-012f); the quotas get back what a purge removes.
-- The one reading of the store's clock, in whole milliseconds (RT-CTX-06, RT-GUARD-02).
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
-- The replication id of the server that runs this, '' where it refuses to tell. Another one is another epoch.
local function replication_id()
  local info = redis.pcall('INFO', 'replication')
  return type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
end
local MAX_SAFE = 9007199254740991

-- Lua prints 13-digit numbers through %.14g; instants and sequences are formatted whole.
local function whole(n)
  return string.format('%.0f', n)
end

-- First checks of every script: authority, then the server's replication id (another one means another epoch),
-- then the policy revision ('' where evidence is stored whatever the policy says).
-- Gives the tenant's meta values, or nil and the refusal.
local function enter(meta_key, now, authority, policy_revision)
  local m = redis.call('HMGET', meta_key, 'authority', 'replid', 'epoch', 'policy_rev', 'last_ms', 'dir_rev',
    'usage', 'limits')
  if m[1] ~= authority then
    return nil, { 'AUTHORITY_LOST', now }
  end
  if replication_id() ~= m[2] then
    return nil, { 'EPOCH_MOVED', now }
  end
  if policy_revision ~= '' and policy_revision ~= m[4] then
    return nil, { 'STALE_SNAPSHOT', now, 'policy', m[4] }
  end
  return { epoch = m[3], last = tonumber(m[5]), directory = m[6], usage = m[7], limits = m[8] }
end

-- A hint to whoever watches the tenant; the truth is always re-read from the keys.
local function wake(message)
  redis.call('PUBLISH', string.sub(KEYS[1], 1, -5) .. 'wake', message)
end
-- Rollback is told before outside-window (RT-GUARD-04..08, RT-GUARD-17): lower bound inclusive, upper exclusive.
local function outside(meta, now, not_before, not_after)
  if not not_before or not not_after or not_before >= not_after or not_after > MAX_SAFE then
    return { 'INVALID', now, 'guard' }
  end
  if now < meta.last then
    return { 'CLOCK_ROLLBACK', now, whole(meta.last - now) }
  end
  if now < not_before or now >= not_after then
    return { 'OUTSIDE_WINDOW', now, 'guard' }
  end
end
-- A branch record is twelve ASCII words; '-' stands for "none". The only stored text these scripts parse.
-- status peer attempt epoch fence holder until gate claims next outbox digest
local STATUS, PEER, ATTEMPT, EPOCH, FENCE, HOLDER = 1, 2, 3, 4, 5, 6
local UNTIL, GATE, CLAIMS, NEXT, OUTBOX, DIGEST = 7, 8, 9, 10, 11, 12
local BRANCH_PATTERN = '^(%S+) (%S+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S+) (%d+) (%d+) (%S+) (%S+)$'

-- nil for anything else, also for nothing.
local function parse_branch(raw)
  local b = { string.match(raw or '', BRANCH_PATTERN) }
  return b[1] and b
end

local function format_branch(b)
  return table.concat(b, ' ')
end
-- What a tenant may keep and what it keeps: two fields of meta, whole numbers between single spaces.
-- limits  operations bytes open sessions record outbox rate burst streams waiters (the last two are the services' own)
-- usage   operations bytes open sessions paid; paid is the instant, in µs, up to which admissions have used the rate
local USAGE = '^(%d+) (%d+) (%d+) (%d+) (%d+)$'

-- The usage with these changes, nil where it cannot be read. What was never counted is not counted off.
local function counted(usage, operations, bytes, open, sessions)
  local kept, size, unsettled, live, paid = string.match(usage or '', USAGE)
  return kept and string.format('%d %d %d %d %s', math.max(0, kept + operations), math.max(0, size + bytes),
    math.max(0, unsettled + open), math.max(0, live + sessions), paid)
end
local now = now_ms()
local meta, refusal = enter(KEYS[1], now, ARGV[2], ARGV[3])
if refusal then
  return refusal
end
local session = redis.call('HMGET', KEYS[2], 'phase', 'busy', 'halted', 'pending', 'commands', 'purged', 'actor', 'profile',
  'profile_version', 'owner', 'head', 'bytes')
if not session[1] or session[1] == 'closed' then
  return { 'NOT_FOUND', now }
end
refusal = outside(meta, now, 0, tonumber(ARGV[4]))
if refusal then
  return refusal
end
local NEXT_TURN = '-' -- busy: the seat is free for the first in the queue
local verb, turn = ARGV[1], 'turn:' .. ARGV[6]
redis.call('ZCARD', KEYS[3])

local function committed(...)
  redis.call('HSET', KEYS[2], ...)
  redis.call('HSET', KEYS[1], 'last_ms', whole(now))
  wake(ARGV[5])
end

if verb == 'close' then
  redis.call('ZADD', KEYS[3], whole(now), turn)
  committed('phase', 'closing')
  return { 'OK', now, 'closing' }
end

if verb == 'turn' then
  if session[1] ~= 'open' then
    -- While its commands still run a closing session has nothing to wake up for: the last of them to end wakes it.
    if session[4] ~= '0' then
      redis.call('ZREM', KEYS[3], turn)
    end
    return { 'SESSION_CLOSING', now }
  end
  local busy, next_id = ARGV[7], ARGV[8]
  if session[2] ~= busy or (redis.call('ZRANGE', KEYS[4], 0, 0)[1] or '') ~= next_id then
    return { 'CONFLICT', now }
  end
  if busy ~= '' and busy ~= NEXT_TURN then
    local r = redis.call('HMGET', KEYS[5], 'phase', 'b:0')
    local b = parse_branch(r[2])
    if r[1] ~= 'settled' then
      redis.call('ZREM', KEYS[3], turn)
      return { 'HELD', now, '' }
    end
    if b[GATE] == 'open' and tonumber(b[UNTIL]) > now then
      redis.call('ZADD', KEYS[3], b[UNTIL], turn)
      return { 'HELD', now, b[UNTIL] }
    end
  end
  if next_id == '' or session[3] ~= '' then
    redis.call('ZREM', KEYS[3], turn)
    committed('busy', '')
    return { session[3] ~= '' and 'HALTED' or 'OK', now, 'idle' }
  end
  local r = redis.call('HMGET', KEYS[6], 'at', 'phase', 'b:0')
  local b = parse_branch(r[3])
  if not b or b[STATUS] ~= 'pending' or (r[2] ~= 'admitted' and r[2] ~= 'active') then
    return { 'TERMINAL', now }
  end
  -- The outbox is named by the caller: that of another peer is never touched.
  if string.match(KEYS[7], '[^:]+$') ~= b[PEER] then
    return { 'CONFLICT', now }
  end
  local deadline = tonumber(string.match(r[1], '^%d+ (%d+)'))
  if now >= deadline then
    return { 'OUTSIDE_WINDOW', now, 'deadline' }
  end
  b[OUTBOX] = redis.call('XADD', KEYS[7], '*', 'k', 'request', 'o', next_id, 'b', '0', 'a', b[ATTEMPT], 's', ARGV[6],
    'm', ARGV[10])
  b[UNTIL] = whole(math.min(deadline, now + ARGV[9]))
  redis.call('HSET', KEYS[6], 'b:0', format_branch(b))
  redis.call('ZREM', KEYS[4], next_id)
  redis.call('ZADD', KEYS[3], b[UNTIL], next_id)
  redis.call('ZREM', KEYS[3], turn)
  committed('busy', next_id)
  return { 'OK', now, 'dispatched' }
end

if verb == 'purge' then
  if session[1] ~= 'closing' or session[4] ~= '0' then
    return { 'CONFLICT', now }
  end
  local kept, named = {}, {}
  for i = 7, #KEYS do
    local r = redis.call('HMGET', KEYS[i], 'phase', 'intent', 'tombstone')
    if not r[3] and not named[KEYS[i]] then
      if r[1] ~= 'settled' then
        return { 'CONFLICT', now }
      end
      named[KEYS[i]] = true
      kept[#kept + 1] = { KEYS[i], r[2] }
    end
  end
  local purged = tonumber(session[6] or '0') + #kept
  local last = ARGV[7] == '1'
  if last and purged ~= tonumber(session[5]) then
    return { 'CONFLICT', now }
  end
  -- A tombstone is rebuilt, not thinned: a hash that lost its large fields keeps their encoding.
  for _, record in ipairs(kept) do
    redis.call('DEL', record[1])
    redis.call('HSET', record[1], 'v', '1', 'intent', record[2], 'tombstone', ARGV[6])
  end
  local usage = counted(meta.usage, -#kept, last and -(session[12] or 0) or 0, 0, last and -1 or 0)
  if usage then
    redis.call('HSET', KEYS[1], 'usage', usage)
  end
  if last then
    redis.call('DEL', KEYS[2], KEYS[4], KEYS[5], KEYS[6])
    redis.call('ZREM', KEYS[3], turn)
    committed('v', '1', 'phase', 'closed', 'actor', session[7], 'profile', session[8], 'profile_version', session[9],
      'owner', session[10])
    return { 'OK', now, 'closed' }
  end
  committed('purged', whole(purged))
  return { 'OK', now, 'closing' }
end

if verb == 'cursor' then
  local client, wanted = ARGV[7], tonumber(ARGV[8])
  if wanted > tonumber(session[11]) then
    return { 'INVALID', now, 'head' }
  end
  local held = redis.call('HGET', KEYS[4], client)
  if not held and redis.call('HLEN', KEYS[4]) >= tonumber(ARGV[9]) then
    return { 'EXHAUSTED', now }
  end
  if held and tonumber(held) >= wanted then
    return { 'OK', now, held }
  end
  redis.call('HSET', KEYS[4], client, ARGV[8])
  return { 'OK', now, ARGV[8] }
end

return { 'INVALID', now, 'verb' }
