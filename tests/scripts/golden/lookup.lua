#!lua flags=no-writes
-- lookup: what admit would answer from the record alone; no clock bound, no write, works when memory is out.
-- KEYS 1 meta  2 op  [3 session]
-- ARGV 1 authority  2 policy revision  3 intent digest
-- Replies {code, now, ...}: ABSENT · DUPLICATE at phase outcome-sequence · CONFLICT · EXPIRED · CORRUPT · NOT_FOUND
--   AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision
-- Facts written: none. Invariant: the same first four checks as admit, in the same order.
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
