-- A branch record is twelve ASCII words; '-' stands for "none". The only stored text these scripts parse.
-- status peer attempt epoch fence holder until gate claims next outbox digest
local STATUS, PEER, ATTEMPT, EPOCH, FENCE, HOLDER = 1, 2, 3, 4, 5, 6
local UNTIL, GATE, CLAIMS, NEXT, OUTBOX, DIGEST = 7, 8, 9, 10, 11, 12
local BRANCH_PATTERN = '^(%S+) (%S+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S+) (%d+) (%d+) (%S+) (%S+)$'

local function parse_branch(raw)
  return raw and { string.match(raw, BRANCH_PATTERN) }
end

local function format_branch(b)
  return table.concat(b, ' ')
end
