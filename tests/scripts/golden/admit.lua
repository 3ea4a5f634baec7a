#!lua
-- admit: creates one operation with everything that makes it recoverable, or answers with what its key holds.
-- KEYS 1 meta  2 op  3 due  [4 session  5 updates  6 queue]  then one outbox per branch, in branch order
-- ARGV 1 authority  2 policy revision  3 directory revision  4 not before ms  5 not after ms
--      6 kind: i invocation, c concurrent command, s serial command  7 intent digest  8 timeout ms
--      9 claim timeout ms  10 admission  11 input  12 wake message  13 operation id  14 session id  15 command id
--      16 payload of command.accepted  17 bytes reserved for the outcome
--      18 number of branches, then per branch: peer, message id
-- Order of checks: authority, epoch, policy, session, record, directory, window, capacity; nothing is written before
-- all hold.
-- Replies {code, now, ...}:
--   OK sequence deadline seat epoch · DUPLICATE at phase outcome-sequence · CONFLICT · EXPIRED · CORRUPT
--   AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision · NOT_FOUND · SESSION_CLOSING · HALTED
--   SEQUENCE_EXHAUSTED · CLOCK_ROLLBACK by-ms · OUTSIDE_WINDOW which · INVALID which
--   CAPACITY which (record, operations, bytes, open, outbox, rate) retry-after-ms (0 where time alone does not help)
-- Facts written: command.accepted (commands). Without allow-oom the server refuses it whole when memory is out.
-- Invariants: equal retries and conflicts cost no quota, refusals neither; what is counted is what is kept, and the
--   outcome of what is open is counted before it is there (DASP-CORE-012b); the record, its fact, its outbox entries or queue seat, and its wake-up appear together or not at all
--   (RT-ADM-24, DASP-CORE-004a); every branch starts with attempt 1 and fence 1 (RT-SEL-05); instants are made here
--   (RT-TIME-03, RT-TIME-04).
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
-- What an operation key already holds, as the answer to an admission with this intent; nil where it is unused.
-- A tombstone of a command answers conflict: its own session is closed and was already not found (DASP-CORE-012f);
-- a tombstone of an invocation answers expired. Equal intents are duplicates at any phase (RT-ADM-25, DASP-CORE-002).
local function recorded(op_key, now, intent)
  local r = redis.call('HMGET', op_key, 'v', 'intent', 'at', 'phase', 'tombstone', 'outcome_seq')
  if not r[1] then
    -- A record without its version is damaged, which is not absence (KEYX-24).
    return (r[2] or r[3] or r[4] or r[5]) and { 'CORRUPT', now } or nil
  end
  if r[5] then
    return { r[5] == '' and 'EXPIRED' or 'CONFLICT', now }
  end
  if r[2] ~= intent then
    return { 'CONFLICT', now }
  end
  return { 'DUPLICATE', now, r[3], r[4], r[6] or '' }
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
local LIMITS = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) %d+ %d+$'

-- The usage with what new work keeps and uses of the rate; or nil and the refusal.
-- record: bytes of the one record; depth: offers that already wait where the work goes.
local function charge(meta, now, operations, bytes, open, sessions, record, depth)
  local kept, size, unsettled, live, paid = string.match(meta.usage or '', USAGE)
  local max_kept, max_size, max_open, max_live, max_record, max_depth, rate, burst =
    string.match(meta.limits or '', LIMITS)
  if not kept or not max_kept then
    return nil, { 'CORRUPT', now }
  end
  kept, size, unsettled, live = kept + operations, size + bytes, unsettled + open, live + sessions
  -- A limit refuses only what adds to it.
  local which = record > max_record + 0 and 'record' or operations > 0 and kept > max_kept + 0 and 'operations'
    or size > max_size + 0 and 'bytes' or open > 0 and unsettled > max_open + 0 and 'open'
    or sessions > 0 and live > max_live + 0 and 'sessions' or depth >= max_depth + 0 and 'outbox'
  if which then
    return nil, { 'CAPACITY', now, which, 0 }
  end
  local step, us = math.floor(1000000 / rate), now * 1000
  burst, paid = burst * step, math.max(paid, us)
  if paid > us + burst then
    -- Further ahead than a burst pays for: the clock was set back, and what it had counted is nobody's debt.
    paid = us
  end
  local early = paid + step - us - burst
  if early > 0 then
    return nil, { 'CAPACITY', now, 'rate', math.ceil(early / 1000) }
  end
  return string.format('%d %d %d %d %d', kept, size, unsettled, live, paid + step)
end
local MAX_BRANCHES = 1024 -- unpack() gives up near 8,000 values
local FACTS = 65 -- of a command after its admission: 64 application updates and its outcome
local now = now_ms()
local meta, refusal = enter(KEYS[1], now, ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local in_session = ARGV[6] ~= 'i'
local session
if in_session then
  session = redis.call('HMGET', KEYS[4], 'phase', 'head', 'busy', 'halted', 'pending', 'commands', 'bytes')
  if not session[1] or session[1] == 'closed' then
    return { 'NOT_FOUND', now }
  end
end
local existing = recorded(KEYS[2], now, ARGV[7])
if existing then
  return existing
end
if in_session and session[1] ~= 'open' then
  return { 'SESSION_CLOSING', now }
end
if in_session and session[4] ~= '' then
  return { 'HALTED', now }
end
if ARGV[3] ~= meta.directory then
  return { 'STALE_SNAPSHOT', now, 'directory', meta.directory }
end
refusal = outside(meta, now, tonumber(ARGV[4]), tonumber(ARGV[5]))
if refusal then
  return refusal
end
local timeout, claim_timeout = tonumber(ARGV[8]), tonumber(ARGV[9])
local deadline = now + timeout
if timeout < 1 or deadline > MAX_SAFE then
  return { 'INVALID', now, 'timeout' }
end
local outbox_at = in_session and 6 or 3
local reserve, branches = tonumber(ARGV[17]), tonumber(ARGV[18])
if branches < 1 or branches > MAX_BRANCHES or #ARGV ~= 18 + 2 * branches then
  return { 'INVALID', now, 'branches' }
end
local seat, sequence = 'none', 0
if in_session then
  sequence = session[2] + 1
  -- Whatever is open, this command among it, has the sequences it may need to end.
  if sequence + FACTS * (session[5] + 1) > MAX_SAFE then
    return { 'SEQUENCE_EXHAUSTED', now }
  end
  if ARGV[6] == 's' then
    seat = session[3] == '' and 'busy' or 'queued'
  end
end
-- Streams and queue are read with their own types before the first write, and the first write is the one to the key
-- that was not read: a key of another type refuses the whole admission, not its second half. Facts that the session
-- does not know of refuse it too: theirs is the one write that could fail by its key's content.
if in_session and redis.call('XREAD', 'COUNT', 1, 'STREAMS', KEYS[5], string.format('%.0f-0', sequence - 1)) then
  return { 'CORRUPT', now }
end
if seat == 'queued' then
  redis.call('ZCARD', KEYS[6])
end
local depth = -1
if seat ~= 'queued' then
  for i = outbox_at + 1, #KEYS do
    depth = math.max(depth, redis.call('XLEN', KEYS[i]))
  end
end
local record, usage = #ARGV[10] + #ARGV[11], nil
local kept = record + #ARGV[16] + reserve
usage, refusal = charge(meta, now, 1, kept, 1, 0, record, depth)
if refusal then
  return refusal
end
local claim_by = math.min(deadline, now + claim_timeout)
redis.call('ZADD', KEYS[3], seat == 'queued' and deadline or claim_by, ARGV[13])
if in_session then
  redis.call('XADD', KEYS[5], string.format('%.0f-0', sequence), 'k', 'accepted', 'c', ARGV[15], 'p', ARGV[16],
    't', now)
  if seat == 'queued' then
    redis.call('ZADD', KEYS[6], sequence, ARGV[13])
  end
end
local fields = { 'v', 1, 'rev', 1, 'phase', 'admitted', 'reservation', 'pending',
                 'at', string.format('%.0f %.0f %.0f %.0f', now, deadline, sequence, reserve), 'intent', ARGV[7],
                 'admission', ARGV[10] }
for i = 1, branches do
  local peer, entry, offered_until = ARGV[17 + 2 * i], '-', 0
  if seat ~= 'queued' then
    entry = redis.call('XADD', KEYS[outbox_at + i], '*', 'k', 'request', 'o', ARGV[13], 'b', i - 1, 'a', 1,
      's', ARGV[14], 'm', ARGV[18 + 2 * i])
    offered_until = claim_by
  end
  fields[#fields + 1] = 'b:' .. (i - 1)
  fields[#fields + 1] = string.format('pending %s 1 %s 1 - %.0f closed 0 0 %s -', peer, meta.epoch, offered_until, entry)
end
-- The largest last: every field before it is added to a short list.
fields[#fields + 1], fields[#fields + 2] = 'input', ARGV[11]
redis.call('HSET', KEYS[2], unpack(fields))
if in_session then
  redis.call('HSET', KEYS[4], 'head', sequence, 'busy', seat == 'busy' and ARGV[13] or session[3],
    'pending', session[5] + 1, 'commands', session[6] + 1, 'bytes', whole((session[7] or 0) + kept))
end
redis.call('HSET', KEYS[1], 'last_ms', now, 'usage', usage)
wake(ARGV[12])
return { 'OK', now, sequence, deadline, seat, meta.epoch }
