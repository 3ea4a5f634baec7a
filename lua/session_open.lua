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
--@include enter
--@include window
--@include charge
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
