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
--@include enter
--@include window
--@include branch
--@include usage
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
