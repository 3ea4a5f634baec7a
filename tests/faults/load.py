"""Clients that submit random commands until they are told to stop, each until it is answered for good."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Final

from tests.faults.client import Client, Command, Reply
from tests.faults.contracts import CONCURRENT, SERIAL

_KINDS: Final = ("safe", "keyed", "pay")
_REFUSED: Final = 0.05
_REPEATED: Final = 0.1
_SETTLED_S: Final = 90.0


class Load:
    """Random commands over some sessions, the same for the same ``random``."""

    def __init__(self, client: Client, rng: random.Random, serial: int = 3, concurrent: int = 3) -> None:
        self._client = client
        self._rng = rng
        self._sessions = [
            *((f"serial-{i}", SERIAL) for i in range(serial)),
            *((f"concurrent-{i}", CONCURRENT) for i in range(concurrent)),
        ]
        self._numbers = iter(range(1, 1_000_000))

    async def open(self) -> None:
        """Open every session."""
        for session, profile in self._sessions:
            await self._client.open(session, profile)

    def command(self) -> Command:
        """The next command."""
        rng = self._rng
        session, _ = rng.choice(self._sessions)
        amount, refuse = rng.randint(1, 9), rng.random() < _REFUSED
        return Command(f"{session}-{next(self._numbers)}", session, rng.choice(_KINDS), amount, refuse)

    async def run(self, clients: int, go_on: Callable[[], bool], patience: float = 0.0) -> list[Reply]:
        """So many callers at a time submit command after command while ``go_on`` says so; gives the last
        reply to each. Some commands are repeated after they were answered, and the share ``patience`` of
        them is waited for, so that workers keep up.
        """
        replies: list[Reply] = []

        async def call() -> None:
            while go_on():
                command = self.command()
                reply = await self._client.submit(command)
                replies.append(reply)
                if self._rng.random() < _REPEATED:
                    again = await self._client.once(command)
                    assert again.status in (0, 200, 503), again
                if self._rng.random() < patience:
                    await self._client.settled(command, _SETTLED_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(call())
        return replies

    async def submit(self, count: int, clients: int) -> list[Reply]:
        """Submit ``count`` commands by so many callers at a time."""
        numbers: Iterator[int] = iter(range(count))
        return await self.run(clients, lambda: next(numbers, None) is not None)
