"""Cursors held by the server: forward only, never beyond the head, one per principal and client."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import redis

from shared.store.scripts import CLIENTS_PER_SESSION
from tests.admission.house import Client, House
from tests.admission.looking import assert_refused, everything, streaming


@pytest.fixture
async def ready(alice: Client) -> Client:
    """A caller with a session that holds five updates."""
    assert (await alice.open("s1")).status_code == 201
    for i in range(1, 6):
        assert (await alice.submit("s1", f"c{i}")).status_code == 201
    return alice


async def put(client: Client, name: str, cursor: int, session_id: str = "s1") -> httpx.Response:
    return await client.http.put(f"/v1/sessions/{session_id}/cursors/{name}", json={"cursor": cursor})


async def held(client: Client, name: str, session_id: str = "s1") -> int:
    response = await client.http.get(f"/v1/sessions/{session_id}/cursors/{name}")
    assert response.status_code == 200
    assert set(response.json()) == {"cursor"}
    return int(response.json()["cursor"])


async def test_a_cursor_moves_forward_and_never_back(ready: Client) -> None:
    assert await held(ready, "x") == 0
    for asked, now_held in ((0, 0), (2, 2), (2, 2), (1, 2), (0, 2), (5, 5), (3, 5)):
        response = await put(ready, "x", asked)
        assert (response.status_code, response.json()) == (200, {"cursor": now_held})
        assert await held(ready, "x") == now_held


async def test_a_cursor_beyond_the_head_is_refused_and_moves_nothing(ready: Client, raw: redis.Redis) -> None:
    await put(ready, "x", 3)
    before = everything(raw)
    for cursor in (6, 2**53 - 1):
        assert_refused(await put(ready, "x", cursor), 400, "/cursor: must not be beyond the head")
        assert_refused(await put(ready, "new", cursor), 400, "/cursor:")
    assert everything(raw) == before
    assert await held(ready, "x") == 3


@pytest.mark.requirement("DASP-CORE-012h")
async def test_every_principal_and_client_has_its_own(door: House, ready: Client) -> None:
    """Clients of one principal, one client name of two principals, one name in two sessions."""
    operator = await door.client("olga", "operator")
    await ready.open("s2")
    await ready.submit("s2", "d1")
    await put(ready, "x", 2)
    await put(ready, "y", 4)
    await put(operator, "x", 5)
    await put(ready, "x", 1, "s2")
    assert [await held(ready, "x"), await held(ready, "y"), await held(operator, "x")] == [2, 4, 5]
    assert await held(operator, "y") == 0
    assert await held(ready, "x", "s2") == 1


@pytest.mark.requirement("DASP-CORE-012h")
async def test_another_token_of_the_same_principal_has_the_same_cursor(door: House, ready: Client) -> None:
    await put(ready, "x", 2)
    assert await held(await door.client("alice"), "x") == 2


async def test_a_principal_and_a_client_name_cannot_be_shifted_into_one_another(door: House) -> None:
    """The colon is part of both patterns: where one ends is not a matter of taste."""
    first = await door.client("a", "operator")
    second = await door.client("a:b", "operator")
    owner = await door.client("owner")
    await owner.open("s1")
    await owner.submit("s1", "c1")
    await put(first, "b:c", 1)
    assert await held(second, "c") == 0


@pytest.mark.requirement("DASP-CORE-011c")
async def test_updates_resume_at_the_cursor_held_for_a_client(ready: Client) -> None:
    async def resumed(client: str) -> tuple[int, list[int]]:
        page = (await ready.page("s1", client=client)).json()
        return page["after"], [event["data"]["sequence"] for event in page["events"]]

    assert await resumed("x") == (0, [1, 2, 3, 4, 5])
    await put(ready, "x", 3)
    assert await resumed("x") == (3, [4, 5])
    # Reading moves nothing: what was delivered is not applied (DASP-CORE-010c).
    assert await resumed("x") == (3, [4, 5])
    assert await held(ready, "x") == 3
    await put(ready, "x", 5)
    assert await resumed("x") == (5, [])


async def test_a_stream_resumes_there_too_and_moves_nothing(ready: Client) -> None:
    await put(ready, "x", 3)
    for _ in range(2):
        async with streaming(ready, "s1", client="x") as feed:
            assert [frame.sequence for frame in await feed.updates(2)] == [4, 5]
    assert await held(ready, "x") == 3


async def test_reading_a_cursor_stores_nothing(ready: Client, raw: redis.Redis) -> None:
    before = everything(raw)
    assert await held(ready, "x") == 0
    await ready.page("s1", client="x")
    assert everything(raw) == before


async def test_racing_moves_end_at_the_furthest(ready: Client) -> None:
    answers = await asyncio.gather(*(put(ready, "x", cursor) for cursor in (1, 5, 3, 2, 4) * 8))
    assert {answer.status_code for answer in answers} == {200}
    assert await held(ready, "x") == 5


async def test_cursors_of_hidden_sessions_look_like_those_of_missing_ones(
    door: House, ready: Client, bob: Client, raw: redis.Redis
) -> None:
    await put(ready, "x", 3)
    before = everything(raw)
    for client in (bob, ready):
        there = "s1" if client is bob else "missing"
        got = await client.http.get(f"/v1/sessions/{there}/cursors/x")
        tried = await put(client, "x", 1, there)
        beyond = await put(client, "x", 99, there)
        assert got.content == tried.content == beyond.content
        for response in (got, tried, beyond):
            assert_refused(response, 404, kind="denied")
    assert everything(raw) == before


async def test_a_session_holds_a_bounded_number_of_them(ready: Client) -> None:
    names = [f"k{i}" for i in range(CLIENTS_PER_SESSION)]
    for first in range(0, CLIENTS_PER_SESSION, 100):
        answers = await asyncio.gather(*(put(ready, name, 1) for name in names[first : first + 100]))
        assert {answer.status_code for answer in answers} == {200}
    refused = await put(ready, "one-more", 1)
    assert_refused(refused, 503, str(CLIENTS_PER_SESSION), kind="unavailable")
    assert refused.headers["retry-after"]
    assert (await put(ready, "k0", 5)).json() == {"cursor": 5}
