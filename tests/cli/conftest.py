"""The command line against a real store, and records to look at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import pytest
from click.testing import CliRunner, Result

from shared.cli.main import cli
from shared.store.connection import Connection
from tests.support.world import World

T = TypeVar("T")


class Lockgate(Protocol):
    """Runs one command line and gives what it said; the status must be the one that was named."""

    def __call__(self, *arguments: str, status: int = 0, given: str | None = None) -> Result: ...


class LockgateJson(Protocol):
    """Runs one command line with ``--json`` and gives the document."""

    def __call__(self, *arguments: str, status: int = 0) -> Any: ...


def run_cli(url: str | None, *arguments: str, status: int = 0, given: str | None = None) -> Result:
    """Run a command line in this process; anything but an orderly end fails the test."""
    result = CliRunner().invoke(cli, arguments, input=given, env={"LOCKGATE_REDIS_URL": url})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def lockgate(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Lockgate:
    """The command on the emptied store."""
    monkeypatch.delenv("LOCKGATE_TENANT", raising=False)

    def run(*arguments: str, status: int = 0, given: str | None = None) -> Result:
        return run_cli(redis_url, *arguments, status=status, given=given)

    return run


@pytest.fixture
def lockgate_json(lockgate: Lockgate) -> LockgateJson:
    """The command's documents."""

    def run(*arguments: str, status: int = 0) -> Any:
        return json.loads(lockgate(*arguments, "--json", status=status).stdout)

    return run


@pytest.fixture
def seed(redis_url: str) -> Callable[[Callable[[World], Awaitable[T]]], T]:
    """Fills tenant acme with work at store level."""

    def filled(work: Callable[[World], Awaitable[T]]) -> T:
        async def work_in_world() -> T:
            async with Connection(redis_url) as connection:
                return await work(await World.create(connection))

        return asyncio.run(work_in_world())

    return filled
