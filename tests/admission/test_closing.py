"""Closing a session for good: in two phases, with ids that stay unusable."""

from __future__ import annotations

import pytest
import redis

from tests.admission.house import COUNTER, Client, House
from tests.admission.looking import assert_refused, everything


@pytest.mark.requirement("DASP-CORE-012f")
async def test_closing_answers_reads_and_retries_and_declines_new_commands(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    first = (await alice.submit("s1", "c1", {"n": 1})).json()
    begun = await alice.close("s1")
    assert (begun.status_code, begun.json()) == (202, {"session_id": "s1", "phase": "closing"})
    assert (await alice.close("s1")).status_code == 202

    declined = await alice.submit("s1", "c2")
    assert declined.status_code == 409
    receipt = declined.json()
    assert receipt["disposition"] == "rejected"
    assert receipt["admission_sequence"] is None
    assert (receipt["error"]["code"], receipt["error"]["retryable"]) == ("conflict", False)

    again = await alice.submit("s1", "c1", {"n": 1})
    assert (again.status_code, again.json()["admission_sequence"]) == (200, first["admission_sequence"])
    assert (await alice.submit("s1", "c1", {"n": 2})).status_code == 409
    assert (await alice.outcome("s1", "c1")).json()["state"] == "pending"
    assert (await alice.page("s1")).json()["head"] == 1
    assert (await alice.http.get("/v1/sessions/s1")).status_code == 200
    assert (await alice.open("s1")).status_code == 200
    batch = await alice.http.post(
        "/v1/sessions/s1/commands:batch",
        json={"commands": [{"command_id": c, "name": "note.write", "input": {"n": 1}} for c in ("c1", "c3")]},
    )
    assert [r["disposition"] for r in batch.json()["receipts"]] == ["duplicate", "rejected"]


@pytest.mark.requirement("DASP-CORE-012f")
@pytest.mark.case(20)
async def test_what_was_closed_stays_unusable(door: House, alice: Client, raw: redis.Redis) -> None:
    """The same command into the closed session is not found, into any other one a conflict."""
    await alice.open("s1")
    await alice.open("s2")
    await alice.submit("s1", "c1", {"n": 1})
    await door.work("c1", {}, session_id="s1")
    await alice.close("s1")
    await door.purge("s1", "c1")
    before = everything(raw)

    gone = [
        await alice.open("s1"),
        await alice.http.get("/v1/sessions/s1"),
        await alice.page("s1"),
        await alice.outcome("s1", "c1"),
        await alice.submit("s1", "c1", {"n": 1}),
        await alice.submit("s1", "c9", {"n": 1}),
        await alice.http.get("/v1/sessions/s1/cursors/app"),
        await alice.http.put("/v1/sessions/s1/cursors/app", json={"cursor": 0}),
    ]
    missing = await alice.http.get("/v1/sessions/never")
    for answer in gone:
        assert (answer.status_code, answer.content) == (404, missing.content), answer.request
    elsewhere = await alice.submit("s2", "c1", {"n": 1})
    assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (409, "conflict")
    assert (await alice.outcome("s2", "c1")).status_code == 404
    assert everything(raw) == before


async def test_a_deletion_is_202_until_it_is_204_and_then_stays_204(
    door: House, alice: Client, bob: Client
) -> None:
    operator = await door.client("olga", "operator")
    await alice.open("s1")
    assert (await operator.close("s1")).status_code == 202
    await door.purge("s1")
    for client in (alice, operator, alice):
        answer = await client.close("s1")
        assert (answer.status_code, answer.content) == (204, b"")
    assert (await bob.close("s1")).status_code == 404
    assert (await alice.close("never")).status_code == 404


async def test_only_owner_and_operator_close(
    door: House, alice: Client, bob: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    worker = await door.client("worker", "peer:alfa")
    before = everything(raw)
    for client in (bob, worker):
        refused = await client.close("s1")
        assert (refused.status_code, refused.content) == (404, (await client.close("never")).content)
    assert everything(raw) == before


async def test_a_door_that_knew_the_session_finds_it_closed_by_another(
    door: House, alice: Client, redis_url: str
) -> None:
    """What is remembered of a session never says that it is open."""
    await alice.open("s1", COUNTER)
    assert (await alice.submit("s1", "c1", {"amount": 1}, name="counter.add")).status_code == 201
    handle = await door.handle()
    revisions = (await handle.snapshots.get()).revisions
    await handle.store.close_session("s1", revisions)
    declined = await alice.submit("s1", "c2", {"amount": 1}, name="counter.add")
    assert declined.json()["error"]["code"] == "conflict"
    await door.work("c1", {"value": 1}, session_id="s1", state={"value": 1})
    await door.purge("s1", "c1")
    assert_refused(
        await alice.submit("s1", "c2", {"amount": 1}, name="counter.add"), 404, "not found", kind="denied"
    )
