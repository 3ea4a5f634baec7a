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
