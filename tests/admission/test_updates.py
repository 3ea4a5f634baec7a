"""Replay pages: contiguous, bounded, stable; and waiting for the next one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from admission_svc import live
from shared.domain.canonical import MAX_MESSAGE_BYTES
from shared.store.keys import Keys
from shared.store.registry import revoke_token
from tests.admission.house import COUNTER, Client, House
from tests.admission.looking import assert_refused, everything
from tests.support.polling import wait_until

MIB = 1_048_576
ENOUGH_S = 25


async def fill(client: Client, session_id: str, count: int, first: int = 1, value: Any = None) -> None:
    """Admit ``count`` commands, which makes as many updates."""
    for at in range(first, first + count, 100):
        body = [
            {"command_id": f"{session_id}-{i}", "name": "note.write", "input": value or {}}
            for i in range(at, min(at + 100, first + count))
        ]
        response = await client.http.post(
            f"/v1/sessions/{session_id}/commands:batch", json={"commands": body}
        )
        assert all(receipt["disposition"] == "accepted" for receipt in response.json()["receipts"])


def sequences(page: dict[str, Any]) -> list[int]:
    return [event["data"]["sequence"] for event in page["events"]]


@pytest.mark.requirement("DASPX-03", "DASP-CORE-011c", "DASP-CORE-009a")
async def test_a_page_begins_after_the_cursor_and_ends_at_head_or_limit(alice: Client) -> None:
    await alice.open("s1")
    await fill(alice, "s1", 5)
    for after, limit, expected in (
        (0, 100, [1, 2, 3, 4, 5]),
        (0, 2, [1, 2]),
        (2, 2, [3, 4]),
        (4, 2, [5]),
        (4, 1, [5]),
        (5, 100, []),
        (5, 1, []),
    ):
        page = (await alice.page("s1", after=after, limit=limit)).json()
        assert set(page) == {"session_id", "after", "next", "head", "events"}
        assert sequences(page) == expected
        assert (page["session_id"], page["after"], page["head"]) == ("s1", after, 5)
        assert page["next"] == (expected[-1] if expected else after)
    default = (await alice.page("s1")).json()
    assert (default["after"], sequences(default)) == (0, [1, 2, 3, 4, 5])


@pytest.mark.requirement("DASPX-03")
async def test_an_empty_session_has_an_empty_page(alice: Client) -> None:
    await alice.open("s1")
    page = (await alice.page("s1")).json()
    assert page == {"session_id": "s1", "after": 0, "next": 0, "head": 0, "events": []}


@pytest.mark.requirement("DASPX-03")
async def test_a_cursor_beyond_the_head_is_invalid_even_by_one(alice: Client, raw: redis.Redis) -> None:
    await alice.open("s1")
    await fill(alice, "s1", 3)
    before = everything(raw)
    assert (await alice.page("s1", after=3)).status_code == 200
    for after in (4, 10**9, 2**53 - 1):
        assert_refused(await alice.page("s1", after=after), 400, "after: must not be beyond the head")
    assert everything(raw) == before


@pytest.mark.requirement("DASPX-03", "DASPX-06")
async def test_a_page_holds_a_hundred_updates_and_no_more(alice: Client) -> None:
    await alice.open("s1")
    await fill(alice, "s1", 101)
    page = (await alice.page("s1", limit=100)).json()
    assert (sequences(page), page["next"], page["head"]) == (list(range(1, 101)), 100, 101)
    assert sequences((await alice.page("s1")).json()) == list(range(1, 101))
    assert_refused(await alice.page("s1", limit=101), 400, "limit:")
    assert sequences((await alice.page("s1", after=100)).json()) == [101]


@pytest.mark.requirement("DASPX-03", "DASPX-06")
async def test_a_page_stays_within_a_mebibyte_and_ends_early(door: House, alice: Client) -> None:
    """Facts near the limit of a saved update: pages end before the limit asked for, and lose none."""
    await alice.open("s1")
    count = 20
    for i in range(count):
        await alice.submit("s1", f"c{i}")
        await door.work(f"c{i}", {"said": "x" * 60_000}, session_id="s1")
    after, seen, pages = 0, list[int](), 0
    while True:
        response = await alice.page("s1", after=after, limit=100)
        page = response.json()
        assert len(response.content) <= MIB
        if not page["events"]:
            break
        pages += 1
        assert sequences(page)[0] == after + 1
        if page["next"] < page["head"]:
            # As full as it can be: what follows would not have gone in.
            assert len(response.content) > MAX_MESSAGE_BYTES - 65_536 - 1_024
        seen += sequences(page)
        after = page["next"]
    assert seen == list(range(1, 2 * count + 1))
    assert pages == 2


@pytest.mark.requirement("DASP-CORE-009c", "DASP-CORE-011c")
async def test_a_replay_gives_the_same_events_whatever_the_paging(door: House, alice: Client) -> None:
    await alice.open("s1")
    await alice.submit("s1", "c1")
    await door.work("c1", {"v": 1}, session_id="s1", updates={"note.written": {"v": 1}})
    whole = (await alice.page("s1")).json()["events"]
    single = [(await alice.page("s1", after=i, limit=1)).json()["events"][0] for i in range(3)]
    assert whole == single
    authority = (await (await door.handle()).snapshots.get()).revisions.authority
    assert [event["data"]["kind"] for event in whole] == [
        "command.accepted",
        "application",
        "command.outcome",
    ]
    assert len({event["id"] for event in whole}) == 3
    for sequence, event in enumerate(whole, 1):
        assert event["source"] == f"urn:lockgate:acme:{authority}"
        assert (event["specversion"], event["type"]) == ("1.0", "dasp.v1.update")
        assert set(event["data"]) == {"session_id", "sequence", "kind", "command_id", "payload"}
        told = event["data"]
        assert (told["session_id"], told["sequence"], told["command_id"]) == ("s1", sequence, "c1")


@pytest.mark.case(66)
@pytest.mark.requirement("DASP-CORE-009a", "DASP-CORE-011f", "DASPX-03")
async def test_a_reader_by_cursor_sees_every_fact_of_fifty_writers_once_and_in_order(
    door: House, alice: Client
) -> None:
    """Paging while fifty writers commit: no sequence is skipped, and a refused command leaves no hole."""
    await alice.open("s1")
    each = 6
    done = asyncio.Event()

    async def write(writer: int) -> None:
        for i in range(each):
            response = await alice.submit("s1", f"w{writer}-{i}", {"v": i})
            assert response.status_code == 201
            refused = await alice.submit("s1", f"w{writer}-{i}", {"v": i, "other": True})
            assert refused.status_code == 409
            bad = await alice.submit("s1", f"bad-{writer}-{i}", name="note.unknown")
            assert bad.status_code == 422

    seen: list[tuple[int, str]] = []

    async def read() -> None:
        after = 0
        while True:
            over = done.is_set()
            page = (await alice.page("s1", after=after, limit=7)).json()
            assert sequences(page) == list(range(after + 1, page["next"] + 1))
            assert page["next"] <= page["head"]
            assert bool(page["events"]) == (after < page["head"])
            seen.extend((e["data"]["sequence"], e["data"]["command_id"]) for e in page["events"])
            after = page["next"]
            if over and after == page["head"]:
                return

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(writer) for writer in range(50)))
    done.set()
    await asyncio.wait_for(reader, ENOUGH_S)
    assert [sequence for sequence, _ in seen] == list(range(1, 50 * each + 1))
    assert {command for _, command in seen} == {f"w{w}-{i}" for w in range(50) for i in range(each)}


async def test_the_state_of_a_view_is_that_of_its_cursor(door: House, alice: Client) -> None:
    await alice.open("n1", COUNTER)
    await alice.submit("n1", "c1", {"amount": 3}, name="counter.add")
    before = (await alice.http.get("/v1/sessions/n1")).json()
    assert (before["cursor"], before["state"]) == (1, {"value": 0})
    await door.work(
        "c1", {"value": 3}, session_id="n1", updates={"counter.changed": {"value": 3}}, state={"value": 3}
    )
    view = (await alice.http.get("/v1/sessions/n1")).json()
    assert (view["cursor"], view["state"]) == (3, {"value": 3})
    assert (await alice.page("n1")).json()["head"] == 3


def waiting(door: House) -> int:
    """How many requests are under way in the door."""
    return len(door.listening.state.tasks)


async def test_a_page_is_held_until_there_is_an_update(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Woken by the commit's own hint: looking again by itself is moved out of reach."""
    monkeypatch.setattr(live, "RECHECK_S", 10_000.0)
    await alice.open("s1")
    await fill(alice, "s1", 1)
    held = asyncio.create_task(alice.page("s1", wait=30, after=1))
    await wait_until(lambda: waiting(door) == 1)
    await wait_until(lambda: door.runtime.wake.subscribed("acme"))
    assert not held.done()
    await alice.submit("s1", "c2")
    response = await asyncio.wait_for(held, ENOUGH_S)
    assert sequences(response.json()) == [2]
    assert response.headers["preference-applied"] == "wait=30"


async def test_a_wait_without_an_update_ends_with_an_empty_page(alice: Client) -> None:
    await alice.open("s1")
    response = await alice.page("s1", wait=1, after=0)
    assert (response.status_code, response.json()["events"]) == (200, [])
    assert response.headers["preference-applied"] == "wait=1"


async def test_another_sessions_update_does_not_end_a_wait(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RECHECK_S", 10_000.0)
    await alice.open("s1")
    await alice.open("s2")
    held = asyncio.create_task(alice.page("s1", wait=30))
    await wait_until(lambda: waiting(door) == 1)
    await fill(alice, "s2", 3)
    await fill(alice, "s1", 1)
    page = (await asyncio.wait_for(held, ENOUGH_S)).json()
    assert [event["data"]["command_id"] for event in page["events"]] == ["s1-1"]


@pytest.mark.requirement("DASPX-09")
async def test_a_wait_that_outlives_its_token_tells_nothing(door: House, alice: Client) -> None:
    await alice.open("s1")
    held = asyncio.create_task(alice.page("s1", wait=30))
    await wait_until(lambda: waiting(door) == 1)
    other = await door.client("alice")
    await revoke_token(door.admin, "acme", alice.token.split(".")[3])
    assert (await other.submit("s1", "c1")).status_code == 201
    response = await asyncio.wait_for(held, ENOUGH_S)
    assert_refused(response, 401, kind="denied")


async def test_a_gone_reader_ends_its_wait(door: House, alice: Client) -> None:
    await alice.open("s1")
    held = asyncio.create_task(alice.page("s1", wait=30))
    await wait_until(lambda: waiting(door) == 1)
    held.cancel()
    await wait_until(lambda: waiting(door) == 0)


async def test_a_drain_ends_a_wait_with_what_there_is(door: House, alice: Client) -> None:
    await alice.open("s1")
    held = asyncio.create_task(alice.page("s1", wait=30))
    await wait_until(lambda: waiting(door) == 1)
    door.door.drain()
    response = await asyncio.wait_for(held, ENOUGH_S)
    assert (response.status_code, response.json()["events"]) == (200, [])


@pytest.mark.case(71)
@pytest.mark.requirement("DASPX-04")
async def test_pages_of_others_look_like_pages_of_nothing(door: House, alice: Client, bob: Client) -> None:
    await door.tenant("zeta")
    stranger = await door.client("alice", tenant="zeta")
    await alice.open("s1")
    await fill(alice, "s1", 2)
    for client in (bob, stranger):
        for query in ({}, {"after": 1}, {"after": 99}, {"client": "x"}):
            there = await client.page("s1", **query)
            missing = await client.page("missing", **query)
            assert_refused(there, 404, kind="denied")
            assert there.content == missing.content


async def test_an_operator_reads_what_it_does_not_own(door: House, alice: Client) -> None:
    await alice.open("s1")
    await fill(alice, "s1", 2)
    operator = await door.client("olga", "operator")
    assert sequences((await operator.page("s1")).json()) == [1, 2]
    assert (await operator.submit("s1", "c9")).status_code == 403


@pytest.mark.requirement("DASP-CORE-012a")
async def test_nothing_is_pruned_from_a_long_history(alice: Client, raw: redis.Redis) -> None:
    await alice.open("s1")
    await fill(alice, "s1", 1_200)
    after, seen = 0, list[int]()
    while page := (await alice.page("s1", after=after)).json():
        if not page["events"]:
            break
        seen += sequences(page)
        after = page["next"]
    assert seen == list(range(1, 1_201))
    assert raw.xlen(Keys("acme").updates("s1")) == 1_200
