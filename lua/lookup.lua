#!lua flags=no-writes
-- lookup: what admit would answer from the record alone; no clock bound, no write, works when memory is out.
-- KEYS 1 meta  2 op  [3 session]
-- ARGV 1 authority  2 policy revision  3 intent digest
-- Replies {code, now, ...}: ABSENT · DUPLICATE at phase outcome-sequence · CONFLICT · EXPIRED · CORRUPT · NOT_FOUND
--   AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision
-- Facts written: none. Invariant: the same first four checks as admit, in the same order.
--@include enter
--@include recorded
local now = now_ms()
local _, refusal = enter(KEYS[1], now, ARGV[1], ARGV[2])
if refusal then
  return refusal
end
if KEYS[3] then
  local phase = redis.call('HGET', KEYS[3], 'phase')
  if not phase or phase == 'closed' then
    return { 'NOT_FOUND', now }
  end
end
return recorded(KEYS[2], now, ARGV[3]) or { 'ABSENT', now }
