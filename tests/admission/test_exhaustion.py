"""The end of a session's sequence space: new work is refused, nothing wraps, all else goes on (DASPX-10)."""

from __future__ import annotations

from typing import Any, Final

import pytest
import redis

from shared.domain.ids import MAX_SAFE
from shared.domain.profile import MAX_UPDATES
from shared.store.keys import Keys
from tests.admission.house import COUNTER, Client, House
from tests.admission.looking import everything, streaming

KEPT_BACK: Final = MAX_UPDATES + 1
"""Sequences that a command may need after its admission, to end."""
START: Final = MAX_SAFE - 2 * (KEPT_BACK + 1)
"""A head behind which there is room for two commands and all that they may need."""
REFUSED: Final = {
    "code": "limit_exceeded",
    "message": "the session has no sequences left",
    "retryable": False,
}


@pytest.fixture
async def nearly(alice: Client, raw: redis.Redis) -> Client:
    """A caller with a session that has counted nearly as far as sequences go, its last command settled."""
    await alice.open("s1")
    raw.hset(Keys("acme").session("s1"), "head", START)
    return alice


def events(page: dict[str, Any]) -> list[tuple[int, str, str]]:
    found = [event["data"] for event in page["events"]]
    return [(fact["sequence"], fact["kind"], fact["command_id"]) for fact in found]


@pytest.mark.requirement("DASPX-10")
async def test_no_sequences_left_refuses_new_commands_and_stores_nothing(
    nearly: Client, raw: redis.Redis
) -> None:
    first, second = await nearly.submit("s1", "c1"), await nearly.submit("s1", "c2")
    assert [answer.json()["admission_sequence"] for answer in (first, second)] == [START + 1, START + 2]
    before = everything(raw)
    refused = await nearly.submit("s1", "c3")
    assert (refused.status_code, refused.json()["disposition"]) == (503, "rejected")
    assert (refused.json()["error"], refused.json()["admission_sequence"]) == (REFUSED, None)
    assert "retry-after" not in refused.headers, "waiting does not help"
    commands: list[dict[str, Any]] = [
        {"command_id": c, "name": "note.write", "input": {}} for c in ("c4", "c2", "c5")
    ]
    batch = await nearly.http.post("/v1/sessions/s1/commands:batch", json={"commands": commands})
    assert [receipt["disposition"] for receipt in batch.json()["receipts"]] == [
        "rejected",
        "duplicate",
        "rejected",
    ]
    assert [receipt["error"] for receipt in batch.json()["receipts"]] == [REFUSED, None, REFUSED]
    assert everything(raw) == before
    # Its id is not used up: another session takes it.
    await nearly.open("s2")
    assert (await nearly.submit("s2", "c3")).status_code == 201


@pytest.mark.requirement("DASPX-10")
async def test_what_was_admitted_before_the_end_goes_on_to_the_last_sequence(
    door: House, nearly: Client
) -> None:
    """Retries, outcomes, pages, cursors and streams; each answer with as many updates as there may be."""
    receipts = [(await nearly.submit("s1", c)).json() for c in ("c1", "c2")]
    assert (await nearly.submit("s1", "c3")).status_code == 503
    for receipt in receipts:
        as_many_as_may_be = {f"note.n{n}": {"n": n} for n in range(MAX_UPDATES)}
        await door.work(receipt["command_id"], session_id="s1", updates=as_many_as_may_be)
    assert (await nearly.http.get("/v1/sessions/s1")).json()["cursor"] == MAX_SAFE
    for receipt in receipts:
        again = await nearly.submit("s1", receipt["command_id"])
        assert (again.status_code, again.json()) == (200, {**receipt, "disposition": "duplicate"})
    outcome = (await nearly.outcome("s1", "c2")).json()
    assert (outcome["state"], outcome["sequence"]) == ("settled", MAX_SAFE)
    after, seen = START, list[tuple[int, str, str]]()
    while after < MAX_SAFE:
        page = (await nearly.page("s1", after=after)).json()
        assert page["head"] == MAX_SAFE
        seen += events(page)
        after = page["next"]
    assert [sequence for sequence, _, _ in seen] == list(range(START + 1, MAX_SAFE + 1))
    assert seen[-1] == (MAX_SAFE, "command.outcome", "c2")
    assert (await nearly.page("s1", after=MAX_SAFE)).json()["events"] == []
    put = await nearly.http.put("/v1/sessions/s1/cursors/x", json={"cursor": MAX_SAFE})
    assert put.json() == {"cursor": MAX_SAFE}
    async with streaming(nearly, "s1", {"last-event-id": str(MAX_SAFE - 1)}) as feed:
        (frame,) = await feed.updates(1)
        assert (frame.sequence, frame.id.partition("-")[2]) == (MAX_SAFE, str(MAX_SAFE))
    for command_id in ("c3", "c4"):
        assert (await nearly.submit("s1", command_id)).json()["error"] == REFUSED


@pytest.mark.requirement("DASPX-10")
async def test_a_serial_session_at_its_end_still_settles_and_closes(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1", COUNTER)
    raw.hset(Keys("acme").session("s1"), "head", START)
    for command_id in ("c1", "c2"):
        answer = await alice.submit("s1", command_id, {"amount": 1}, name="counter.add")
        assert answer.status_code == 201
    refused = await alice.submit("s1", "c3", {"amount": 1}, name="counter.add")
    assert refused.json()["error"] == REFUSED
    await door.work("c1", {"value": 1}, session_id="s1", state={"value": 1})
    view = (await alice.http.get("/v1/sessions/s1")).json()
    assert (view["state"], view["cursor"]) == ({"value": 1}, START + 3)
    assert (await alice.outcome("s1", "c2")).json()["state"] == "pending"
    assert (await alice.close("s1")).status_code == 202
