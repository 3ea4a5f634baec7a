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
--@include enter
--@include window
--@include recorded
--@include charge
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
