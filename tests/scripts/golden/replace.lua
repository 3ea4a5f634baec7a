#!lua flags=allow-oom
-- replace: commits one decision about one operation, only while everything it was decided from still holds.
-- KEYS 1 meta  2 op  3 due  [4 session  5 updates  6 queue]  then outboxes, named by position in the branch sections
-- ARGV 1 authority  2 policy revision  3 expected revision  4 not before ms  5 not after ms  6 operation id
--      7 wake message  8 seat as loaded ('' outside sessions, else none|busy|queued)  9 session id
--      10 view state revision it was decided from ('' any)  11 wake-up it saw ('' none)  12 wake up at ms ('' none)
--      13 wake up in ms ('' none)  14 phase ('' keeps)  15 decision ('' none)
--      16 reservation ('' keeps, quarantined, or: replayable <ms>)  17 tallies ('' keeps)  18 view state ('' keeps)
--      19 halt the session (1 or '')  20..23 counts of the sections, in this order:
--      per branch: index, assertion, expired (1: its lease must have run out), words as loaded, words to store,
--                  position of its outbox in KEYS (0 none), position of the outbox to send to (0 none), message id
--                  words to store: until may be = (keep), +N (now + N); next may be +N; outbox is = (keep),
--                  - (acknowledge and delete) or @ (the same, then send again); digest may be =
--                  a single = keeps the branch, every word of which must be as loaded
--      per field set: field, value · per field deleted: field (only r:, x: and o: fields, the answers of a branch)
--      per fact: kind, command id, payload
-- Replies {code, now, ...}: OK revision outcome-sequence · ABSENT · TERMINAL · CONFLICT revision · NOT_FOUND
--   ASSERTION what branch · AUTHORITY_LOST · EPOCH_MOVED · STALE_SNAPSHOT which revision · CLOCK_ROLLBACK by-ms
--   OUTSIDE_WINDOW which · INVALID which
-- Usage: what facts and view state add, less the bytes reserved for the outcome once it is there (lua/admit.lua).
-- Facts written: as given, in order, before every other write.
-- Invariants: admission, input, a set decision, a settled reservation and a terminal branch cannot be rewritten
--   (RT-STORE-07..09); phases go forward, closed and settled go with a decision, settled leaves no branch pending
--   (RT-STORE-12); a fence never falls, and only a new one takes a lease from its holder, resets its gate or its answer,
--   or offers the branch again; a change of the wake-up alone does not move the revision; an earlier wake-up that was not
--   seen stays; a session's seat is left only by the operation that holds it, and never while its lease is open.
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
local now = now_ms()
local meta, refusal = enter(KEYS[1], now, ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local NEXT_TURN = '-' -- busy: the seat is free for the first in the queue
local RANK = { admitted = 1, active = 2, closed = 3, settled = 4 }
local STATUSES = { pending = true, success = true, failure = true, revoked = true, cancelled = true, indeterminate = true }
local op = redis.call('HMGET', KEYS[2], 'rev', 'phase', 'at', 'decision', 'reservation', 'tombstone')
if not op[1] or op[6] then
  return { 'ABSENT', now }
end
if op[2] == 'settled' then
  return { 'TERMINAL', now }
end
if op[1] ~= ARGV[3] then
  return { 'CONFLICT', now, op[1] }
end
refusal = outside(meta, now, tonumber(ARGV[4]), tonumber(ARGV[5]))
if refusal then
  return refusal
end
local phase, decision, reservation = ARGV[14], ARGV[15], ARGV[16]
local phase_after = phase ~= '' and phase or op[2]
if not RANK[phase_after] or RANK[phase_after] < RANK[op[2]] then
  return { 'INVALID', now, 'phase' }
end
if decision ~= '' and op[4] then
  return { 'TERMINAL', now }
end
if (RANK[phase_after] >= RANK.closed) ~= (decision ~= '' or op[4] ~= false) then
  return { 'INVALID', now, 'decision' }
end

-- now + ms, refused where it leaves the safe integers (RT-GUARD-09).
local overflow = false
local function after(ms)
  overflow = overflow or now + ms > MAX_SAFE
  return whole(now + ms)
end

local reserved = reservation
if reservation ~= '' and reservation ~= 'quarantined' then
  local keep = string.match(reservation, '^replayable (%d+)$')
  reserved = keep and 'replayable ' .. whole(now) .. ' ' .. after(keep)
end
if not reserved or reservation ~= '' and op[5] ~= 'pending' then
  return { 'INVALID', now, 'reservation' }
end
local operation, seat, turn = ARGV[6], ARGV[8], 'turn:' .. ARGV[9]

local session, waiting
if seat ~= '' then
  session = redis.call('HMGET', KEYS[4], 'phase', 'head', 'busy', 'state_rev', 'pending', 'halted',
    'bytes')
  if not session[1] or session[1] == 'closed' then
    return { 'NOT_FOUND', now }
  end
  local queued = redis.call('ZSCORE', KEYS[6], operation)
  local actual = session[3] == operation and 'busy' or queued and 'queued' or 'none'
  if actual ~= seat then
    return { 'ASSERTION', now, 'seat', '' }
  end
  if ARGV[10] ~= '' and ARGV[10] ~= session[4] then
    return { 'ASSERTION', now, 'state', '' }
  end
  waiting = redis.call('ZCARD', KEYS[6])
end

local at = 24

-- A word as it will be stored; the outbox word stays a mark until its entry is written.
local function word(value, stored)
  if value == '=' then
    return stored
  end
  local delay = string.match(value, '^%+(%d+)$')
  return delay and after(delay) or value
end

-- The branch as stored and as it will be, or nil and the assertion that refuses the change.
local function asserted(index, assertion, expired, loaded, words)
  local stored = redis.call('HGET', KEYS[2], 'b:' .. index)
  local b, was, new = parse_branch(stored), parse_branch(loaded), {}
  if words == '=' then
    if stored ~= loaded then
      return nil, 'same'
    end
    return b
  end
  if not b or b[STATUS] ~= 'pending' then
    return nil, 'status'
  end
  local until_ms = tonumber(b[UNTIL])
  if assertion == 'live' then
    if b[EPOCH] ~= was[EPOCH] or b[FENCE] ~= was[FENCE] or b[HOLDER] ~= was[HOLDER]
      or not (b[GATE] == 'answered' or until_ms > now) then
      return nil, 'live'
    end
  else
    for i = 1, DIGEST do
      if i ~= UNTIL and b[i] ~= was[i] then
        return nil, 'same'
      end
    end
  end
  if expired == '1' and until_ms > now then
    return nil, 'expired'
  end
  for w in string.gmatch(words, '%S+') do
    local i = #new + 1
    new[i] = i == OUTBOX and w or word(w, b[i])
  end
  if not parse_branch(format_branch(new)) or not STATUSES[new[STATUS]] or not string.match(new[OUTBOX], '^[=@-]$') then
    return nil, 'words'
  end
  local risen = tonumber(new[FENCE]) - tonumber(b[FENCE])
  if risen < 0 or tonumber(new[EPOCH]) < tonumber(b[EPOCH]) or tonumber(new[ATTEMPT]) < tonumber(b[ATTEMPT]) then
    return nil, 'fence'
  end
  if risen > 0 then
    -- Taken from its holder, for nobody yet: a lease is granted by claim alone.
    if new[HOLDER] ~= '-' or new[GATE] ~= 'closed' or new[DIGEST] ~= '-' then
      return nil, 'grant'
    end
  elseif new[ATTEMPT] ~= b[ATTEMPT] or new[HOLDER] ~= b[HOLDER] or new[GATE] ~= b[GATE] or new[DIGEST] ~= b[DIGEST]
    or new[OUTBOX] == '@' then
    return nil, 'grant'
  end
  return b, new
end

local branches, status_after = {}, {}
for _ = 1, tonumber(ARGV[20]) do
  local b, new = asserted(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4])
  if status_after[ARGV[at]] then
    return { 'INVALID', now, 'branches' }
  end
  if not b then
    return { 'ASSERTION', now, new, ARGV[at] }
  end
  if new then
    if new[STATUS] ~= 'pending' and phase_after == 'admitted' then
      return { 'INVALID', now, 'phase' }
    end
    local old_box, new_box = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
    if old_box == 0 and new[OUTBOX] ~= '=' and b[OUTBOX] ~= '-' or new_box == 0 and new[OUTBOX] == '@' then
      return { 'INVALID', now, 'outbox' }
    end
    for _, box in ipairs({ old_box, new_box }) do
      if box > 0 then
        redis.call('XLEN', KEYS[box])
      end
    end
    status_after[ARGV[at]] = new[STATUS]
    branches[#branches + 1] = { index = ARGV[at], old = b, new = new, old_box = old_box, new_box = new_box,
                                message = ARGV[at + 7] }
  end
  at = at + 8
end
if phase == 'settled' then
  local i, words = 0, redis.call('HGET', KEYS[2], 'b:0')
  while words do
    if (status_after[tostring(i)] or string.match(words, '^%S+')) == 'pending' then
      return { 'INVALID', now, 'phase' }
    end
    i = i + 1
    words = redis.call('HGET', KEYS[2], 'b:' .. i)
  end
end
local seen, wake_at = redis.call('ZSCORE', KEYS[3], operation), nil
if ARGV[12] ~= '' then
  wake_at = tonumber(ARGV[12])
end
if ARGV[13] ~= '' then
  wake_at = math.min(wake_at or MAX_SAFE, tonumber(after(ARGV[13])))
end
if overflow then
  return { 'INVALID', now, 'duration' }
end

local fields, deleted = {}, {}
local function put(field, value)
  fields[#fields + 1], fields[#fields + 2] = field, value
end
local foreign = false
local function answer_field(field)
  foreign = foreign or not string.match(field, '^[rxo]:%d+$')
  return field
end
for _ = 1, tonumber(ARGV[21]) do
  put(answer_field(ARGV[at]), ARGV[at + 1])
  at = at + 2
end
for _ = 1, tonumber(ARGV[22]) do
  deleted[#deleted + 1] = answer_field(ARGV[at])
  at = at + 1
end
if foreign then
  return { 'INVALID', now, 'field' }
end
local facts = tonumber(ARGV[23])
if facts > 0 and not session then
  return { 'INVALID', now, 'facts' }
end
local head = session and tonumber(session[2]) or 0
if head + facts > MAX_SAFE then
  return { 'INVALID', now, 'sequence' }
end

-- From here on only writes; facts first, so that the one write that can be refused by its own key comes before all.
local outcome_seq, kept = '', 0
for _ = 1, facts do
  head = head + 1
  redis.call('XADD', KEYS[5], whole(head) .. '-0', 'k', ARGV[at], 'c', ARGV[at + 1], 'p', ARGV[at + 2], 't', whole(now))
  kept = kept + #ARGV[at + 2]
  if ARGV[at] == 'outcome' then
    outcome_seq = whole(head)
    put('outcome_seq', outcome_seq)
  end
  at = at + 3
end

local lease_open_until
for _, change in ipairs(branches) do
  local b, new = change.old, change.new
  if new[OUTBOX] == '=' then
    new[OUTBOX] = b[OUTBOX]
  elseif b[OUTBOX] ~= '-' then
    redis.call('XACK', KEYS[change.old_box], 'work', b[OUTBOX])
    redis.call('XDEL', KEYS[change.old_box], b[OUTBOX])
  end
  if new[OUTBOX] == '@' then
    new[OUTBOX] = redis.call('XADD', KEYS[change.new_box], '*', 'k', 'request', 'o', operation, 'b', change.index,
      'a', new[ATTEMPT], 's', ARGV[9], 'm', change.message)
  end
  if new[GATE] == 'open' and tonumber(new[UNTIL]) > now then
    lease_open_until = new[UNTIL]
  end
  put('b:' .. change.index, format_branch(new))
end

if phase ~= '' then
  put('phase', phase)
end
if decision ~= '' then
  put('decision', whole(now) .. ' ' .. decision)
end
if reservation ~= '' then
  put('reservation', reserved)
end
if ARGV[17] ~= '' then
  put('state', ARGV[17])
end
local revision = op[1]
if #fields > 0 or #deleted > 0 or facts > 0 then
  revision = whole(op[1] + 1)
  put('rev', revision)
  redis.call('HSET', KEYS[2], unpack(fields))
  if #deleted > 0 then
    redis.call('HDEL', KEYS[2], unpack(deleted))
  end
end

if phase == 'settled' then
  redis.call('ZREM', KEYS[3], operation)
elseif wake_at and seen == ARGV[11] then
  redis.call('ZADD', KEYS[3], whole(wake_at), operation)
elseif wake_at then
  redis.call('ZADD', KEYS[3], 'LT', whole(wake_at), operation)
end

if phase == 'settled' then
  kept = kept - (string.match(op[3], '^%d+ %d+ %d+ (%d+)$') or 0)
end

if session then
  local busy, pending, halted, turn_at = session[3], tonumber(session[5]), session[6], nil
  if decision ~= '' then
    pending = pending - 1
    if seat == 'queued' then
      redis.call('ZREM', KEYS[6], operation)
      waiting = waiting - 1
    elseif seat == 'busy' then
      if lease_open_until then
        turn_at = lease_open_until
      else
        busy = ''
        if waiting > 0 then
          -- Kept for the next in the queue: an admission may only take a seat that nobody waits for.
          busy, turn_at = NEXT_TURN, now
        end
      end
    end
    if session[1] == 'closing' and pending == 0 then
      turn_at = turn_at or now
    end
    if ARGV[19] == '1' then
      halted = operation
    end
  end
  if decision ~= '' or facts > 0 then
    local changes = { 'head', whole(head), 'busy', busy, 'pending', whole(pending), 'halted', halted }
    if ARGV[18] ~= '' then
      kept = kept + #ARGV[18] - redis.call('HSTRLEN', KEYS[4], 'state')
      changes[#changes + 1], changes[#changes + 2] = 'state', ARGV[18]
      changes[#changes + 1], changes[#changes + 2] = 'state_rev', whole(session[4] + 1)
    end
    redis.call('HSET', KEYS[4], 'bytes', whole((session[7] or 0) + kept), unpack(changes))
  end
  if turn_at then
    redis.call('ZADD', KEYS[3], 'LT', turn_at, turn)
  end
end
-- Settling is never refused for a quota; a count that cannot be read is left alone and doctor tells.
local usage = counted(meta.usage, 0, kept, phase == 'settled' and -1 or 0, 0)
if usage then
  redis.call('HSET', KEYS[1], 'last_ms', whole(now), 'usage', usage)
else
  redis.call('HSET', KEYS[1], 'last_ms', whole(now))
end
if ARGV[7] ~= '' then
  wake(ARGV[7])
end
return { 'OK', now, revision, outcome_seq }
