"""A tenant's limits at the door: what a caller is told, and what goes on beyond them."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import msgspec
import pytest

from admission_svc import live
from shared.domain.limits import TenantLimits
from shared.store.registry import set_limits
from tests.admission.house import Client, House
from tests.admission.looking import streaming
from tests.support.polling import wait_until


async def limit(door: House, **changes: int) -> None:
    await set_limits(door.admin, "acme", TenantLimits(**changes))


@pytest.fixture
async def ready(alice: Client) -> Client:
    assert (await alice.open("s1")).status_code == 201
    return alice


def refused(answer: httpx.Response, status: int) -> str:
    """The message of a receipt that declines by a limit; 0 seconds where repeating is no use."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (answer.json()["disposition"], error["code"]) == ("rejected", "limit_exceeded")
    assert error["retryable"] is (status != 413)
    assert ("retry-after" in answer.headers) is (status != 413)
    return str(error["message"])


@pytest.mark.requirement("DASP-CORE-012b")
@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"operations": 1}, 503, "stored operations"),
        ({"bytes": 1}, 503, "stored bytes"),
        ({"open_operations": 1}, 503, "open operations"),
        ({"outbox_depth": 1}, 503, "work waiting for one peer"),
        ({"record_bytes": 1}, 413, "the size of one record"),
        ({"admissions_per_second": 1, "burst": 1}, 429, "admissions per second"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_beyond_a_limit_new_work_is_declined_and_everything_else_goes_on(
    door: House, ready: Client, changes: dict[str, int], status: int, said: str
) -> None:
    first = await ready.submit("s1", "c1", {"n": 1})
    assert first.status_code == 201
    await limit(door, **changes)
    if status == 429:
        await ready.submit("s1", "burst")
    declined = await ready.submit("s1", "c2")
    assert said in refused(declined, status)
    equal = await ready.submit("s1", "c1", {"n": 1})
    assert (equal.status_code, equal.json()["admission_sequence"]) == (200, 1)
    assert (await ready.submit("s1", "c1", {"n": 2})).status_code == 409
    assert (await ready.outcome("s1", "c1")).json()["state"] == "pending"
    await door.work("c1", {"done": True}, session_id="s1")
    assert (await ready.outcome("s1", "c1")).json()["outcome"]["status"] == "completed"
    assert (await ready.page("s1")).json()["events"][0]["data"]["command_id"] == "c1"
    assert (await ready.http.put("/v1/sessions/s1/cursors/me", json={"cursor": 1})).status_code == 200
    # A declined command left its id free.
    await limit(door)
    assert (await ready.submit("s1", "c2")).status_code == 201


async def test_members_of_a_batch_are_declined_each_for_itself(door: House, ready: Client) -> None:
    await limit(door, open_operations=2)
    commands = [{"command_id": f"c{n}", "name": "note.write", "input": {}} for n in range(4)]
    answer = await ready.http.post("/v1/sessions/s1/commands:batch", json={"commands": commands})
    receipts = answer.json()["receipts"]
    assert [r["disposition"] for r in receipts] == ["accepted", "accepted", "rejected", "rejected"]
    assert {r["error"]["code"] for r in receipts[2:]} == {"limit_exceeded"}


@pytest.mark.parametrize(
    ("changes", "status"), [({"sessions": 1}, 503), ({"bytes": 1}, 503), ({"burst": 1}, 429)]
)
async def test_beyond_a_limit_no_session_is_opened_but_those_there_are_reopened(
    door: House, ready: Client, changes: dict[str, int], status: int
) -> None:
    await limit(door, admissions_per_second=1, **{"burst": 100, **changes})
    if status == 429:
        await ready.submit("s1", "burst")
    answer = await ready.open("s2")
    assert (answer.status_code, answer.json()["kind"]) == (status, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await ready.open("s1")).status_code == 200


async def test_a_limit_is_one_tenants_own(door: House, ready: Client) -> None:
    await door.tenant("beta")
    other = await door.client("alice", tenant="beta")
    await limit(door, operations=0, sessions=0, bytes=0)
    assert (await other.open("s1")).status_code == 201
    assert (await other.submit("s1", "c1")).status_code == 201
    assert (await ready.submit("s1", "c1")).status_code == 503


async def test_racing_submissions_fill_a_limit_exactly(door: House, ready: Client) -> None:
    await limit(door, open_operations=5)
    answers = await asyncio.gather(*(ready.submit("s1", f"c{n // 2}") for n in range(40)))
    told = Counter(answer.status_code for answer in answers)
    assert told[201] == 5
    assert told[201] + told[200] + told[503] == 40


async def test_who_may_not_wait_is_answered_at_once(
    door: House, ready: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RECHECK_S", 10_000.0)
    await limit(door, waiters=1)
    await ready.submit("s1", "c1")
    first = asyncio.create_task(ready.outcome("s1", "c1", wait=30))
    await wait_until(lambda: len(door.listening.state.tasks) == 1)
    await wait_until(lambda: door.runtime.wake.subscribed("acme"))
    for answer in (
        await ready.outcome("s1", "c1", wait=30),
        await ready.page("s1", wait=30, after=1),
        await ready.submit("s1", "c1", headers={"prefer": "wait=30"}),
    ):
        assert answer.status_code == 200
        assert "preference-applied" not in answer.headers
    await door.work("c1", session_id="s1")
    assert (await first).headers["preference-applied"] == "wait=30"
    assert (await ready.page("s1", wait=1, after=2)).headers["preference-applied"] == "wait=1"


async def test_streams_are_bounded_per_tenant_and_their_places_come_back(door: House, ready: Client) -> None:
    await limit(door, streams=1)
    await ready.submit("s1", "c1")
    async with streaming(ready, "s1") as feed:
        await feed.updates(1)
        answer = await ready.http.get("/v1/sessions/s1/updates", headers={"accept": "text/event-stream"})
        assert (answer.status_code, answer.json()["kind"]) == (503, "unavailable")
        assert "retry-after" in answer.headers
        assert (await ready.page("s1")).json()["head"] == 1

    async def again() -> bool:
        async with streaming(ready, "s1") as feed:
            return feed.response.status_code == 200

    for _ in range(200):
        if await again():
            break
    else:
        pytest.fail("a stream that ended still takes a place")


async def test_limits_are_published_and_use_only_to_operators(door: House, ready: Client) -> None:
    limits = TenantLimits(operations=7, streams=3)
    await set_limits(door.admin, "acme", limits)
    await ready.submit("s1", "c1")
    told = (await ready.http.get("/v1/authority")).json()
    assert msgspec.convert(told["limits"]["tenant"], TenantLimits) == limits
    assert told["usage"] is None
    operator = await door.client("olga", "operator")
    usage = (await operator.http.get("/v1/authority")).json()["usage"]
    assert (usage["operations"], usage["openOperations"], usage["sessions"]) == (1, 1, 1)
    assert usage["bytes"] > 0
