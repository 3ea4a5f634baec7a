"""The harness itself: polling fails in words, children end with their test, tracebacks do not pass unseen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.polling import wait_until, wait_until_blocking
from tests.support.processes import Processes, is_alive


async def test_polling_returns_what_the_condition_returned() -> None:
    answers = iter([0, None, "found"])

    async def later() -> str:
        return "awaited"

    assert await wait_until(lambda: next(answers)) == "found"
    assert await wait_until(later) == "awaited"


async def test_polling_looks_at_least_once() -> None:
    assert await wait_until(lambda: True, timeout=0)
    assert wait_until_blocking(lambda: True, timeout=0)


async def test_polling_in_vain_names_the_condition() -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s: .*nothing"):
        await wait_until(lambda: len("nothing") == 0, timeout=0)
    with pytest.raises(AssertionError, match=r"not within 0 s: .*nothing"):
        wait_until_blocking(lambda: len("nothing") == 0, timeout=0)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Processes]:
    """Children whose end the test itself watches."""
    folder = tmp_path / "others"
    folder.mkdir()
    children = Processes(folder)
    yield children
    children.end()


def test_a_traceback_is_reported_unless_expected(others: Processes) -> None:
    others.python("-c", "raise SystemExit(3)").wait()
    others.python("-c", "raise KeyError('expected')", may_print_traceback=True).wait()
    assert others.end() == []
    assert others.python("-c", "raise KeyError('unseen')").wait() == 1
    [printed] = others.end()
    assert "KeyError: 'unseen'" in printed


def test_all_that_a_child_started_ends_with_it(others: Processes) -> None:
    child = others.start("/bin/sh", "-c", "sleep 600 & echo inner $!; wait")
    inner = int(child.wait_for(r"inner (\d+)")[1])
    assert is_alive(child.pid)
    assert is_alive(inner)
    others.end()
    wait_until_blocking(lambda: not is_alive(child.pid) and not is_alive(inner))


def test_a_stopped_child_ends_too(others: Processes) -> None:
    child = others.python("-c", "print('up'); import time; time.sleep(600)")
    child.wait_for("^up$")
    child.pause()
    others.end()
    assert not child.running


def test_waiting_for_output_that_cannot_come_shows_what_came(others: Processes) -> None:
    child = others.start(sys.executable, "-c", "print('something else')")
    with pytest.raises(AssertionError, match=r"(?s)'wanted' was not printed, it ended:.*something else"):
        child.wait_for("wanted")


@pytest.mark.parametrize("round_number", [1, 2])
def test_every_test_starts_on_an_empty_store(round_number: int, raw: redis.Redis) -> None:
    assert raw.dbsize() == 0
    raw.set(f"left behind {round_number}", "x")


def test_loaded_scripts_outlive_the_emptying(raw: redis.Redis) -> None:
    sha = raw.script_load("return 1")
    raw.flushall()
    assert raw.script_exists(sha) == [True]
