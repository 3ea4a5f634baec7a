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
