"""Waiting for an outcome: on its own route and on the submission."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from admission_svc import live
from shared.store.registry import revoke_token
from tests.admission.house import Client, House
from tests.admission.looking import assert_refused
from tests.support.polling import wait_until
from tests.support.world import TENANT

ENOUGH_S = 20
SETTLED = {"status": "completed", "output": {"done": True}, "error": None}


@pytest.fixture
async def ready(alice: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A caller with a session. Nobody looks by itself: what ends a wait is the commit's own hint."""
    monkeypatch.setattr(live, "RECHECK_S", 10_000.0)
    await alice.open("s1")
    return alice


async def held(door: House, request: asyncio.Task[httpx.Response]) -> asyncio.Task[httpx.Response]:
    """The same request, once the door waits for it."""
    await wait_until(lambda: len(door.listening.state.tasks) == 1)
    await wait_until(lambda: door.runtime.wake.subscribed(TENANT))
    assert not request.done()
    return request


async def test_a_read_is_held_until_the_command_is_settled(door: House, ready: Client) -> None:
    await ready.submit("s1", "c1")
    request = await held(door, asyncio.create_task(ready.outcome("s1", "c1", wait=30)))
    await door.work("c1", {"done": True}, session_id="s1")
    answer = await asyncio.wait_for(request, ENOUGH_S)
    assert answer.json() == {
        "session_id": "s1",
        "command_id": "c1",
        "state": "settled",
        "sequence": 2,
        "outcome": SETTLED,
    }
    assert answer.headers["preference-applied"] == "wait=30"


async def test_another_commands_end_does_not_end_a_wait(door: House, ready: Client) -> None:
    for command_id in ("c1", "c2"):
        await ready.submit("s1", command_id)
    request = await held(door, asyncio.create_task(ready.outcome("s1", "c1", wait=30)))
    await door.work("c2", session_id="s1")
    await door.work("c1", {"done": True}, session_id="s1")
    assert (await asyncio.wait_for(request, ENOUGH_S)).json()["outcome"] == SETTLED


async def test_a_wait_that_ends_first_says_pending(ready: Client) -> None:
    await ready.submit("s1", "c1")
    answer = (await ready.outcome("s1", "c1", wait=1)).json()
    assert (answer["state"], answer["sequence"], answer["outcome"]) == ("pending", None, None)


@pytest.mark.requirement("DASP-CORE-008a")
async def test_a_held_submission_is_a_receipt_with_the_outcome_beside_it(door: House, ready: Client) -> None:
    waits = {"prefer": "wait=30"}
    request = await held(door, asyncio.create_task(ready.submit("s1", "c1", headers=waits)))
    await door.work("c1", {"done": True}, session_id="s1")
    answer = await asyncio.wait_for(request, ENOUGH_S)
    expected: dict[str, Any] = {
        "session_id": "s1",
        "command_id": "c1",
        "disposition": "accepted",
        "admission_sequence": 1,
        "error": None,
        "state": "settled",
        "sequence": 2,
        "outcome": SETTLED,
    }
    assert (answer.status_code, answer.json()) == (201, expected)
    assert answer.headers["preference-applied"] == "wait=30"
    again = await ready.submit("s1", "c1", headers=waits)
    assert (again.status_code, again.json()) == (200, {**expected, "disposition": "duplicate"})
    assert again.headers["idempotent-replayed"] == "true"


async def test_a_held_submission_that_is_not_settled_in_time_is_pending(ready: Client) -> None:
    answer = await ready.submit("s1", "c1", headers={"prefer": "wait=1"})
    assert answer.status_code == 201
    assert (answer.json()["disposition"], answer.json()["state"]) == ("accepted", "pending")


@pytest.mark.requirement("DASP-CORE-005a")
async def test_a_client_that_leaves_ends_its_wait_and_cancels_nothing(door: House, ready: Client) -> None:
    request = await held(door, asyncio.create_task(ready.submit("s1", "c1", headers={"prefer": "wait=30"})))
    request.cancel()
    await wait_until(lambda: not door.listening.state.tasks)
    await door.work("c1", {"done": True}, session_id="s1")
    assert (await ready.outcome("s1", "c1")).json()["outcome"] == SETTLED


async def test_a_drain_ends_a_wait_and_keeps_the_receipt(door: House, ready: Client) -> None:
    request = await held(door, asyncio.create_task(ready.submit("s1", "c1", headers={"prefer": "wait=30"})))
    door.door.drain()
    answer = await asyncio.wait_for(request, ENOUGH_S)
    assert (answer.status_code, answer.json()["state"]) == (201, "pending")


@pytest.mark.requirement("DASPX-09")
async def test_a_token_revoked_while_it_waits_learns_no_outcome(door: House, ready: Client) -> None:
    await ready.submit("s1", "c1")
    request = await held(door, asyncio.create_task(ready.outcome("s1", "c1", wait=30)))
    await revoke_token(door.admin, TENANT, ready.token.split(".")[3])
    handle = await door.handle()
    await handle.snapshots.reload(await handle.snapshots.get())
    await door.work("c1", {"done": True}, session_id="s1")
    assert_refused(await asyncio.wait_for(request, ENOUGH_S), 401, kind="denied", hidden="done")


@pytest.mark.requirement("DASPX-04")
async def test_a_command_that_is_not_of_this_session_is_never_pending(
    door: House, ready: Client, bob: Client
) -> None:
    await ready.open("s2")
    await ready.submit("s2", "c1")
    missing = await ready.outcome("s1", "never", wait=30)
    for answer in (await ready.outcome("s1", "c1", wait=30), await bob.outcome("s2", "c1", wait=30)):
        assert (answer.status_code, answer.content) == (404, missing.content)
