#!lua flags=allow-oom
-- lease: the life of one branch's lease. It never moves the operation's revision and finishes work when memory is out.
-- KEYS 1 meta  2 op  3 due  4 outbox of the branch's peer  [5 session]      (renew: 1 meta, then one op per lease)
-- ARGV 1 verb  2 authority  3 policy revision  4 not after ms  5 wake message (none for renew), then
--   claim        6 branch 7 peer 8 attempt 9 holder 10 lease ms 11 open the gate (0|1) 12 claims limit
--   open         6 branch 7 epoch 8 fence 9 holder
--   release      6 branch 7 epoch 8 fence 9 holder
--   answer       6 branch 7 epoch 8 fence 9 holder 10 digest 11 answer 12 operation id
--   renew        5 lease ms, then per lease: branch, epoch, fence, holder
--   (claim and release: the last argument is the operation id, the member of due)
-- Replies {code, now, ...}:
--   claim OK epoch fence until deadline admission input at head state state-revision
--   open, release, answer OK · DUPLICATE (the same answer again; the decision if there is one)
--   renew OK then per lease: code, until (RENEWED, or the code that refuses it)
--   ABSENT · TERMINAL · ANSWERED · NOT_OFFERED · HELD · NOT_OWNER · STALE_FENCE · EXHAUSTED · GATE_OPEN · GATE_CLOSED
--   LEASE_EXPIRED · PROTOCOL_CONFLICT · AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision
--   CLOCK_ROLLBACK by-ms · OUTSIDE_WINDOW guard|deadline · INVALID which
-- Facts written: none.
-- Invariants: a grant is compared as the pair (epoch, fence) and its holder; a fence is granted once; a gate only
--   opens once per grant (a repeated open grants no send); an answer, its gate, the acknowledgement of its request and
--   its wake-up are one step (RT-DUR-06); claim only lowers a wake-up.
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
-- A branch record is twelve ASCII words; '-' stands for "none". The only stored text these scripts parse.
-- status peer attempt epoch fence holder until gate claims next outbox digest
local STATUS, PEER, ATTEMPT, EPOCH, FENCE, HOLDER = 1, 2, 3, 4, 5, 6
local UNTIL, GATE, CLAIMS, NEXT, OUTBOX, DIGEST = 7, 8, 9, 10, 11, 12
local BRANCH_PATTERN = '^(%S+) (%S+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S+) (%d+) (%d+) (%S+) (%S+)$'

-- nil for anything else, also for nothing.
local function parse_branch(raw)
  local b = { string.match(raw or '', BRANCH_PATTERN) }
  return b[1] and b
end

local function format_branch(b)
  return table.concat(b, ' ')
end
local now = now_ms()
local verb = ARGV[1]
local holds_evidence = verb == 'answer' or verb == 'release'
local meta, refusal = enter(KEYS[1], now, ARGV[2], holds_evidence and '' or ARGV[3])
if refusal then
  return refusal
end

local function committed()
  redis.call('HSET', KEYS[1], 'last_ms', whole(now))
end

local function not_the_holder(b, epoch, fence, holder)
  if b[EPOCH] ~= epoch or b[FENCE] ~= fence then
    return 'STALE_FENCE'
  end
  if b[HOLDER] ~= holder or holder == '-' then
    return 'NOT_OWNER'
  end
end

-- The end of a lease that starts now; nil where it is empty or leaves the safe integers (RT-GUARD-09).
local function lease_end(lease_ms)
  local until_ms = now + lease_ms
  return until_ms > now and until_ms <= MAX_SAFE and whole(until_ms) or nil
end

-- at = admitted, deadline, sequence; the deadline bounds every grant and answer (RT-GUARD-11).
local function deadline_of(at)
  return tonumber(string.match(at, '^%d+ (%d+)'))
end

local function load_branch(op_key, index)
  local r = redis.call('HMGET', op_key, 'at', 'phase', 'b:' .. index)
  local b = parse_branch(r[3])
  if not b then
    return nil
  end
  b.field, b.deadline, b.closed = 'b:' .. index, deadline_of(r[1]), r[2] ~= 'admitted' and r[2] ~= 'active'
  return b
end

-- The window of claim, open, renew, release and answer is [-, min(guard, deadline, until)).
local function lapsed(b, holds_lease)
  if now >= b.deadline then
    return { 'OUTSIDE_WINDOW', now, 'deadline' }
  end
  if holds_lease and now >= tonumber(b[UNTIL]) then
    return { 'LEASE_EXPIRED', now }
  end
end

if verb == 'renew' then
  local guard = outside(meta, now, 0, tonumber(ARGV[4]))
  if guard then
    return guard
  end
  local renewed_until = lease_end(tonumber(ARGV[5]))
  if not renewed_until then
    return { 'INVALID', now, 'lease' }
  end
  local reply, renewed = { 'OK', now }, false
  for i = 2, #KEYS do
    local a = 6 + 4 * (i - 2)
    local b = load_branch(KEYS[i], ARGV[a])
    local code
    if not b then
      code = 'ABSENT'
    elseif b.closed or b[STATUS] ~= 'pending' then
      code = 'TERMINAL'
    else
      code = not_the_holder(b, ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
      if not code and b[GATE] == 'answered' then
        code = 'ANSWERED'
      end
      if not code then
        local late = lapsed(b, true)
        code = late and late[1]
      end
    end
    if not code then
      b[UNTIL] = renewed_until
      redis.call('HSET', KEYS[i], b.field, format_branch(b))
      renewed = true
    end
    reply[#reply + 1] = code or 'RENEWED'
    reply[#reply + 1] = code and '0' or b[UNTIL]
  end
  if renewed then
    committed()
  end
  return reply
end

local not_after, index = tonumber(ARGV[4]), ARGV[6]
local b = load_branch(KEYS[2], index)
if not b then
  return { 'ABSENT', now }
end
redis.call('ZCARD', KEYS[3])

local function store(...)
  redis.call('HSET', KEYS[2], b.field, format_branch(b), ...)
  committed()
end

local function late(holds_lease)
  return outside(meta, now, 0, not_after) or lapsed(b, holds_lease)
end

local function granted()
  local r = redis.call('HMGET', KEYS[2], 'admission', 'input', 'at')
  local session = KEYS[5] and redis.call('HMGET', KEYS[5], 'head', 'state', 'state_rev') or { '', '', '' }
  return { 'OK', now, b[EPOCH], b[FENCE], b[UNTIL], whole(b.deadline), r[1], r[2], r[3],
           session[1], session[2] or '', session[3] }
end

if verb == 'claim' then
  local peer, attempt, holder, until_ms = ARGV[7], ARGV[8], ARGV[9], lease_end(tonumber(ARGV[10]))
  local open, limit, operation = ARGV[11] == '1', tonumber(ARGV[12]), ARGV[13]
  if not until_ms then
    return { 'INVALID', now, 'lease' }
  end
  -- '-' is nobody: a grant to it would be open to the next claim under the same fence.
  if not string.match(holder, '^%w%S*$') then
    return { 'INVALID', now, 'holder' }
  end
  if b.closed or b[STATUS] ~= 'pending' then
    return { 'TERMINAL', now }
  end
  if b[PEER] ~= peer then
    return { 'NOT_OWNER', now }
  end
  if b[ATTEMPT] ~= attempt then
    return { 'STALE_FENCE', now }
  end
  if b[GATE] == 'answered' then
    return { 'ANSWERED', now }
  end
  local mine = b[HOLDER] == holder
  if b[HOLDER] ~= '-' and not mine then
    return { 'HELD', now }
  end
  local too_late = late(mine)
  if too_late then
    return too_late
  end
  if mine then
    -- The grant as it was given, also where the server has restarted since: pairs of (epoch, fence) stay valid.
    if b[GATE] == 'open' then
      return { 'GATE_OPEN', now }
    end
    if open then
      b[GATE] = 'open'
      store()
    end
    return granted()
  end
  if b[OUTBOX] == '-' then
    return { 'NOT_OFFERED', now }
  end
  if tonumber(b[CLAIMS]) >= limit then
    return { 'EXHAUSTED', now }
  end
  b[EPOCH], b[HOLDER], b[UNTIL] = meta.epoch, holder, until_ms
  b[GATE], b[CLAIMS] = open and 'open' or 'closed', whole(b[CLAIMS] + 1)
  store()
  redis.call('ZADD', KEYS[3], 'LT', b[UNTIL], operation)
  return granted()
end

local epoch, fence, holder = ARGV[7], ARGV[8], ARGV[9]
-- The outbox is named by the caller: that of another peer is never touched (RT-RES-04).
if string.match(KEYS[4], '[^:]+$') ~= b[PEER] then
  return { 'NOT_OWNER', now }
end

if verb == 'open' then
  if b.closed or b[STATUS] ~= 'pending' then
    return { 'TERMINAL', now }
  end
  local other = not_the_holder(b, epoch, fence, holder)
  if other then
    return { other, now }
  end
  if b[GATE] ~= 'closed' then
    return { b[GATE] == 'open' and 'GATE_OPEN' or 'ANSWERED', now }
  end
  local too_late = late(true)
  if too_late then
    return too_late
  end
  b[GATE] = 'open'
  store()
  return { 'OK', now }
end

if verb == 'release' then
  if b.closed or b[STATUS] ~= 'pending' then
    return { 'TERMINAL', now }
  end
  local other = not_the_holder(b, epoch, fence, holder)
  if other then
    return { other, now }
  end
  if b[GATE] == 'answered' then
    return { 'ANSWERED', now }
  end
  local too_late = late(true)
  if too_late then
    return too_late
  end
  -- A lease given back ends now; what follows (offer again, retry, uncertain) is decided from the gate as for a lost one.
  b[UNTIL] = whole(now)
  if b[GATE] == 'closed' then
    b[CLAIMS] = whole(math.max(0, b[CLAIMS] - 1))
  end
  store()
  redis.call('ZADD', KEYS[3], 'LT', whole(now), ARGV[10])
  wake(ARGV[5])
  return { 'OK', now }
end

if verb == 'answer' then
  local digest, answer, operation = ARGV[10], ARGV[11], ARGV[12]
  local other = not_the_holder(b, epoch, fence, holder)
  if other then
    return { other, now }
  end
  if b[DIGEST] ~= '-' then
    if b[DIGEST] == digest then
      return { 'DUPLICATE', now, redis.call('HGET', KEYS[2], 'decision') or '' }
    end
    -- The first eight conflicts are kept, later ones only counted (RT-RES-12); the answer itself stays as it was.
    local kept = redis.call('HGET', KEYS[2], 'pc') or '0'
    local count = tonumber(string.match(kept, '^%d+')) + 1
    local line = count <= 8 and string.format('\n%s %s %s', whole(now), index, digest) or ''
    redis.call('HSET', KEYS[2], 'pc', (string.gsub(kept, '^%d+', tostring(count), 1)) .. line)
    return { 'PROTOCOL_CONFLICT', now }
  end
  if b.closed or b[STATUS] ~= 'pending' then
    return { 'TERMINAL', now }
  end
  if b[GATE] ~= 'open' then
    return { 'GATE_CLOSED', now }
  end
  local too_late = late(true)
  if too_late then
    return too_late
  end
  if b[OUTBOX] ~= '-' then
    redis.call('XACK', KEYS[4], 'work', b[OUTBOX])
    redis.call('XDEL', KEYS[4], b[OUTBOX])
  end
  b[GATE], b[DIGEST], b[OUTBOX] = 'answered', digest, '-'
  store('r:' .. index, whole(now) .. ' ' .. answer)
  redis.call('ZADD', KEYS[3], 'LT', whole(now), operation)
  wake(ARGV[5])
  return { 'OK', now }
end

return { 'INVALID', now, 'verb' }
