#!lua
-- session_open: creates a session once, or answers with the one its id already names.
-- KEYS 1 meta  2 session
-- ARGV 1 authority  2 policy revision  3 not before ms  4 not after ms  5 actor  6 profile id  7 profile version
--      8 contract digest  9 owner principal  10 initial view state ('' where the profile has none)
-- Replies {code, now, ...}: OK owner head · DUPLICATE owner head · CONFLICT owner · CORRUPT
--   NOT_FOUND (a closed id is never reused; whether another owner's session may be told is the caller's to judge)
--   CAPACITY which (sessions, bytes, rate) retry-after-ms (0 where time alone does not help)
--   AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision · CLOCK_ROLLBACK by-ms · OUTSIDE_WINDOW which · INVALID
-- Facts written: none; creation consumes no sequence.
-- Invariants: actor, profile and contract digest never change; an equal open adds nothing (DASPX-11, DASP-CORE-011a).
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
local now = now_ms()
local meta, refusal = enter(KEYS[1], now, ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local s = redis.call('HMGET', KEYS[2], 'phase', 'actor', 'profile', 'profile_version', 'owner', 'head')
if s[1] then
  if s[1] == 'closed' then
    return { 'NOT_FOUND', now }
  end
  if s[2] ~= ARGV[5] or s[3] ~= ARGV[6] or s[4] ~= ARGV[7] then
    return { 'CONFLICT', now, s[5] }
  end
  return { 'DUPLICATE', now, s[5], s[6] }
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return { 'CORRUPT', now }
end
refusal = outside(meta, now, tonumber(ARGV[3]), tonumber(ARGV[4]))
if refusal then
  return refusal
end
local kept = #ARGV[5] + #ARGV[6] + #ARGV[7] + #ARGV[9] + #ARGV[10]
local usage
usage, refusal = charge(meta, now, 0, kept, 0, 1, 0, -1)
if refusal then
  return refusal
end
-- Fields are found by walking a short list: those that every admission reads come first, the largest last.
redis.call('HSET', KEYS[2], 'phase', 'open', 'head', 0, 'busy', '', 'halted', '', 'pending', 0, 'commands', 0,
  'bytes', kept, 'state_rev', 0, 'v', 1, 'owner', ARGV[9], 'actor', ARGV[5], 'profile', ARGV[6], 'profile_version', ARGV[7],
  'contract', ARGV[8], 'opened_ms', now, 'state', ARGV[10])
redis.call('HSET', KEYS[1], 'last_ms', now, 'usage', usage)
return { 'OK', now, ARGV[9], '0' }
