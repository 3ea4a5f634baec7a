-- The one reading of the store's clock, in whole milliseconds (RT-CTX-06, RT-GUARD-02).
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
