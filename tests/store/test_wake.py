"""Hints: one connection for everybody, nobody sleeps through a move, and losing them only costs time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import redis

from shared.domain.errors import InvalidInput
from shared.store.connection import Limits, StoreUnavailable
from shared.store.embedded import EmbeddedStore
from shared.store.wake import EVERYTHING, Wake, Watcher, operation_topic, peer_topic, session_topic
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy
from tests.support.raw import raw_client

LONG = 60.0
CHANNEL = b"lg:{acme}:wake"


@pytest.fixture
async def wake(redis_url: str) -> AsyncIterator[Wake]:
    # No check of the socket falls into a test: what happens, happens at once.
    async with Wake(redis_url, check_s=LONG) as made:
        yield made


async def settled(wake: Wake, watcher: Watcher, tenant: str = "acme") -> None:
    """Let the watcher take the wake-up that its subscription begins with."""
    await wait_until(lambda: wake.subscribed(tenant))
    assert await watcher.wait(LONG)


def names(raw: redis.Redis) -> list[bytes]:
    return sorted(channel for channel in raw.pubsub_channels() if isinstance(channel, bytes))


async def test_topics_are_spelled_as_the_scripts_write_them() -> None:
    assert (session_topic("s1"), operation_topic("op1"), peer_topic("alfa")) == ("s:s1", "o:op1", "p:alfa")


async def test_a_hint_wakes_who_watches_its_topic_and_nobody_else(wake: Wake, raw: redis.Redis) -> None:
    async with (
        wake.watch("acme", ["s:1", "o:1"]) as both,
        wake.watch("acme", ["s:2"]) as other,
        wake.watch("acme", [EVERYTHING]) as everything,
        wake.watch("zeta", ["s:1"]) as elsewhere,
    ):
        for watcher in (both, other, everything):
            await settled(wake, watcher)
        await settled(wake, elsewhere, "zeta")
        raw.publish(CHANNEL, "p:alfa o:1 s:10")
        assert await both.wait(LONG)
        assert await everything.wait(LONG)
        raw.publish(CHANNEL, "s:1")
        assert await both.wait(LONG)
        assert await everything.wait(LONG)
        assert not await other.wait(0)
        assert not await elsewhere.wait(0)
        raw.publish(b"lg:{zeta}:wake", "s:1")
        assert await elsewhere.wait(LONG)
        assert not await both.wait(0)


async def test_many_hints_are_one_flag_and_a_hint_before_the_wait_counts(
    wake: Wake, raw: redis.Redis
) -> None:
    async with wake.watch("acme", ["s:1"]) as watcher, wake.watch("acme", ["last"]) as last:
        await settled(wake, watcher)
        await settled(wake, last)
        for _ in range(1_000):
            raw.publish(CHANNEL, "s:1")
        raw.publish(CHANNEL, "last")
        assert await last.wait(LONG)
        assert await watcher.wait(LONG)
        assert not await watcher.wait(0)


async def test_messages_of_no_meaning_wake_only_who_watches_everything(wake: Wake, raw: redis.Redis) -> None:
    async with wake.watch("acme", ["s:1"]) as watcher, wake.watch("acme", [EVERYTHING]) as everything:
        await settled(wake, watcher)
        await settled(wake, everything)
        for message in (b"", b"  ", b"\xff\xfe\x00", b"s:1x s: 1"):
            raw.publish(CHANNEL, message)
            assert await everything.wait(LONG)
        assert not await watcher.wait(0)
        raw.publish(CHANNEL, b" s:1 ")
        assert await watcher.wait(LONG)


async def test_a_watch_that_begins_before_its_subscription_is_woken_when_it_is_made(
    redis_url: str, raw: redis.Redis
) -> None:
    async with FaultProxy(redis_url) as proxy, Wake(proxy.url) as wake:
        proxy.hold()
        async with wake.watch("acme", ["s:1"]) as watcher:
            raw.publish(CHANNEL, "s:1")
            assert not await watcher.wait(0)
            proxy.pass_on()
            assert await watcher.wait(LONG), "what was published before must be read again"
            async with wake.watch("acme", ["s:1"]) as late:
                assert not await late.wait(0), "nothing was missed"


async def test_a_thousand_watchers_share_one_connection(redis_url: str, raw: redis.Redis) -> None:
    before = len(raw.client_list())
    woken: set[int] = set()

    async def watch(wake: Wake, number: int) -> None:
        async with wake.watch(f"t{number % 10}", [f"s:{number}"]) as watcher:
            assert await watcher.wait(LONG)
            ready.release()
            assert await watcher.wait(LONG)
            woken.add(number)

    ready = asyncio.Semaphore(0)
    async with Wake(redis_url) as wake:
        tasks = [asyncio.create_task(watch(wake, number)) for number in range(1_000)]
        for _ in range(1_000):
            await ready.acquire()
        assert len(raw.client_list()) == before + 1
        assert len(names(raw)) == 10
        raw.publish("lg:{t7}:wake", "s:7")
        await wait_until(lambda: woken == {7})
        with raw.pipeline(transaction=False) as pipe:
            for number in range(1_000):
                pipe.publish(f"lg:{{t{number % 10}}}:wake", f"s:{number}")
            pipe.execute()
        await asyncio.gather(*tasks)
    await wait_until(lambda: len(raw.client_list()) == before)


async def test_tenants_are_subscribed_while_watched_and_left_some_time_after(
    redis_url: str, raw: redis.Redis
) -> None:
    async with Wake(redis_url, check_s=0.02, linger_s=0.05) as wake:
        async with wake.watch("acme", ["s:1"]) as acme:
            await settled(wake, acme)
            async with wake.watch("zeta", ["s:1"]) as zeta:
                await settled(wake, zeta, "zeta")
                assert names(raw) == [CHANNEL, b"lg:{zeta}:wake"]
            await wait_until(lambda: names(raw) == [CHANNEL])
            assert not wake.subscribed("zeta")
            async with wake.watch("zeta", ["s:1"]) as zeta:
                await settled(wake, zeta, "zeta")
                raw.publish("lg:{zeta}:wake", "s:1")
                assert await zeta.wait(LONG)
        await wait_until(lambda: names(raw) == [])


async def test_short_watches_do_not_subscribe_anew(wake: Wake, raw: redis.Redis) -> None:
    raw.config_resetstat()
    async with wake.watch("acme", ["s:1"]) as watcher:
        await settled(wake, watcher)
    for number in range(100):
        async with wake.watch("acme", [f"s:{number}"]) as watcher:
            raw.publish(CHANNEL, f"s:{number}")
            assert await watcher.wait(LONG)
    assert raw.info("commandstats")["cmdstat_subscribe"]["calls"] == 1


async def test_a_tenant_is_not_left_before_its_time(redis_url: str, raw: redis.Redis) -> None:
    raw.config_resetstat()
    async with Wake(redis_url, check_s=0.01, linger_s=LONG) as wake:
        async with wake.watch("acme", ["s:1"]) as watcher:
            await settled(wake, watcher)
        await wait_until(lambda: raw.info("commandstats").get("cmdstat_ping", {}).get("calls", 0) > 5)
        assert names(raw) == [CHANNEL]


async def test_a_hint_for_a_tenant_just_left_disturbs_nobody(redis_url: str, raw: redis.Redis) -> None:
    async with FaultProxy(redis_url) as proxy, Wake(proxy.url, check_s=LONG, linger_s=0) as wake:
        async with wake.watch("acme", ["s:1"]) as acme:
            await settled(wake, acme)
        proxy.hold_replies()
        raw.publish(CHANNEL, "s:1")
        async with wake.watch("zeta", ["s:1"]) as zeta:
            await wait_until(lambda: names(raw) == [])
            proxy.pass_on()
            await settled(wake, zeta, "zeta")
        assert proxy.connections == 1


async def test_everybody_is_woken_when_the_store_comes_back(
    own_store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Wake(own_store.url, check_s=LONG) as wake,
        wake.watch("acme", ["s:1"]) as acme,
        wake.watch("zeta", ["s:2"]) as zeta,
    ):
        await settled(wake, acme)
        await settled(wake, zeta, "zeta")
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(own_store.kill)
            await wait_until(lambda: "hints are interrupted" in caplog.text)
        assert not wake.subscribed("acme")
        assert not await acme.wait(0)
        await asyncio.to_thread(own_store.start)
        assert await acme.wait(LONG)
        assert await zeta.wait(LONG)
        with raw_client(own_store.url) as raw:
            raw.publish(CHANNEL, "s:1")
        assert await acme.wait(LONG)
        assert caplog.text.count("hints are interrupted") == 1


async def test_a_silent_connection_is_noticed_and_replaced(redis_url: str, raw: redis.Redis) -> None:
    limits = Limits(timeout_s=0.1)
    async with (
        FaultProxy(redis_url) as proxy,
        Wake(proxy.url, limits, check_s=0.05) as wake,
        wake.watch("acme", ["s:1"]) as watcher,
    ):
        await settled(wake, watcher)
        proxy.drop_replies()
        raw.publish(CHANNEL, "s:1")
        await wait_until(lambda: not wake.subscribed("acme"))
        assert not await watcher.wait(0)
        proxy.pass_on()
        assert await watcher.wait(LONG)
        assert proxy.connections > 1


async def test_a_channel_that_is_forbidden_takes_no_hints_from_others(
    own_store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_client(own_store.url) as raw:
        raw.execute_command("ACL", "SETUSER", "ann", "on", ">pw", "~*", "+@all", "&lg:{acme}:wake")
        url = own_store.url.replace("unix://", "unix://ann:pw@")
        async with (
            Wake(url, check_s=0.02) as wake,
            wake.watch("zeta", ["s:1"]) as zeta,
            wake.watch("acme", ["s:1"]) as acme,
        ):
            await settled(wake, acme)
            await wait_until(lambda: "no hints on lg:{zeta}:wake" in caplog.text)
            raw.publish(CHANNEL, "s:1")
            assert await acme.wait(LONG)
            assert not await zeta.wait(0)
            raw.execute_command("ACL", "SETUSER", "ann", "&lg:{zeta}:wake")
            assert await zeta.wait(LONG), "asked for again until it is allowed"


async def test_a_defect_while_serving_is_logged_and_survived(
    wake: Wake, raw: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wake.watch("acme", ["s:1"]) as watcher:
        await settled(wake, watcher)

        async def broken(*_: object) -> None:
            monkeypatch.undo()
            raise RuntimeError("a defect")

        monkeypatch.setattr(wake, "_follow", broken)
        async with wake.watch("zeta", ["s:1"]) as zeta:
            await settled(wake, zeta, "zeta")
            assert "a defect" in caplog.text
            assert await watcher.wait(LONG)


async def test_closing_lets_everybody_go_on_and_ends_the_connection(redis_url: str, raw: redis.Redis) -> None:
    before = len(raw.client_list())
    wake = Wake(redis_url)
    async with wake.watch("acme", ["s:1"]) as watcher:
        await settled(wake, watcher)
        waiting = asyncio.create_task(watcher.wait(LONG))
        await asyncio.sleep(0)
        await wake.close()
        assert await waiting
        with pytest.raises(StoreUnavailable):
            async with wake.watch("acme", ["s:2"]):
                pass
    await wake.close()
    await wait_until(lambda: len(raw.client_list()) == before)


async def test_closing_before_the_store_was_ever_reached() -> None:
    wake = Wake("unix:///nowhere/at/all")
    async with wake.watch("acme", ["s:1"]) as watcher:
        assert not await watcher.wait(0.01)
        await wake.close()
        assert await watcher.wait(LONG)


async def test_a_malformed_tenant_is_refused(wake: Wake) -> None:
    with pytest.raises(InvalidInput):
        wake.watch("a}b", ["s:1"])


async def test_who_left_is_forgotten(wake: Wake, raw: redis.Redis) -> None:
    async with wake.watch("acme", ["s:1"]) as stays:
        for _ in range(100):
            async with wake.watch("acme", ["s:1", "s:2"]):
                pass
        (channel,) = wake._channels.values()
        assert channel.watchers == {stays}
        assert channel.topics == {b"s:1": {stays}}
