"""The aimed proxy itself: it tells commands apart, stops where it is told, and changes nothing else."""

from __future__ import annotations

import asyncio

import pytest

import lua
from shared.store.connection import Connection, ReplyLost
from tests.support.breakpoints import BreakpointProxy, frame_end, label

REPLIES = [
    b"+OK\r\n",
    b"-ERR no\r\n",
    b":12\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"$0\r\n\r\n",
    b"$4\r\na\r\nb\r\n",
    b"*3\r\n:1\r\n*1\r\n$1\r\nx\r\n-ERR in a list\r\n",
]


@pytest.mark.parametrize("reply", REPLIES)
def test_a_frame_ends_where_its_last_byte_is(reply: bytes) -> None:
    assert frame_end(reply) == len(reply)
    assert frame_end(reply + b"+NEXT\r\n") == len(reply)
    assert all(frame_end(reply[:cut]) is None for cut in range(len(reply)))


def test_a_script_is_called_by_its_name_and_verb() -> None:
    lease, admit = lua.load("lease").sha.encode(), lua.load("admit").sha.encode()
    assert label([b"EVALSHA", lease, b"2", b"k1", b"k2", b"claim", b"x"]) == "lease claim"
    assert label([b"evalsha", admit, b"0", b"x"]) == "admit"
    assert label([b"get", b"k"]) == "GET"


async def test_traffic_stops_at_the_command_that_was_named_and_nowhere_else(redis_url: str) -> None:
    async with (
        BreakpointProxy(redis_url) as proxy,
        Connection(proxy.url) as through,
        Connection(redis_url) as beside,
    ):
        before = proxy.stop_before("SET", b"a")
        call = asyncio.create_task(through.call("SET", "a", "1"))
        await before.reached()
        assert await beside.call("GET", "a") is None
        before.release()
        assert await call == b"OK"
        after = proxy.stop_after("SET", b"a")
        call = asyncio.create_task(through.call("SET", "a", "2"))
        await after.reached()
        assert await beside.call("GET", "a") == b"2"
        assert not call.done()
        after.release()
        assert await call == b"OK"
        assert await through.call("SET", "a", "3") == b"OK", "a stop stops once"
        cut = proxy.cut_after("SET", b"b")
        with pytest.raises(ReplyLost):
            await through.call("SET", "b", "1")
        await cut.reached()
        assert await through.call("GET", "b") == b"1"
