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
