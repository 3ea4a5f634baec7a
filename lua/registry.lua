#!lua flags=allow-oom
-- registry: changes one field of what an operator administers (policy, tokens, peers), and with it the revision under
-- which everybody decides. It never makes a meta: a lost tenant stays lost.
-- KEYS 1 meta  2 hash
-- ARGV 1 authority  2 field of meta that counts such changes (policy_rev, dir_rev, '' where none does)
--      3 mode (put, new: only where it is absent, remove)  4 field  5 value  6 expected revision ('' any)
--      7 wake message ('' none)  8 who ('' not noted)
-- Replies {code, now, ...}: OK revision · DUPLICATE revision (it holds that already; nothing moves)
--   CONFLICT revision (not the expected one, or the field is taken) · NOT_FOUND (nothing to remove) · AUTHORITY_LOST
-- Facts written: none.
-- Invariants: the revision moves in the step that changes what it covers, and only then; a repeated put is a duplicate
--   whatever was expected, so that a lost reply is found out by repeating the call.
--@include time
local now = now_ms()
local meta = redis.call('HMGET', KEYS[1], 'authority', ARGV[2])
if meta[1] ~= ARGV[1] then
  return { 'AUTHORITY_LOST', now }
end
local counter, mode, field, value = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local revision = meta[2] or ''
local held = redis.call('HGET', KEYS[2], field)
if held == value and mode ~= 'remove' then
  return { 'DUPLICATE', now, revision }
end
if held and mode == 'new' then
  return { 'CONFLICT', now, revision }
end
if ARGV[6] ~= '' and ARGV[6] ~= revision then
  return { 'CONFLICT', now, revision }
end
if not held and mode == 'remove' then
  return { 'NOT_FOUND', now }
end
if mode == 'remove' then
  redis.call('HDEL', KEYS[2], field)
else
  redis.call('HSET', KEYS[2], field, value)
end
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[2], 'appliedAtMs', string.format('%.0f', now), 'appliedBy', ARGV[8])
end
if counter ~= '' then
  revision = redis.call('HINCRBY', KEYS[1], counter, 1)
end
if ARGV[7] ~= '' then
  redis.call('PUBLISH', string.sub(KEYS[1], 1, -5) .. 'wake', ARGV[7])
end
return { 'OK', now, revision }
