"""A store that forgets its scripts again and again while commands come singly and in batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import httpx
import pytest

from tests.faults.contracts import CONCURRENT, SERIAL, Profile
from tests.faults.system import System, free_port

BATCH: Final = 100
FLUSHES: Final = 20
EVERY_S: Final = 0.1
_ROOM: Final = httpx.Limits(max_connections=None)


@contextlib.asynccontextmanager
async def flushing(system: System) -> AsyncIterator[list[int]]:
    """The script cache is emptied every 100 ms; the list grows with each time."""
    flushed: list[int] = []

    async def flush() -> None:
        while True:
            await asyncio.to_thread(system.raw.script_flush)
            flushed.append(len(flushed))
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(flush())
    try:
        yield flushed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Submitting:
    """Somebody who submits to one session, singly or in batches, and remembers what was told."""

    def __init__(self, http: httpx.AsyncClient, session: str, size: int) -> None:
        self._http = http
        self._path = f"/v1/sessions/{session}/commands"
        self._size = size
        self.prefix = ""
        self.sequences: list[int] = []

    async def until(self, enough: Callable[[], bool]) -> None:
        """Go on until it is enough."""
        while not enough():
            await self._once()

    async def _once(self) -> None:
        number = len(self.sequences)
        batch = [self._command(f"{self.prefix}-{number + i}") for i in range(self._size)]
        if self._size == 1:
            answer = await self._http.post(self._path, json=batch[0])
            assert answer.status_code == 201, answer.text
            receipts = [answer.json()]
        else:
            answer = await self._http.post(self._path + ":batch", json={"commands": batch})
            assert answer.status_code == 200, answer.text
            receipts = answer.json()["receipts"]
        assert [receipt["disposition"] for receipt in receipts] == ["accepted"] * self._size
        self.sequences += [receipt["admission_sequence"] for receipt in receipts]

    def _command(self, name: str) -> dict[str, Any]:
        given = {"id": name + "x" * 2_000, "amount": 1, "refuse": False}
        return {"command_id": name, "name": "fault.safe", "input": given}


async def opened(http: httpx.AsyncClient, session: str, profile: Profile) -> None:
    body = {"actor_id": "a1", "profile": {"id": profile.id, "version": profile.version}}
    assert (await http.put(f"/v1/sessions/{session}", json=body)).status_code == 201


@pytest.mark.case(96)
async def test_no_single_command_and_no_member_of_a_batch_fails_under_flushes(system: System) -> None:
    """Two doors, so that one loads the scripts again while the other is in the middle of a batch. What a
    caller is told comes in the order of what it asked for.
    """
    other = free_port()
    await asyncio.gather(system.door(), system.door(port=other))
    auth = {"authorization": f"Bearer {system.token}"}
    async with contextlib.AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, headers=auth, timeout=30.0, limits=_ROOM)
            )
            for url in (system.door_url, f"http://127.0.0.1:{other}")
        ]
        for session, profile in (("batched", CONCURRENT), ("serial", SERIAL), ("single", CONCURRENT)):
            await opened(one, session, profile)
        everybody = [
            Submitting(one, "batched", BATCH),
            Submitting(two, "serial", BATCH),
            *(Submitting(http, "single", 1) for http in (one, two)),
        ]
        for number, submitting in enumerate(everybody):
            submitting.prefix = str(number)
        async with flushing(system) as flushed:
            await asyncio.gather(*(each.until(lambda: len(flushed) >= FLUSHES) for each in everybody))
        batched, serial, *singles = everybody
        for each in everybody:
            assert each.sequences == sorted(each.sequences), "told in another order than asked"
        for submitters in ([batched], [serial], singles):
            told = sorted(sequence for each in submitters for sequence in each.sequences)
            assert told == list(range(1, len(told) + 1))
