--@include usage
local RECORD_BYTES, OUTBOX_DEPTH, RATE, BURST = 5, 6, 7, 8
local LIMITS = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) %d+ %d+$'

-- Adds what new work keeps and uses of the rate, or gives the refusal and changes nothing.
local function charge(usage, limits, now, added)
  for i = OPERATIONS, SESSIONS do
    if added[i] > 0 and usage[i] + added[i] > limits[i] then
      return { 'CAPACITY', now, ({ 'operations', 'bytes', 'open', 'sessions' })[i], 0 }
    end
  end
  local step, us = math.floor(1000000 / limits[RATE]), now * 1000
  local burst, paid = limits[BURST] * step, math.max(usage[PAID], us)
  if paid > us + burst then
    -- Further ahead than a burst pays for: the clock was set back, and what it had counted is nobody's debt.
    paid = us
  end
  local early = paid + step - us - burst
  if early > 0 then
    return { 'CAPACITY', now, 'rate', math.ceil(early / 1000) }
  end
  for i = OPERATIONS, SESSIONS do
    usage[i] = usage[i] + added[i]
  end
  usage[PAID] = paid + step
end
