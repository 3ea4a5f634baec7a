#!lua
-- epoch: accepts the server that answers now as the one that serves this tenant, under a higher epoch.
-- KEYS 1 meta
-- ARGV 1 authority  2 replication id as stored  3 replication id as inspected  4 durability boundary as inspected
-- Replies {code, now, ...}: OK epoch · CONFLICT (another process was first, or the server changed again)
--   AUTHORITY_LOST
-- Facts written: none.
-- Invariants: the epoch only rises; whether the restart kept the data is judged by the caller before it calls.
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
local now = now_ms()
local m = redis.call('HMGET', KEYS[1], 'authority', 'replid', 'epoch')
if m[1] ~= ARGV[1] then
  return { 'AUTHORITY_LOST', now }
end
if m[2] ~= ARGV[2] or replication_id() ~= ARGV[3] then
  return { 'CONFLICT', now, m[3] }
end
local epoch = string.format('%.0f', m[3] + 1)
redis.call('HSET', KEYS[1], 'replid', ARGV[3], 'epoch', epoch, 'boundary', ARGV[4])
return { 'OK', now, epoch }
