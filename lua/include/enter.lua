--@include time
--@include server
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
