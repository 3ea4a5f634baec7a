-- What a tenant may keep and what it keeps: two fields of meta, whole numbers between single spaces.
-- limits  operations bytes open sessions record outbox rate burst streams waiters (the last two are the services' own)
-- usage   operations bytes open sessions paid; paid is the instant, in µs, up to which admissions have used the rate
local OPERATIONS, BYTES, OPEN, SESSIONS, PAID = 1, 2, 3, 4, 5
local USAGE = '^(%d+) (%d+) (%d+) (%d+) (%d+)$'

-- nil for anything else, also for nothing.
local function numbers(raw, pattern)
  local found = { string.match(raw or '', pattern) }
  for i = 1, #found do
    found[i] = tonumber(found[i])
  end
  return found[1] and found
end

local function formatted(usage)
  return string.format('%.0f %.0f %.0f %.0f %.0f', math.max(0, usage[OPERATIONS]), math.max(0, usage[BYTES]),
    math.max(0, usage[OPEN]), math.max(0, usage[SESSIONS]), usage[PAID])
end
