"""Shared connections on a real store: order, loss, limits and recovery, with nothing sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import pytest
import redis

from shared.store.connection import Connection, Limits, ReplyError, ReplyLost, StoreUnavailable
from shared.store.embedded import EmbeddedStore
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

QUICK = Limits(timeout_s=0.15)


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    async with Connection(redis_url) as made:
        yield made


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(redis_url) as made:
        yield made


async def end_of(call: Awaitable[Any]) -> str:
    """How a call ended, as one word."""
    try:
        await call
    except ReplyLost:
        return "lost"
    except StoreUnavailable:
        return "unavailable"
    except ReplyError as error:
        return error.code
    return "ok"


# Order


async def test_concurrent_calls_get_their_own_replies(connection: Connection) -> None:
    words = [str(n) * (n % 50 + 1) for n in range(300)]
    replies = await asyncio.gather(*(connection.call("ECHO", word) for word in words))
    assert replies == [word.encode() for word in words]


async def test_cancelled_calls_take_nobody_elses_reply(proxy: FaultProxy, raw: redis.Redis) -> None:
    async with Connection(proxy.url) as connection:
        await connection.call("PING")
        proxy.hold_replies()
        tasks = [asyncio.create_task(connection.call("INCRBY", "k", 10)) for _ in range(40)]
        await wait_until(lambda: raw.get("k") == b"400")
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks[::2], return_exceptions=True)
        proxy.pass_on()
        assert await asyncio.gather(*tasks[1::2]) == [10 * n for n in range(2, 42, 2)]
        assert await connection.call("GET", "k") == b"400"
        assert proxy.connections == 1


async def test_an_error_reply_concerns_its_own_call_only(connection: Connection) -> None:
    calls = (("SET", "k", "v"), ("LPUSH", "k", "x"), ("GET", "k"), ("NOSUCH",), ("EXISTS", "k"))
    ends = await asyncio.gather(*(connection.call(*call) for call in calls), return_exceptions=True)
    assert ends[0] == b"OK"
    assert isinstance(ends[1], ReplyError)
    assert ends[1].code == "WRONGTYPE"
    assert ends[2] == b"v"
    assert isinstance(ends[3], ReplyError)
    assert ends[3].code == "ERR"
    assert ends[4] == 1


async def test_a_pipeline_gives_all_replies_with_refusals_as_values(connection: Connection) -> None:
    ok, refused, read = await connection.pipeline(("SET", "k", "v"), ("LPUSH", "k", "x"), ("GET", "k"))
    assert (ok, read) == (b"OK", b"v")
    assert isinstance(refused, ReplyError)
    assert await connection.pipeline() == []


async def test_nothing_comes_between_the_commands_of_a_pipeline(connection: Connection) -> None:
    pipelines = [connection.pipeline(*[("INCR", "k")] * 5) for _ in range(20)]
    for replies in await asyncio.gather(*pipelines):
        assert replies == list(range(replies[0], replies[0] + 5))


# Loss


async def test_a_lost_reply_is_unknown_and_nothing_is_sent_again(proxy: FaultProxy, raw: redis.Redis) -> None:
    async with Connection(proxy.url, QUICK) as connection:
        await connection.call("PING")
        proxy.drop_replies()
        calls = [connection.call("INCR", "a"), connection.pipeline(("INCR", "b"), ("INCR", "c"))]
        assert await asyncio.gather(*map(end_of, calls)) == ["lost", "lost"]
        proxy.pass_on()
        assert await connection.call("GET", "a") == b"1"
        assert raw.mget("a", "b", "c") == [b"1", b"1", b"1"]


@pytest.mark.parametrize("passed", [0, 1, 7])
async def test_a_cut_loses_only_the_replies_that_had_not_come(
    proxy: FaultProxy, raw: redis.Redis, passed: int
) -> None:
    async with Connection(proxy.url) as connection:
        await connection.call("PING")
        proxy.cut_after(passed)
        ends = await asyncio.gather(*(end_of(connection.call("INCR", "k")) for _ in range(10)))
        assert ends == ["ok"] * passed + ["lost"] * (10 - passed)
        assert await connection.call("INCR", "k") == 11


@pytest.mark.requirement("RT-STORE-15")
async def test_a_store_that_is_away_is_unavailable_and_not_asked_again_at_once(proxy: FaultProxy) -> None:
    async with Connection(proxy.url, connect_s=0.2) as connection:
        proxy.refuse()
        assert await end_of(connection.call("INCR", "k")) == "unavailable"
        tried = proxy.connections
        assert 1 < tried < 20, "a short outage is waited out, with pauses"
        for _ in range(100):
            assert await end_of(connection.call("INCR", "k")) == "unavailable"
        assert proxy.connections <= tried + 3
        proxy.pass_on()

        async with asyncio.timeout(10):
            while await end_of(connection.call("INCR", "k")) != "ok":
                await asyncio.sleep(0.01)
        assert await connection.call("GET", "k") == b"1"


async def test_calls_during_a_short_outage_wait_for_the_store(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url, connect_s=30) as connection:
        await connection.call("SET", "k", 5)
        own_store.kill()
        await wait_until(lambda: not connection.connected)
        calls = [asyncio.create_task(connection.call("INCR", "k")) for _ in range(10)]
        await asyncio.to_thread(own_store.start)
        assert await asyncio.gather(*calls) == list(range(6, 16))


@pytest.mark.requirement("RT-STORE-15")
async def test_a_store_killed_under_load_leaves_every_call_with_a_truthful_end(
    own_store: EmbeddedStore,
) -> None:
    ends: Counter[str] = Counter()

    async def worker(connection: Connection, number: int) -> None:
        while not stop.is_set():
            ends[await end_of(connection.call("HINCRBY", "k", number, 1))] += 1
            await asyncio.sleep(0)

    stop = asyncio.Event()
    async with Connection(own_store.url, connect_s=0.05) as connection:
        workers = [asyncio.create_task(worker(connection, n)) for n in range(20)]
        await wait_until(lambda: ends["ok"] > 500)
        await asyncio.to_thread(own_store.kill)
        await wait_until(lambda: ends["unavailable"] > 50)
        await asyncio.to_thread(own_store.start)
        after = ends["ok"]
        await wait_until(lambda: ends["ok"] > after + 500)
        stop.set()
        await asyncio.gather(*workers)
        ran = sum(map(int, await connection.call("HVALS", "k")))
    assert set(ends) <= {"ok", "lost", "unavailable"}
    assert ends["ok"] <= ran <= ends["ok"] + ends["lost"]


async def test_a_refused_login_is_told_at_once(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url) as operator:
        await operator.call("CONFIG", "SET", "requirepass", "right")
        await operator.call("ACL", "SETUSER", "ann", "on", ">pw", "~*", "+@all", "-ping")
    at = own_store.url.removeprefix("unix://")
    for login, code in (("", "NOAUTH"), (":wrong@", "WRONGPASS")):
        async with Connection(f"unix://{login}{at}", connect_s=60) as connection:
            with pytest.raises(StoreUnavailable, match=code) as caught:
                await connection.call("SET", "k", "v")
            assert "wrong" not in str(caught.value)
    async with Connection(f"unix://:right@{at}?db=3") as connection:
        assert await connection.call("SET", "k", "v") == b"OK"
    async with Connection(f"unix://ann:pw@{at}?db=3") as connection:
        assert await connection.call("GET", "k") == b"v"
        assert await end_of(connection.call("PING")) == "NOPERM"
    async with Connection(f"unix://:right@{at}") as connection:
        assert await connection.call("EXISTS", "k") == 0, "it was written to database 3"


async def test_a_store_that_still_loads_its_data_is_waited_for() -> None:
    greetings, closed = [b"-LOADING still reading\r\n", b"+PONG\r\n"], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING\r\n")
        writer.write(greetings.pop(0))
        if not greetings:
            await reader.readuntil(b"PING\r\n")
            writer.write(b"+second\r\n")
        await reader.read()
        writer.close()
        closed.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Connection(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as connection:
        assert await connection.call("PING") == b"second"
    await wait_until(lambda: len(closed) == 2)


async def test_a_connection_that_ends_as_it_begins_is_made_anew() -> None:
    greetings = [b"+PONG\r\n+surplus\r\n", b"+PONG\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            for reply in (greetings.pop(0), b"+second\r\n"):
                await reader.readuntil(b"PING\r\n")
                writer.write(reply)
            await reader.read()
        writer.close()
        closed.append(writer)

    closed: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Connection(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as connection:
        assert await connection.call("PING") == b"second"
    await wait_until(lambda: len(closed) == 2)


# Limits


@pytest.mark.case(95)
async def test_500_concurrent_calls_over_one_connection_all_succeed(redis_url: str) -> None:
    async with Connection(redis_url) as connection:
        replies = await asyncio.gather(*(connection.call("INCR", "k") for _ in range(500)))
        assert sorted(replies) == list(range(1, 501))
        listed = (await connection.call("CLIENT", "LIST")).splitlines()
        assert sum(b"name=" in line for line in listed) == 1


@pytest.mark.case(95)
async def test_calls_beyond_the_limit_are_refused_and_none_hangs(proxy: FaultProxy, raw: redis.Redis) -> None:
    async with Connection(proxy.url, Limits(max_calls=50)) as connection:
        await connection.call("PING")
        proxy.hold()
        tasks = [asyncio.create_task(end_of(connection.call("INCR", "k"))) for _ in range(500)]
        await wait_until(lambda: sum(task.done() for task in tasks) == 450)
        proxy.pass_on()
        assert Counter(await asyncio.gather(*tasks)) == {"ok": 50, "unavailable": 450}
        assert raw.get("k") == b"50", "what was refused was never sent"


@pytest.mark.case(95)
async def test_waiting_for_a_connection_is_limited_too(proxy: FaultProxy) -> None:
    proxy.hold()
    for limits in (Limits(max_calls=50), Limits(max_bytes=50 * len(b"*2\r\n$4\r\nINCR\r\n$1\r\nk\r\n"))):
        async with Connection(proxy.url, limits, connect_s=0.2) as connection:
            tasks = [asyncio.create_task(end_of(connection.call("INCR", "k"))) for _ in range(500)]
            await asyncio.wait(tasks[50:])
            assert not any(task.done() for task in tasks[:50])
            assert Counter(await asyncio.gather(*tasks)) == {"unavailable": 500}


async def test_arguments_that_no_command_can_carry_are_refused(connection: Connection) -> None:
    with pytest.raises(TypeError):
        await connection.call("SET", "k", None)  # type: ignore[arg-type]
    assert await connection.call("EXISTS", "k") == 0


# Reads that block


@pytest.mark.case(93)
async def test_a_blocking_read_outlives_the_usual_limit(redis_url: str, raw: redis.Redis) -> None:
    patient = replace(QUICK, timeout_s=0.5 + QUICK.timeout_s)
    async with Connection(redis_url, patient) as blocking, Connection(redis_url, QUICK) as usual:
        command = ("XREAD", "BLOCK", 500, "STREAMS", "s", "$")
        assert await blocking.call(*command) is None
        reading = asyncio.create_task(blocking.call(*command))
        await wait_until(lambda: raw.info("clients")["blocked_clients"] == 1)
        assert await usual.call("PING") == b"PONG"
        raw.xadd("s", {"a": "b"}, id="1-0")
        assert await reading == [[b"s", [[b"1-0", [b"a", b"b"]]]]]
        assert await end_of(usual.call("BLPOP", "nothing", 1)) == "lost", "the usual limit would not do"


# Closing


async def test_closing_ends_every_call_and_leaves_nothing_open(proxy: FaultProxy) -> None:
    connection = Connection(proxy.url)
    await connection.call("PING")
    proxy.hold_replies()
    sent = [asyncio.create_task(end_of(connection.call("INCR", "k"))) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    unsent = asyncio.create_task(end_of(connection.call("INCR", "k")))
    await asyncio.sleep(0)
    await connection.close()
    assert await asyncio.gather(*sent) == ["lost"] * 5
    assert await unsent == "unavailable"
    assert await end_of(connection.call("INCR", "k")) == "unavailable"
    await connection.close()


async def test_closing_while_connecting_ends_the_waiting_calls(proxy: FaultProxy) -> None:
    proxy.hold()
    connection = Connection(proxy.url, connect_s=60)
    waiting = [asyncio.create_task(end_of(connection.call("INCR", "k"))) for _ in range(5)]
    await wait_until(lambda: proxy.connections == 1)
    await connection.close()
    assert await asyncio.gather(*waiting) == ["unavailable"] * 5
    del connection
    gc.collect()


async def test_a_caller_that_gives_up_while_connecting_stops_nobody_else(proxy: FaultProxy) -> None:
    proxy.hold()
    async with Connection(proxy.url, connect_s=60) as connection:
        first = asyncio.create_task(connection.call("INCR", "k"))
        second = asyncio.create_task(connection.call("INCR", "k"))
        await wait_until(lambda: proxy.connections == 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        proxy.pass_on()
        assert await second == 1
