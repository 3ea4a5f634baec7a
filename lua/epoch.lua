#!lua flags=allow-oom
-- epoch: what concerns a tenant's store as a whole: which server it is served from, that it may not be served, which
-- clock is true. It never makes a meta: a lost tenant stays lost.
-- KEYS 1 meta
-- ARGV 1 verb  2 authority, then
--   accept: 3 replication id as stored  4 as inspected  5 durability boundary as inspected
--           the server that answers now serves this tenant, under a higher epoch
--   condemn: 3 epoch, clocks accepted, policy and directory revision as they were judged ('' any)
--            4 last commit ms that the store must be behind ('' any)  5 why
--            nobody is served from this copy any more, whatever they know
--   clock: 3 who
--          the store's present time is true, whatever was committed later than it
-- Replies {code, now, ...}: OK epoch (accept) · AUTHORITY_LOST · INVALID which
--   CONFLICT (accept: another process was first, or the server changed again; condemn: not what was judged)
-- Facts written: none.
-- Invariants: the epoch, the count of accepted clocks and, but for an accepted clock, the last commit only rise; what
--   the store had when an epoch began is kept beside it; whether a restart kept the data, and whether a copy is older
--   than what was seen, is judged by the caller before it calls.
--@include time
--@include server
local now = now_ms()
local stamp = string.format('%.0f', now)
local verb = ARGV[1]
local m = redis.call('HMGET', KEYS[1], 'authority', 'replid', 'epoch', 'clocks', 'policy_rev', 'dir_rev', 'last_ms')
if m[1] ~= ARGV[2] then
  return { 'AUTHORITY_LOST', now }
end
local clocks = m[4] or '0'

if verb == 'accept' then
  if m[2] ~= ARGV[3] or replication_id() ~= ARGV[4] then
    return { 'CONFLICT', now, m[3] }
  end
  local epoch = string.format('%.0f', m[3] + 1)
  redis.call('HSET', KEYS[1], 'replid', ARGV[4], 'epoch', epoch, 'boundary', ARGV[5],
    'since', table.concat({ clocks, m[5], m[6], m[7] }, ' '))
  return { 'OK', now, epoch }
end

if verb == 'condemn' then
  if ARGV[3] ~= '' and ARGV[3] ~= table.concat({ m[3], clocks, m[5], m[6] }, ' ') then
    return { 'CONFLICT', now }
  end
  if ARGV[4] ~= '' and tonumber(m[7]) >= tonumber(ARGV[4]) then
    return { 'CONFLICT', now }
  end
  redis.call('HSET', KEYS[1], 'authority', 'lost:' .. m[1], 'lost', stamp .. ' ' .. ARGV[5])
  redis.call('PUBLISH', string.sub(KEYS[1], 1, -5) .. 'wake', '! lost')
  return { 'OK', now }
end

if verb ~= 'clock' then
  return { 'INVALID', now, 'verb' }
end
redis.call('HSET', KEYS[1], 'last_ms', stamp, 'clock_accepted', stamp .. ' ' .. ARGV[3],
  'clocks', string.format('%.0f', clocks + 1))
return { 'OK', now }
