"""The mutation job: it finds every check, and a sample of it runs with every test run."""

from __future__ import annotations

import pytest

import lua
from tests.mutants.lexer import tokens
from tests.mutants.source import PARTS, SOURCES, mutants
from tests.support.processes import Processes

SNIPPET = """#!lua
-- if this then that
local a = b == 'if x then' and c
if not x or (y < now and z) then
  return { 'NO', now }
elseif q then
  redis.call('HSET', KEYS[1], 'f', t.call(1))
end
wake(ARGV[1])
"""


def test_each_check_is_dropped_and_each_of_its_operands() -> None:
    found = [(m.line, m.text, m.instead) for m in mutants("snippet.lua", SNIPPET)]
    assert found == [
        (3, "b == 'if x then'", "true"),
        (3, "b == 'if x then'", "false"),
        (4, "not x", "false"),
        (4, "not x or (y < now and z)", "false"),
        (4, "(y < now and z)", "false"),
        (4, "y < now", "true"),
        (4, "<", "<="),
        (4, "z", "true"),
        (6, "q", "false"),
        (7, "redis.call('HSET', KEYS[1], 'f', t.call(1))", ""),
        (9, "wake(ARGV[1])", ""),
    ]


def test_a_mutant_differs_by_its_one_place() -> None:
    for mutant in mutants("snippet.lua", SNIPPET):
        changed = mutant.applied(SNIPPET)
        assert changed != SNIPPET
        assert changed.startswith(SNIPPET[: mutant.start])
        assert changed.endswith(SNIPPET[mutant.end :])


@pytest.mark.parametrize("part", PARTS)
def test_no_condition_of_any_script_is_passed_over(part: str) -> None:
    conditions = sum(token.text in ("if", "elseif") for token in tokens(SOURCES[part]))
    assert sum(mutant.kind == "dropped" for mutant in mutants(part)) == conditions


def test_every_file_but_the_clock_is_judged() -> None:
    included = {
        f"include/{line.removeprefix(lua.INCLUDE).strip()}.lua"
        for text in SOURCES.values()
        for line in text.splitlines()
        if line.startswith(lua.INCLUDE)
    }
    assert set(PARTS) == {f"{name}.lua" for name in lua.NAMES} | included - {"include/time.lua"}


def test_a_sample_of_the_mutants_is_caught(processes: Processes) -> None:
    """The whole job is ``make mutants``."""
    job = processes.python("-m", "tests.mutants", "--short", "--verbose")
    assert job.wait(110) == 0, job.output
    assert " 0 survived" in job.output
