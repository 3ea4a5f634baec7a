"""One socket: order, one write per turn, limits, and who is told what when it goes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from shared.domain.errors import ErrorKind
from shared.store.connection import Limits, ReplyError, ReplyLost, StoreUnavailable
from shared.store.link import Link, pack


class Wire(asyncio.Transport):
    """A transport that remembers what was written and answers what a test feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.aborted = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True


class Bench:
    def __init__(self, limits: Limits | None = None) -> None:
        self.losses = 0
        self.wire = Wire()
        self.link = Link(limits or Limits(), self._lost)
        self.link.connection_made(self.wire)

    def _lost(self, link: Link) -> None:
        self.losses += 1

    def echo(self, text: str) -> asyncio.Future[Any]:
        return self.link.send(pack(("ECHO", text)), 1)


async def turn() -> None:
    await asyncio.sleep(0)


async def test_calls_of_one_turn_leave_in_one_write_in_their_order() -> None:
    bench = Bench()
    futures = [bench.echo(str(n)) for n in range(5)]
    assert bench.wire.writes == []
    await turn()
    assert bench.wire.writes == [b"".join(pack(("ECHO", str(n))) for n in range(5))]
    bench.link.data_received(b":0\r\n:1\r\n:2\r\n:3\r\n:4\r\n")
    assert [await future for future in futures] == [0, 1, 2, 3, 4]


async def test_calls_of_later_turns_leave_in_later_writes() -> None:
    bench = Bench()
    futures = []
    for n in range(3):
        futures.append(bench.echo(str(n)))
        await turn()
    assert len(bench.wire.writes) == 3
    for byte in b":0\r\n:1\r\n:2\r\n":
        bench.link.data_received(bytes([byte]))
    assert [await future for future in futures] == [0, 1, 2]


async def test_a_cancelled_call_keeps_its_place() -> None:
    bench = Bench()
    first, unsent, last = bench.echo("a"), bench.echo("b"), bench.echo("c")
    unsent.cancel()
    await turn()
    first.cancel()
    bench.link.data_received(b"+a\r\n-ERR b\r\n+c\r\n")
    assert await last == b"c"
    later = bench.echo("d")
    bench.link.data_received(b"+d\r\n")
    assert await later == b"d"


async def test_every_shape_of_reply_comes_as_it_is() -> None:
    bench = Bench()
    futures = [bench.echo("x") for _ in range(6)]
    bench.link.data_received(b"+OK\r\n$3\r\na\x00b\r\n$-1\r\n:-7\r\n*2\r\n$1\r\na\r\n*1\r\n-ERR in\r\n*0\r\n")
    replies = [await future for future in futures]
    assert replies[:4] == [b"OK", b"a\x00b", None, -7]
    assert replies[4][0] == b"a"
    assert isinstance(replies[4][1][0], ReplyError)
    assert replies[5] == []


async def test_what_was_written_is_unknown_and_what_was_not_is_unavailable() -> None:
    bench = Bench()
    written = bench.echo("a")
    await turn()
    unsent = bench.echo("b")
    bench.link.drop("gone")
    with pytest.raises(ReplyLost):
        await written
    with pytest.raises(StoreUnavailable):
        await unsent
    with pytest.raises(StoreUnavailable):
        bench.echo("c")
    await turn()
    assert bench.wire.aborted
    assert len(bench.wire.writes) == 1, "nothing leaves after the loss"
    bench.link.connection_lost(None)
    assert bench.losses == 1
    assert bench.link.closed.done()


@pytest.mark.requirement("RT-STORE-15")
@pytest.mark.parametrize("error", [StoreUnavailable("x"), ReplyLost("x"), ReplyError("OOM x")])
async def test_no_failure_of_the_store_reads_as_a_conflict_or_as_absence(
    error: StoreUnavailable | ReplyLost | ReplyError,
) -> None:
    assert error.kind is ErrorKind.UNAVAILABLE
    assert error.retry_after_s is not None


async def test_an_error_reply_tells_its_code_and_keeps_its_text_from_callers() -> None:
    bench = Bench()
    future = bench.echo("x")
    bench.link.data_received(b"-WRONGTYPE secret value\r\n")
    with pytest.raises(ReplyError) as caught:
        await future
    assert caught.value.code == "WRONGTYPE"
    assert caught.value.message == "secret value"
    assert "secret" not in str(caught.value)
    assert "secret" not in (caught.value.description or "")


@pytest.mark.parametrize("junk", [b"HTTP/1.1 200 OK\r\n", b"$x\r\n", b"*-5\r\n"])
async def test_junk_ends_the_link(junk: bytes) -> None:
    bench = Bench()
    future = bench.echo("x")
    await turn()
    bench.link.data_received(junk)
    with pytest.raises(ReplyLost):
        await future
    assert bench.wire.aborted


async def test_a_reply_nobody_asked_for_ends_the_link() -> None:
    bench = Bench()
    bench.link.data_received(b"+OK\r\n")
    assert bench.link.gone
    assert bench.wire.aborted


async def test_more_calls_than_allowed_are_refused_and_the_others_go_on() -> None:
    bench = Bench(Limits(max_calls=3))
    futures = [bench.echo(str(n)) for n in range(3)]
    with pytest.raises(StoreUnavailable, match="too many"):
        bench.echo("3")
    bench.link.data_received(b":0\r\n")
    futures.append(bench.echo("4"))
    bench.link.data_received(b":1\r\n:2\r\n:4\r\n")
    assert [await future for future in futures] == [0, 1, 2, 4]


async def test_more_bytes_than_allowed_are_refused_until_replies_come() -> None:
    size = len(pack(("ECHO", "x" * 100)))
    bench = Bench(Limits(max_bytes=2 * size))
    bench.echo("x" * 100)
    bench.echo("x" * 100)
    with pytest.raises(StoreUnavailable, match="too many"):
        bench.echo("")
    bench.link.data_received(b"+x\r\n")
    bench.echo("x" * 100)


async def test_cancelled_calls_still_count_until_their_reply_came() -> None:
    bench = Bench(Limits(max_calls=1))
    bench.echo("a").cancel()
    with pytest.raises(StoreUnavailable):
        bench.echo("b")
    bench.link.data_received(b"+a\r\n")
    bench.echo("c")


async def test_an_overdue_reply_loses_all_that_wait() -> None:
    bench = Bench(Limits(timeout_s=0.05))
    first = bench.echo("a")
    await turn()
    second = bench.echo("b")
    await turn()
    with pytest.raises(ReplyLost, match="in time"):
        await first
    with pytest.raises(ReplyLost):
        await second
    assert bench.wire.aborted


class HandLoop:
    """The running loop with a clock and timers that the test moves by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, asyncio.Handle]] = []
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, (), self._loop)
        self.timers.append((when, handle))
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def move_to(self, now: float) -> None:
        self.now = now
        while due := [timer for timer in self.timers if timer[0] <= now]:
            self.timers.remove(due[0])
            if not due[0][1].cancelled():
                due[0][1]._run()


async def test_every_call_has_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = HandLoop()
    bench = Bench(Limits(timeout_s=10))
    monkeypatch.setattr(bench.link, "_loop", loop)
    first = bench.echo("a")
    loop.move_to(7)
    second = bench.echo("b")
    await turn()
    bench.link.data_received(b"+a\r\n")
    assert await first == b"a"
    for now in (10, 11, 16.9):
        loop.move_to(now)
        assert not bench.link.gone
    loop.move_to(17.5)
    loop.move_to(18)
    with pytest.raises(ReplyLost, match="in time"):
        await second


async def test_a_link_without_calls_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = HandLoop()
    bench = Bench(Limits(timeout_s=10))
    monkeypatch.setattr(bench.link, "_loop", loop)
    for start in (0, 100):
        loop.move_to(start)
        future = bench.echo("a")
        await turn()
        bench.link.data_received(b"+a\r\n")
        assert await future == b"a"
        loop.move_to(start + 99)
        assert loop.timers == []


async def test_replies_in_time_never_lose_the_link() -> None:
    loop = asyncio.get_running_loop()
    bench = Bench(Limits(timeout_s=0.05))
    end = loop.time() + 0.3
    while loop.time() < end:
        future = bench.echo("a")
        await turn()
        bench.link.data_received(b"+a\r\n")
        assert await future == b"a"
        # An idle moment longer than the limit counts against nobody.
        await asyncio.sleep(0.06)
    assert not bench.link.gone


async def test_a_process_that_was_stopped_reads_before_it_gives_up() -> None:
    loop = asyncio.get_running_loop()
    bench = Bench(Limits(timeout_s=0.05))
    future = bench.echo("a")
    await turn()
    # The whole process stands still past the limit; the reply, there by then, is read just after the timer.
    time.sleep(0.1)  # noqa: ASYNC251
    loop.call_later(0, loop.call_soon, bench.link.data_received, b"+a\r\n")
    assert await future == b"a"
    assert not bench.link.gone


async def test_arguments_of_other_types_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError):
        pack(("SET", None))  # type: ignore[arg-type]
    assert (
        pack(("SET", b"\x00", "é", 1, 2.5))
        == b"*5\r\n$3\r\nSET\r\n$1\r\n\x00\r\n$2\r\n\xc3\xa9\r\n$1\r\n1\r\n$3\r\n2.5\r\n"
    )
