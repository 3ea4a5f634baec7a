"""Scripts over shared connections: loaded when unknown, run once each, whatever happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
import redis

import lua
from shared.store.connection import (
    Connection,
    Limits,
    Reply,
    ReplyError,
    ReplyLost,
    Script,
    StoreUnavailable,
    evalsha,
    evalsha_many,
)
from shared.store.embedded import EmbeddedStore
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

# Not idempotent on purpose: a second run of one call shows.
RUN = lua.pin("run", "return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)\n")
REFUSE = lua.pin(
    "refuse", "if ARGV[1] == 'bad' then return redis.error_reply('BAD luck') end return ARGV[1]\n"
)


@pytest.fixture
async def connection(redis_url: str, raw: redis.Redis) -> AsyncIterator[Connection]:
    raw.script_flush()
    async with Connection(redis_url) as made:
        yield made


@pytest.fixture
async def proxy(redis_url: str, raw: redis.Redis) -> AsyncIterator[FaultProxy]:
    raw.script_flush()
    async with FaultProxy(redis_url) as made:
        yield made


def loads(raw: redis.Redis) -> int:
    stats: dict[str, Any] = raw.info("commandstats")
    return int(stats.get("cmdstat_script|load", {}).get("calls", 0))


async def run(connection: Connection, name: object) -> Reply:
    return await evalsha(connection, RUN, [b"runs"], [str(name)])


def runs(raw: redis.Redis) -> dict[int, int]:
    return {int(name): int(times) for name, times in raw.hgetall("runs").items()}


async def test_an_unknown_script_is_loaded_once_for_all_who_wait(
    connection: Connection, raw: redis.Redis
) -> None:
    raw.config_resetstat()
    assert await asyncio.gather(*(run(connection, n) for n in range(300))) == [1] * 300
    assert loads(raw) == 1
    assert await run(connection, 0) == 2
    assert loads(raw) == 1


async def test_a_caller_that_gives_up_stops_no_load(proxy: FaultProxy, raw: redis.Redis) -> None:
    raw.config_resetstat()
    async with Connection(proxy.url) as connection:
        await connection.call("PING")
        proxy.hold_replies()
        first = asyncio.create_task(connection.load(RUN))
        second = asyncio.create_task(connection.load(RUN))
        await wait_until(lambda: loads(raw) == 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        proxy.pass_on()
        await second
        assert await run(connection, 1) == 1
    assert loads(raw) == 1


async def test_what_waits_for_a_load_that_is_lost_has_not_run(proxy: FaultProxy) -> None:
    async with Connection(proxy.url) as connection:
        await connection.call("PING")
        proxy.cut_after(2)
        ends = await asyncio.gather(run(connection, 1), run(connection, 2), return_exceptions=True)
        assert [type(end) for end in ends] == [StoreUnavailable, StoreUnavailable], "neither has run"
        assert await run(connection, 1) == 1


async def test_errors_of_a_script_are_told_and_nothing_is_repeated(connection: Connection) -> None:
    with pytest.raises(ReplyError) as caught:
        await evalsha(connection, REFUSE, [], ["bad"])
    assert caught.value.code == "BAD"
    assert await evalsha(connection, REFUSE, [], ["good"]) == b"good"


async def test_a_store_that_forgets_at_once_gets_the_text_along(redis_url: str, raw: redis.Redis) -> None:
    class Forgetful(Connection):
        async def load(self, script: Script) -> None:
            pass

    async with Forgetful(redis_url) as connection:
        raw.script_flush()
        assert await run(connection, 1) == 1
        raw.script_flush()
        ends = await evalsha_many(connection, RUN, [([b"runs"], ["1"]), ([b"runs"], ["2"])])
    assert ends == [2, 1]
    assert runs(raw) == {1: 2, 2: 1}


@pytest.mark.case(96)
async def test_a_cache_flushed_under_load_fails_no_call(
    connection: Connection, redis_url: str, raw: redis.Redis
) -> None:
    names, done = count(), asyncio.Event()
    flushes = 0

    async def worker() -> None:
        while (name := next(names)) < 3_000:
            assert await run(connection, name) == 1

    async def flusher(direct: Connection) -> None:
        nonlocal flushes
        while not done.is_set():
            await direct.call("SCRIPT", "FLUSH", "ASYNC")
            flushes += 1
            await asyncio.sleep(0.005)

    async with Connection(redis_url) as direct:
        flushing = asyncio.create_task(flusher(direct))
        await asyncio.gather(*(worker() for _ in range(30)))
        done.set()
        await flushing
    assert flushes > 10
    assert runs(raw) == dict.fromkeys(range(3_000), 1)


@pytest.mark.case(96)
async def test_a_restarted_store_fails_no_call_beyond_the_outage(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url, connect_s=30) as connection:
        assert await run(connection, "before") == 1
        await asyncio.to_thread(own_store.kill)
        await wait_until(lambda: not connection.connected)
        calls = [asyncio.create_task(run(connection, n)) for n in range(100)]
        await asyncio.to_thread(own_store.start)
        assert await asyncio.gather(*calls) == [1] * 100
        assert await run(connection, "before") == 2


@pytest.mark.case(92)
async def test_replies_that_come_too_late_repeat_nothing(proxy: FaultProxy, raw: redis.Redis) -> None:
    ends: Counter[str] = Counter()
    names = count()
    ran: set[int] = set()

    async def worker(connection: Connection) -> None:
        while (name := next(names)) < 1_000:
            try:
                assert await run(connection, name) == 1
                ran.add(name)
                ends["ok"] += 1
            except ReplyLost:
                ends["lost"] += 1
            except StoreUnavailable:
                ends["unavailable"] += 1
                await asyncio.sleep(0.01)

    async with Connection(proxy.url, Limits(timeout_s=0.1), connect_s=0.1) as connection:
        workers = [asyncio.create_task(worker(connection)) for _ in range(20)]
        await wait_until(lambda: ends["ok"] > 200, every=0)
        proxy.delay(0.3)
        await wait_until(lambda: ends["lost"] > 0 and ends["unavailable"] > 0)
        proxy.pass_on()
        await asyncio.gather(*workers)
    # What was under way when its reply was given up may still arrive.
    await wait_until(lambda: len(raw.hkeys("runs")) >= ends["ok"])
    assert sum(ends.values()) == 1_000
    assert ends["ok"] > 200
    assert set(runs(raw).values()) == {1}
    assert ran <= runs(raw).keys()
    assert len(runs(raw)) <= ends["ok"] + ends["lost"]


# Many in one write


async def test_many_run_in_their_order_and_each_ends_on_its_own(connection: Connection) -> None:
    words = [f"w{n}" for n in range(100)]
    words[50] = "bad"
    ends = await evalsha_many(connection, REFUSE, [([], [word]) for word in words])
    assert isinstance(ends[50], ReplyError)
    assert ends[:50] + ends[51:] == [word.encode() for word in words if word != "bad"]
    assert await evalsha_many(connection, REFUSE, []) == []


async def test_many_keep_their_order_when_the_script_had_to_be_loaded(connection: Connection) -> None:
    append = lua.pin("append", "return redis.call('RPUSH', KEYS[1], ARGV[1])\n")
    ends = await evalsha_many(connection, append, [([b"list"], [str(n)]) for n in range(50)])
    assert ends == list(range(1, 51))
    assert await connection.call("LRANGE", "list", 0, -1) == [str(n).encode() for n in range(50)]


@pytest.mark.case(96)
async def test_many_keep_their_order_whenever_the_script_is_forgotten(
    connection: Connection, redis_url: str, raw: redis.Redis
) -> None:
    """Far more than the store reads at a time, while others empty its cache and fill it again."""
    append = lua.pin("append", "return redis.call('RPUSH', KEYS[1], ARGV[1])\n")
    rounds, members, padding = 30, 200, "x" * 2_000
    done = asyncio.Event()

    async def forget_and_learn() -> None:
        async with Connection(redis_url) as other:
            while not done.is_set():
                await other.call("SCRIPT", "FLUSH", "SYNC")
                await other.load(append)

    disturbing = [asyncio.create_task(forget_and_learn()) for _ in range(2)]
    for number in range(rounds):
        first = number * members
        calls = [([b"list"], [str(first + n), padding]) for n in range(members)]
        assert await evalsha_many(connection, append, calls) == list(range(first + 1, first + members + 1))
    done.set()
    await asyncio.gather(*disturbing)
    assert raw.lrange("list", 0, -1) == [str(n).encode() for n in range(rounds * members)]


async def test_many_run_not_at_all_where_memory_is_out(connection: Connection, raw: redis.Redis) -> None:
    write = lua.pin("write", "#!lua\nreturn redis.call('RPUSH', KEYS[1], ARGV[1])\n")
    calls = [([b"list"], [str(n)]) for n in range(3)]
    assert await evalsha_many(connection, write, calls) == [1, 2, 3]
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable):
            await evalsha_many(connection, write, calls)
    finally:
        raw.config_set("maxmemory", 0)
    assert raw.llen("list") == 3


class Scripted(Connection):
    """Answers transactions from a list: what a store would have to be caught doing."""

    def __init__(self, *rounds: list[Reply] | Exception, load: Exception | None = None) -> None:
        super().__init__("redis://nowhere")
        self.rounds = list(rounds)
        self.sent: list[tuple[str, list[Any]]] = []
        self.load_error = load

    async def pipeline(self, *commands: Any) -> list[Reply]:
        assert (commands[0], commands[-1]) == (("MULTI",), ("EXEC",))
        self.sent.append((commands[1][0], [command[-1] for command in commands[1:-1]]))
        replies = self.rounds.pop(0)
        if isinstance(replies, Exception):
            raise replies
        return [b"OK", *[b"QUEUED"] * (len(commands) - 2), replies]

    async def load(self, script: Script) -> None:
        if self.load_error is not None:
            raise self.load_error


CALLS: list[tuple[list[bytes], list[str]]] = [([b"k"], [name]) for name in "abcd"]
NAMES = ["a", "b", "c", "d"]
NONE_KNOWN: list[Reply] = [ReplyError("NOSCRIPT gone") for _ in CALLS]


async def test_many_are_sent_again_together_and_at_last_with_the_text() -> None:
    connection = Scripted(NONE_KNOWN, NONE_KNOWN, NONE_KNOWN, [1, 2, 3, 4])
    assert await evalsha_many(connection, RUN, CALLS) == [1, 2, 3, 4]
    assert connection.sent == [("EVALSHA", NAMES)] * 3 + [("EVAL", NAMES)]


@pytest.mark.parametrize("error", [ReplyLost("gone"), StoreUnavailable("away")])
@pytest.mark.parametrize("rounds", [0, 1, 3])
async def test_a_round_that_fails_is_told_for_all(error: Exception, rounds: int) -> None:
    with pytest.raises(type(error)):
        await evalsha_many(Scripted(*[NONE_KNOWN] * rounds, error), RUN, CALLS)


async def test_many_whose_script_cannot_be_loaded_have_not_run() -> None:
    with pytest.raises(StoreUnavailable):
        await evalsha_many(Scripted(NONE_KNOWN, load=StoreUnavailable("x")), RUN, CALLS)


@pytest.mark.parametrize("error", [ReplyLost("gone"), StoreUnavailable("away")])
async def test_none_is_sent_after_members_that_may_not_have_run(error: Exception) -> None:
    """A later round that fails is told for its members; those behind them have not run."""
    many = [([b"k"], [str(n)]) for n in range(60)]
    connection = Scripted(list(range(25)), NONE_KNOWN, error)
    ends = await evalsha_many(connection, RUN, many)
    assert ends[:25] == list(range(25))
    assert ends[25:50] == [error] * 25
    assert [type(end) for end in ends[50:]] == [StoreUnavailable] * 10
    sent = [[str(n) for n in range(25)], *[[str(n) for n in range(25, 50)]] * 2]
    assert connection.sent == [("EVALSHA", names) for names in sent]


async def test_without_transactions_nobody_knows_what_ran(own_store: EmbeddedStore) -> None:
    """The members ran one by one: the caller finds out by identity."""
    async with Connection(own_store.url) as admin:
        rules = ("on", ">secret", "~*", "&*", "+@all", "-multi")
        await admin.call("ACL", "SETUSER", "narrow", *rules)
    async with Connection(own_store.url.replace("unix://", "unix://narrow:secret@")) as narrow:
        await narrow.load(RUN)
        with pytest.raises(ReplyLost, match="NOPERM"):
            await evalsha_many(narrow, RUN, [([b"runs"], ["1"])])
