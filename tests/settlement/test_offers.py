"""What a sidecar takes from its outbox, and what it leaves when it goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.store.connection import ReplyLost
from shared.store.outbox import Outbox, Request
from tests.settlement.host import PEER, TENANT, Host, contract
from tests.settlement.scripted import Document, ScriptedHandler, answer, done
from tests.support.polling import wait_until


@pytest.mark.requirement("DASP-CORE-004c")
async def test_what_no_record_stands_behind_is_never_dispatched(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract()) as host, ScriptedHandler() as handler:
        await host.open()
        stream = host.handle.keys.outbox(PEER)
        forged = {"k": "request", "o": "op" + "a" * 64, "b": 0, "a": 1, "s": "s1", "m": "f" * 64}
        raw.xadd(stream, forged)
        raw.xadd(stream, {"k": "something else", "o": "x"})
        raw.hset(host.handle.keys.op("op" + "b" * 64), "tombstone", "s1")
        raw.xadd(stream, {**forged, "o": "op" + "b" * 64})
        async with host.sidecar(handler.url):
            # One queue: what comes after it was looked at after it.
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == "completed"
        assert [call["operationId"] for call in handler.calls] == [host.operation_id("c1")]


@pytest.mark.requirement("RT-OUT-07", "RT-DUR-10")
async def test_offers_handed_out_with_a_lost_reply_are_asked_for_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is given them before their claim time has passed, which is never in this test."""
    read, lost = Outbox.new, list[Request]()

    async def losing(outbox: Outbox, count: int) -> list[Request]:
        requests = await read(outbox, count)
        if requests and not lost:
            lost.extend(requests)
            raise ReplyLost("the store's connection ended")
        return requests

    monkeypatch.setattr(Outbox, "new", losing)
    terms = contract(
        execution="concurrent", effects="unsafe", lease={"claimTimeoutMs": 60_000}, timeout_ms=60_000
    )

    async def script(_: Document) -> bytes:
        return answer(result={"ok": True})

    async with Host.create(redis_url, terms) as host, ScriptedHandler(script) as handler:
        await host.open()
        for number in range(3):
            await host.submit(f"c{number}")
        async with host.sidecar(handler.url, concurrency=2):
            for number in range(3):
                assert (await host.outcome(f"c{number}"))["status"] == "completed"
        assert len(lost) == 2
        assert len(handler.calls) == 3


async def test_an_offer_read_twice_is_worked_once(redis_url: str, raw: Any) -> None:
    async with Host.create(redis_url, contract(effects="unsafe")) as host, ScriptedHandler() as handler:
        await host.open()
        await host.submit("c1")
        stream = host.handle.keys.outbox(PEER)
        ((_, entry),) = raw.xrange(stream)
        for _ in range(5):
            raw.xadd(stream, entry)
        async with host.sidecar(handler.url), host.sidecar(handler.url):
            assert (await host.outcome("c1"))["status"] == "completed"
            await host.submit("c2")
            assert (await host.outcome("c2"))["status"] == "completed"
        assert len(handler.calls) == 2


async def test_draining_lets_work_end(redis_url: str, raw: Any) -> None:
    finish = asyncio.Event()

    async def script(document: Document) -> bytes:
        await finish.wait()
        return done(document)

    async with Host.create(redis_url, contract(effects="unsafe")) as host, ScriptedHandler(script) as handler:
        await host.open()
        async with host.settling():
            async with host.sidecar(handler.url, drain_s=10.0):
                await host.submit("c1")
                await host.submit("c2")
                await wait_until(lambda: handler.calls)
                asyncio.get_running_loop().call_later(0.1, finish.set)
            # The sidecar is gone; what it had begun was finished, and nothing more was taken.
            assert (await host.outcome("c1"))["status"] == "completed"
        assert await host.outcomes("c2") == []
        assert raw.xinfo_consumers(host.handle.keys.outbox(PEER), "work") == []


@pytest.mark.parametrize(("effects", "status"), [("none", "completed"), ("unsafe", "uncertain")])
async def test_what_draining_cannot_wait_for_is_given_back_at_once(
    redis_url: str, effects: str, status: str
) -> None:
    async def never(_: Document) -> bytes | None:
        await asyncio.Event().wait()
        return None

    terms = contract(effects=effects, lease={"leaseMs": 60_000, "renewMs": 10_000}, timeout_ms=60_000)
    async with Host.create(redis_url, terms) as host, ScriptedHandler(never) as handler:
        await host.open()
        async with host.sidecar(handler.url, drain_s=0.05):
            await host.submit("c1")
            await wait_until(lambda: handler.calls)
        async with ScriptedHandler() as next_handler, host.sidecar(next_handler.url):
            assert (await host.outcome("c1"))["status"] == status
            assert len(next_handler.calls) == (0 if status == "uncertain" else 1)


async def test_readers_that_died_long_ago_are_forgotten_unless_they_hold_something(
    redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        await host.submit("c1")
        stream = host.handle.keys.outbox(PEER)
        raw.xreadgroup("work", "holding", {stream: ">"}, count=1)
        raw.xgroup_createconsumer(stream, "work", "empty")
        outbox = Outbox(host.runtime.connection, host.runtime.address, TENANT, PEER, "h1", 10)
        await outbox.tidy()
        assert {row["name"] for row in raw.xinfo_consumers(stream, "work")} == {b"holding", b"empty"}
        monkeypatch.setattr("shared.store.outbox._FORGOTTEN_MS", -1)
        await outbox.tidy()
        assert {row["name"] for row in raw.xinfo_consumers(stream, "work")} == {b"holding"}
