--@include usage
local LIMITS = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) %d+ %d+$'

-- The usage with what new work keeps and uses of the rate; or nil and the refusal.
-- record: bytes of the one record; depth: offers that already wait where the work goes.
local function charge(meta, now, operations, bytes, open, sessions, record, depth)
  local kept, size, unsettled, live, paid = string.match(meta.usage or '', USAGE)
  local max_kept, max_size, max_open, max_live, max_record, max_depth, rate, burst =
    string.match(meta.limits or '', LIMITS)
  if not kept or not max_kept then
    return nil, { 'CORRUPT', now }
  end
  kept, size, unsettled, live = kept + operations, size + bytes, unsettled + open, live + sessions
  -- A limit refuses only what adds to it.
  local which = record > max_record + 0 and 'record' or operations > 0 and kept > max_kept + 0 and 'operations'
    or size > max_size + 0 and 'bytes' or open > 0 and unsettled > max_open + 0 and 'open'
    or sessions > 0 and live > max_live + 0 and 'sessions' or depth >= max_depth + 0 and 'outbox'
  if which then
    return nil, { 'CAPACITY', now, which, 0 }
  end
  local step, us = math.floor(1000000 / rate), now * 1000
  burst, paid = burst * step, math.max(paid, us)
  if paid > us + burst then
    -- Further ahead than a burst pays for: the clock was set back, and what it had counted is nobody's debt.
    paid = us
  end
  local early = paid + step - us - burst
  if early > 0 then
    return nil, { 'CAPACITY', now, 'rate', math.ceil(early / 1000) }
  end
  return string.format('%d %d %d %d %d', kept, size, unsettled, live, paid + step)
end
