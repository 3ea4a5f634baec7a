"""Batches: each command on its own merits, in order, as if it had come alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis

import lua
from shared.store.registry import remove_peer
from tests.admission.house import COUNTER, Client, House, house
from tests.admission.looking import assert_refused, everything
from tests.support.proxy import FaultProxy
from tests.support.world import TENANT


def write(command_id: str, value: Any = None, name: str = "note.write") -> dict[str, Any]:
    return {"command_id": command_id, "name": name, "input": {} if value is None else value}


async def submit(client: Client, *commands: dict[str, Any], session_id: str = "s1") -> httpx.Response:
    return await client.http.post(
        f"/v1/sessions/{session_id}/commands:batch", json={"commands": list(commands)}
    )


def told(answer: httpx.Response) -> list[tuple[str, int | None, str | None]]:
    """Disposition, sequence and error code of each receipt."""
    assert answer.status_code == 200, answer.text
    return [
        (r["disposition"], r["admission_sequence"], r["error"] and r["error"]["code"])
        for r in answer.json()["receipts"]
    ]


async def test_receipts_come_in_order_with_contiguous_sequences(alice: Client) -> None:
    await alice.open("s1")
    answer = await submit(alice, *[write(f"c{i}", {"n": i}) for i in range(100)])
    assert told(answer) == [("accepted", i + 1, None) for i in range(100)]
    assert [r["command_id"] for r in answer.json()["receipts"]] == [f"c{i}" for i in range(100)]
    again = await submit(alice, *[write(f"c{i}", {"n": i}) for i in range(100)])
    assert told(again) == [("duplicate", i + 1, None) for i in range(100)]


async def test_each_is_judged_on_its_own_merits_and_after_those_before_it(alice: Client) -> None:
    await alice.open("s1")
    await alice.submit("s1", "old", {"n": 1})
    deep: dict[str, Any] = {}
    for _ in range(17):
        deep = {"d": deep}
    answer = await submit(
        alice,
        write("old", {"n": 1}),
        write("old", {"n": 2}),
        write("a"),
        write("a"),
        write("a", {"n": 2}),
        write("a", name="note.unknown"),
        write("b", name="note.unknown"),
        write("b"),
        write("c", deep),
        write("d"),
    )
    assert told(answer) == [
        ("duplicate", 1, None),
        ("rejected", None, "conflict"),
        ("accepted", 2, None),
        ("duplicate", 2, None),
        ("rejected", None, "conflict"),
        ("rejected", None, "conflict"),
        ("rejected", None, "unsupported_command"),
        ("accepted", 3, None),
        ("rejected", None, "limit_exceeded"),
        ("accepted", 4, None),
    ]


@pytest.mark.requirement("DASP-CORE-001c")
async def test_input_that_the_profile_forbids_is_that_members_receipt(alice: Client) -> None:
    await alice.open("s1", COUNTER)
    answer = await submit(
        alice,
        write("a", {"amount": 1}, "counter.add"),
        write("b", {"amount": "1"}, "counter.add"),
        write("c", {"amount": 1}, "counter.add"),
    )
    assert told(answer) == [
        ("accepted", 1, None),
        ("rejected", None, "invalid_message"),
        ("accepted", 2, None),
    ]
    assert "/commands/1/input/amount" in answer.json()["receipts"][1]["error"]["message"]
    assert told(await submit(alice, write("b", {"amount": 1}, "counter.add"))) == [("accepted", 3, None)]


async def test_a_session_that_is_not_there_refuses_the_whole(
    alice: Client, bob: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    before = everything(raw)
    missing = await submit(alice, write("a"), session_id="s2")
    hidden = await submit(bob, write("a"))
    assert (missing.status_code, missing.content) == (hidden.status_code, hidden.content)
    assert missing.status_code == 404
    assert everything(raw) == before


async def test_a_reason_that_may_change_is_503_for_the_whole_and_answers_what_is_recorded(
    door: House, alice: Client
) -> None:
    await alice.open("s1")
    await alice.submit("s1", "a")
    for peer in ("alfa", "bravo"):
        await remove_peer(door.admin, TENANT, peer)
    assert_refused(await submit(alice, write("a"), write("b")), 503, "peer", kind="unavailable")
    assert told(await submit(alice, write("a"))) == [("duplicate", 1, None)]


async def test_scripts_that_the_store_forgot_are_loaded_and_each_runs_once(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    raw.script_flush()
    assert told(await submit(alice, *[write(f"c{i}") for i in range(5)])) == [
        ("accepted", i + 1, None) for i in range(5)
    ]
    assert raw.script_exists(lua.load("admit").sha) == [True]


@pytest.mark.requirement("DASP-CORE-005b")
async def test_replies_lost_in_the_middle_are_found_again(redis_url: str) -> None:
    """The store ran more of the batch than the door heard of: every member still gets its one receipt."""
    async with FaultProxy(redis_url) as proxy, house(redis_url) as near:
        alice = await near.client("alice")
        async with house(proxy.url, tenants=()) as far:
            client = far.client_with(alice.token)
            for round_ in range(6):
                session_id = f"s{round_}"
                await client.open(session_id)
                await submit(client, write(f"{round_}-first"), session_id=session_id)
                proxy.cut_after(round_)
                commands = [write(f"{round_}-{i}") for i in range(6)]
                receipts = told(await submit(client, *commands, session_id=session_id))
                assert [sequence for _, sequence, _ in receipts] == list(range(2, 8)), (round_, receipts)
                assert (await alice.page(session_id)).json()["head"] == 7
