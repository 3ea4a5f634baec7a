-- Rollback is told before outside-window (RT-GUARD-04..08, RT-GUARD-17): lower bound inclusive, upper exclusive.
local function outside(meta, now, not_before, not_after)
  if not not_before or not not_after or not_before >= not_after or not_after > MAX_SAFE then
    return { 'INVALID', now, 'guard' }
  end
  if now < meta.last then
    return { 'CLOCK_ROLLBACK', now, whole(meta.last - now) }
  end
  if now < not_before or now >= not_after then
    return { 'OUTSIDE_WINDOW', now, 'guard' }
  end
end
