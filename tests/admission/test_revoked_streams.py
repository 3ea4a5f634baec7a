"""Streams whose permission is taken away while their client is slow, idle or between two parts of a page.

What had been given to the connection before is on its way; of what waits behind it not a byte follows
(DASPX-09).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import pytest
import uvloop

from admission_svc import live
from admission_svc.http import Message, Send
from shared.store.embedded import EmbeddedStore
from shared.store.wake import Wake
from tests.admission.house import Client, House, house
from tests.admission.looking import streaming
from tests.admission.slow import slow_stream
from tests.admission.taking_away import WAYS, apply, rule
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

UPDATES: Final = "/v1/sessions/s1/updates"
COMMANDS: Final = 8
FACTS: Final = 3 * COMMANDS
LARGE: Final = "x" * 60_000
NEVER_S: Final = 10_000.0
Run = Callable[[Coroutine[Any, Any, None]], None]


class Released:
    """What streams gave to their connections so far, and what happens when they do."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.then: Callable[[bytes], Awaitable[None]] | None = None

    async def note(self, part: bytes) -> None:
        self.parts.append(part)
        if self.then is not None:
            await self.then(part)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Released:
    noted = Released()
    run = live.UpdateStream.run

    async def recorded(self: live.UpdateStream, send: Send) -> None:
        async def sending(message: Message) -> None:
            await send(message)
            if message.get("body"):
                await noted.note(message["body"])

        await run(self, sending)

    monkeypatch.setattr(live.UpdateStream, "run", recorded)
    return noted


async def fill(door: House, client: Client) -> None:
    """A session of ``client`` with far more facts than a connection takes at once."""
    assert (await client.open("s1")).status_code == 201
    for i in range(COMMANDS):
        assert (await client.submit("s1", f"c{i}")).status_code == 201
        large = {"note.written": {"v": LARGE}}
        await door.work(f"c{i}", {"v": LARGE}, session_id="s1", updates=large)


def sequences(body: bytes) -> list[int]:
    """The sequences of a stream's updates; every frame must be whole."""
    assert body.endswith(b"\n\n")
    frames = [frame.split(b"\n") for frame in body.split(b"\n\n") if frame not in (b"", b":")]
    assert all(name.startswith(b"id: ") and data.startswith(b"data: ") for name, data in frames)
    return [json.loads(data.removeprefix(b"data: "))["data"]["sequence"] for _, data in frames]


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_what_waits_for_a_slow_client_is_not_released_after_a_revocation(
    redis_url: str, released: Released, run: Run, way: str
) -> None:
    """Neither the rest of a page that was read under the permission, nor what is committed later."""

    async def scene() -> None:
        async with house(redis_url) as door:
            alice, trusted = await door.client("alice"), await door.client("trusted")
            await apply(door, rule("alice"))
            await fill(door, alice)
            async with slow_stream(door, alice.token, UPDATES) as stream:
                await stream.stuck()
                before = b"".join(released.parts)
                await WAYS[way](door, alice)
                assert (await trusted.submit("s1", "later")).status_code == 201
                body = await stream.rest()
            assert body == before, "the connection was given more after the revocation"
            seen = sequences(body)
            assert seen == list(range(1, len(seen) + 1))
            assert 0 < len(seen) < FACTS

    run(scene())


async def test_a_slow_client_that_keeps_its_permission_is_told_everything(
    door: House, alice: Client, released: Released
) -> None:
    await fill(door, alice)
    async with slow_stream(door, alice.token, UPDATES) as stream:
        await stream.stuck()
        assert len(sequences(b"".join(released.parts))) < FACTS
        assert (await alice.submit("s1", "later")).status_code == 201
        await stream.until(b'"command_id":"later"')
        door.door.drain()
        assert sequences(await stream.rest()) == list(range(1, FACTS + 2))


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("way", WAYS)
async def test_a_page_is_not_told_on_after_a_revocation_between_two_of_its_parts(
    door: House, alice: Client, released: Released, way: str
) -> None:
    """However fast the client is: the rest of the page was read already, and is asked for again."""
    await apply(door, rule("alice"))
    await fill(door, alice)

    async def take_away(part: bytes) -> None:
        if b'"sequence":2,' in part:
            await WAYS[way](door, alice)

    released.then = take_away
    async with streaming(alice, "s1") as feed:
        seen = [frame.sequence for frame in await feed.rest() if not frame.comment]
    assert seen == [1, 2, 3], "what fits into one part with the second"
    assert seen == sequences(b"".join(released.parts))


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("way", WAYS)
async def test_an_idle_stream_ends_with_the_revocation_itself(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """By the hint that the change sends to everybody: this stream never looks by itself."""
    monkeypatch.setattr(live, "RECHECK_S", NEVER_S)
    monkeypatch.setattr(live, "HEARTBEAT_S", NEVER_S)
    await apply(door, rule("alice"))
    await alice.open("s1")
    async with streaming(alice, "s1") as feed:
        await wait_until(lambda: door.runtime.wake.subscribed("acme"))
        await WAYS[way](door, alice)
        assert all(frame.comment for frame in await feed.rest())


@pytest.mark.requirement("DASPX-09")
@pytest.mark.parametrize("way", WAYS)
async def test_an_idle_stream_ends_without_any_hint_too(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Hints get lost: whoever waits looks again after a while."""
    monkeypatch.setattr(Wake, "_hint", lambda *_: None)
    monkeypatch.setattr(live, "RECHECK_S", 0.05)
    await apply(door, rule("alice"))
    await alice.open("s1")
    async with streaming(alice, "s1") as feed:
        await wait_until(lambda: door.runtime.wake.subscribed("acme"))
        await WAYS[way](door, alice)
        assert all(frame.comment for frame in await feed.rest())


@pytest.mark.requirement("DASPX-09")
async def test_a_stream_outlives_no_token(
    door: House, alice: Client, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that expires while its client is slow releases nothing more."""
    await fill(door, alice)
    passing = await door.token("alice", expires_in_s=3_600)
    clock = door.runtime.clock
    now = clock.lower_ms
    async with slow_stream(door, passing, UPDATES) as stream:
        await stream.stuck()
        before = b"".join(released.parts)
        monkeypatch.setattr(clock, "lower_ms", lambda at=None: now(at) + 3_600_000)
        assert await stream.rest() == before
    assert len(sequences(before)) < FACTS


async def test_an_interrupted_stream_names_no_fact_that_it_did_not_tell(
    own_store: EmbeddedStore, released: Released
) -> None:
    """What was read and not released may not be told any more when the store is back."""
    async with FaultProxy(own_store.url) as proxy, house(proxy.url) as door:
        alice = await door.client("alice")
        await fill(door, alice)
        async with slow_stream(door, alice.token, UPDATES) as stream:
            await stream.stuck()
            told = sequences(b"".join(released.parts))[-1]
            proxy.refuse()
            body = await stream.rest()
    told_last, resync = body.rpartition(b"event: resync")[::2]
    assert sequences(told_last)[-1] == told < FACTS
    data = json.loads(resync.strip().removeprefix(b"data: "))
    assert data == {"session_id": "s1", "reason": "interrupted", "head": told}
