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
  -- Never more than one burst in debt: a clock that was set back makes nobody wait for what it had counted.
  local step, us = math.floor(1000000 / limits[RATE]), now * 1000
  local paid = math.min(math.max(usage[PAID], us), us + limits[BURST] * step) + step
  local early = paid - us - limits[BURST] * step
  if early > 0 then
    return { 'CAPACITY', now, 'rate', math.ceil(early / 1000) }
  end
  for i = OPERATIONS, SESSIONS do
    usage[i] = usage[i] + added[i]
  end
  usage[PAID] = paid
end
