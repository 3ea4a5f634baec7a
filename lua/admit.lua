#!lua
-- admit: creates one operation with everything that makes it recoverable, or answers with what its key holds.
-- KEYS 1 meta  2 op  3 due  [4 session  5 updates  6 queue]  then one outbox per branch, in branch order
-- ARGV 1 authority  2 policy revision  3 directory revision  4 not before ms  5 not after ms
--      6 kind: i invocation, c concurrent command, s serial command  7 intent digest  8 timeout ms
--      9 claim timeout ms  10 admission  11 input  12 wake message  13 operation id  14 session id  15 command id
--      16 payload of command.accepted  17 number of branches, then per branch: peer, message id
-- Order of checks: authority, epoch, policy, session, record, directory, window; nothing is written before all hold.
-- Replies {code, now, ...}:
--   OK sequence deadline seat epoch · DUPLICATE at phase outcome-sequence · CONFLICT · EXPIRED · CORRUPT
--   AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision · NOT_FOUND · SESSION_CLOSING · HALTED
--   SEQUENCE_EXHAUSTED · CLOCK_ROLLBACK by-ms · OUTSIDE_WINDOW which · INVALID which
-- Facts written: command.accepted (commands). Without allow-oom the server refuses it whole when memory is out.
-- Invariants: the record, its fact, its outbox entries or queue seat, and its wake-up appear together or not at all
--   (RT-ADM-24, DASP-CORE-004a); every branch starts with attempt 1 and fence 1 (RT-SEL-05); instants are made here
--   (RT-TIME-03, RT-TIME-04).
--@include enter
--@include branch
--@include recorded
local now = now_ms()
local meta, refusal = enter(KEYS[1], now, ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local in_session = ARGV[6] ~= 'i'
local session
if in_session then
  session = redis.call('HMGET', KEYS[4], 'phase', 'head', 'busy', 'halted', 'pending', 'commands')
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
-- Every key is read with its own type before the first write: a wrong-typed key refuses the whole admission.
redis.call('ZCARD', KEYS[3])
local outbox_at = in_session and 6 or 3
local branches = tonumber(ARGV[17])
if branches < 1 or branches > MAX_BRANCHES or #ARGV ~= 17 + 2 * branches then
  return { 'INVALID', now, 'branches' }
end
for i = 1, branches do
  redis.call('XLEN', KEYS[outbox_at + i])
end
local seat, sequence = 'none', 0
if in_session then
  sequence = session[2] + 1
  if sequence > MAX_SAFE - 1000000 then
    return { 'SEQUENCE_EXHAUSTED', now }
  end
  redis.call('XLEN', KEYS[5])
  local waiting = redis.call('ZCARD', KEYS[6])
  if ARGV[6] == 's' then
    seat = (session[3] == '' and waiting == 0) and 'busy' or 'queued'
  end
  redis.call('XADD', KEYS[5], whole(sequence) .. '-0', 'k', 'accepted', 'c', ARGV[15], 'p', ARGV[16], 't', whole(now))
end
local claim_by = math.min(deadline, now + claim_timeout)
local fields = { 'v', '1', 'admission', ARGV[10], 'input', ARGV[11], 'intent', ARGV[7],
                 'at', whole(now) .. ' ' .. whole(deadline) .. ' ' .. whole(sequence),
                 'rev', '1', 'phase', 'admitted', 'reservation', 'pending' }
for i = 1, branches do
  local peer, message = ARGV[16 + 2 * i], ARGV[17 + 2 * i]
  local entry, offered_until = '-', '0'
  if seat ~= 'queued' then
    entry = redis.call('XADD', KEYS[outbox_at + i], '*', 'k', 'request', 'o', ARGV[13], 'b', i - 1, 'a', '1',
      's', ARGV[14], 'm', message)
    offered_until = whole(claim_by)
  end
  fields[#fields + 1] = 'b:' .. (i - 1)
  fields[#fields + 1] = format_branch({ 'pending', peer, '1', meta.epoch, '1', '-', offered_until, 'closed', '0', '0',
                                        entry, '-' })
end
redis.call('HSET', KEYS[2], unpack(fields))
redis.call('ZADD', KEYS[3], seat == 'queued' and whole(deadline) or whole(claim_by), ARGV[13])
if in_session then
  if seat == 'queued' then
    redis.call('ZADD', KEYS[6], whole(sequence), ARGV[13])
  end
  redis.call('HSET', KEYS[4], 'head', whole(sequence), 'busy', seat == 'busy' and ARGV[13] or session[3],
    'pending', session[5] + 1, 'commands', session[6] + 1)
end
redis.call('HSET', KEYS[1], 'last_ms', whole(now), 'used_operations', whole(meta.operations + 1),
  'used_bytes', whole(meta.bytes + #ARGV[10] + #ARGV[11]))
wake(ARGV[12])
return { 'OK', now, whole(sequence), whole(deadline), seat, meta.epoch }
