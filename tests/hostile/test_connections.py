"""How many connections, for how long, with how much in them: a real door with narrow bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest

from shared.serving.bounds import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, MAX_REQUEST_BYTES
from tests.admission.house import House
from tests.admission.looking import chunked
from tests.hostile.door import (
    HOST,
    connected,
    description,
    full_session,
    gone,
    serve,
    status_of,
)
from tests.support.polling import wait_until
from tests.support.processes import Processes

HEALTH = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
COMMANDS = "/v1/sessions/s1/commands"
MIB = 1_048_576


def post(token: str = "", *headers: bytes, path: str = COMMANDS) -> bytes:
    """The head of a command."""
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: door", b"content-type: application/json", *headers]
    if token:
        lines.append(f"authorization: Bearer {token}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def test_a_connection_past_the_bound_is_told_and_closed(redis_url: str, processes: Processes) -> None:
    """The others are busy: each has begun a request."""
    door = await serve(processes, redis_url, max_connections=4)
    async with contextlib.AsyncExitStack() as open_ones:
        for _ in range(4):
            held = await open_ones.enter_async_context(connected(door.port))
            await held.send(HEALTH[:-2])
        await wait_until_equal(door.connections, 4)
        for _ in range(3):
            async with connected(door.port) as further:
                reply = await further.rest()
            assert status_of(reply) == 503
            assert b"retry-after: 1\r\n" in reply
            assert description(reply) == "too many connections are open"
        await held.send(b"\r\n")
        assert (await held.reply())[0] == 200
    assert await door.cut("full") == 3


async def test_an_idle_connection_makes_room(redis_url: str, processes: Processes) -> None:
    door = await serve(processes, redis_url, max_connections=3)
    async with connected(door.port) as first, connected(door.port) as second, connected(door.port) as third:
        for held in (first, second, third):
            await held.send(HEALTH)
            assert (await held.reply())[0] == 200
        await third.send(HEALTH)
        assert (await third.reply())[0] == 200
        async with connected(door.port) as further:
            await further.send(HEALTH)
            assert (await further.reply())[0] == 200
            assert await first.rest() == b"", "the one that was idle the longest goes"
            await second.send(HEALTH)
            assert (await second.reply())[0] == 200


async def test_a_flood_of_connections_is_dropped_and_served_on(redis_url: str, processes: Processes) -> None:
    """Also those that do not take their refusal hold no more than a fixed number of files."""
    door = await serve(processes, redis_url, max_connections=8)
    async with contextlib.AsyncExitStack() as open_ones:
        busy = [await open_ones.enter_async_context(connected(door.port)) for _ in range(8)]
        for held in busy:
            await held.send(HEALTH[:-2])
        await wait_until_equal(door.connections, 8)
        flood = [await open_ones.enter_async_context(connected(door.port)) for _ in range(400)]
        await wait_until_at_least(lambda: door.cut("full"), 400)
        assert await door.connections() <= 8 + 256
        for held in flood:
            await held.rest()
        for held in busy:
            await held.send(b"\r\n")
            assert (await held.reply())[0] == 200


async def test_slow_heads_and_bodies_are_cut_off(
    redis_url: str, processes: Processes, arranged: House
) -> None:
    door = await serve(processes, redis_url, request_seconds=1)
    token = await arranged.token("alice")
    trickled = {
        "head": HEALTH[:-2] + b"x: " + b"y" * 2_000 + b"\r\n\r\n",
        "lines": b"\r\n" * 2_000,
        "unauthenticated": post("", b"content-length: 20000") + b" " * 20_000,
        "body": post(token, b"content-length: 20000") + b" " * 20_000,
        "chunks": post(token, b"transfer-encoding: chunked") + chunked(*[b" "] * 2_000),
        "extension": post(token, b"transfer-encoding: chunked") + b"1;" + b"x" * 20_000,
        "trailers": post(token, b"transfer-encoding: chunked") + b"0\r\n" + b"x: y\r\n" * 2_000,
    }

    async def trickle(name: str, whole: bytes) -> None:
        async with connected(door.port) as slow:
            done = asyncio.create_task(slow.rest())
            first = 0 if name in ("head", "lines") else whole.index(b"\r\n\r\n") + 4
            await slow.send(whole[:first])
            for byte in whole[first:]:
                if done.done():
                    break
                await slow.send(bytes([byte]))
                await asyncio.sleep(0.05)
            reply = await done
        if name == "unauthenticated":
            assert status_of(reply) == 401, name
        else:
            assert status_of(reply) == 408, (name, reply)
            assert "did not arrive whole in time" in description(reply), name

    await asyncio.gather(*(trickle(name, whole) for name, whole in trickled.items()))
    await gone(door)


async def test_a_silent_or_idle_connection_is_closed(redis_url: str, processes: Processes) -> None:
    door = await serve(processes, redis_url, idle_seconds=1)
    async with connected(door.port) as silent, connected(door.port) as idle, connected(door.port) as late:
        await idle.send(HEALTH)
        assert (await idle.reply())[0] == 200
        # A small body that comes after its answer leaves the connection as idle as any other.
        await late.send(post("", b"content-length: 4"))
        assert (await late.reply())[0] == 401
        await late.send(b"null")
        for held in (silent, idle, late):
            assert await held.rest() == b""
    await gone(door)


async def test_heads_are_bounded_in_bytes_and_in_number(redis_url: str, processes: Processes) -> None:
    door = await serve(processes, redis_url)
    for lines, said in (
        (b"x: " + b"y" * MAX_HEAD_BYTES, str(MAX_HEAD_BYTES)),
        (b"x: y\r\n" * MAX_HEADERS, str(MAX_HEADERS)),
        (b"x: y\r\n" * 100_000, ""),
    ):
        async with connected(door.port) as held:
            await held.send(b"GET /healthz HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\n")
            reply = await held.rest()
        assert status_of(reply) == 431
        assert said in description(reply)
    async with connected(door.port) as held:
        await held.send(b"GET /" + b"x" * MAX_HEAD_BYTES)
        assert status_of(await held.rest()) == 431
    async with connected(door.port) as held:
        await held.send(b"GET /healthz HTTP/1.1\r\n" + HOST + b"x: y\r\n" * (MAX_HEADERS - 1) + b"\r\n")
        assert (await held.reply())[0] == 200


async def test_a_request_is_bounded_as_it_is_sent_whatever_it_says(
    redis_url: str, processes: Processes, arranged: House
) -> None:
    """Chunk extensions and trailers are no part of a body, and no way around its bound."""
    door = await serve(processes, redis_url)
    token = await arranged.token("alice")
    for padding in (b"1;" + b"x" * MAX_REQUEST_BYTES, b"0\r\n" + b"x: y\r\n" * (MAX_REQUEST_BYTES // 6)):
        async with connected(door.port) as held:
            await held.send(post(token, b"transfer-encoding: chunked") + padding)
            reply = await held.rest()
        assert status_of(reply) == 413
        assert str(MAX_REQUEST_BYTES) in description(reply)
    await gone(door)


async def test_what_nobody_may_send_is_not_read_to_its_end(redis_url: str, processes: Processes) -> None:
    """A caller without a token is answered before its body, and a large rest of it ends the connection."""
    door = await serve(processes, redis_url)
    for head in (
        post("", b"content-length: %d" % MIB),
        post("", b"content-length: 1000000000000"),
        post("", b"transfer-encoding: chunked"),
        post("", b"content-length: 5", b"expect: 100-continue"),
        post("", b"content-length: %d" % MIB, path="/nowhere"),
        post("", b"content-length: %d" % MIB, path="/healthz"),
    ):
        async with connected(door.port) as held:
            await held.send(head)
            status, headers, _ = await held.reply()
            assert status in (401, 404, 405)
            assert headers["connection"] == "close"
            assert await held.rest() == b""
    async with connected(door.port) as held:
        # It goes on sending: what it was told first must not get lost for that, and is all it gets.
        await held.send(post("", b"transfer-encoding: chunked"))
        feeding = asyncio.create_task(feed(held.send))
        reply = await held.rest()
        await feeding
        assert status_of(reply) == 401
    await gone(door)


async def test_what_is_sent_behind_a_refusal_takes_nothing_back(redis_url: str, processes: Processes) -> None:
    """A client that is still sending finds the answer, and an end of it that is no reset."""
    door = await serve(processes, redis_url)

    def talk() -> bytes:
        with socket.create_connection(("127.0.0.1", door.port), 20) as held:
            held.sendall(post("", b"content-length: %d" % MIB))
            assert held.recv(1, socket.MSG_PEEK) == b"H"
            for _ in range(8):
                held.sendall(b"x" * 16_384)
            said = b""
            while chunk := held.recv(65_536):
                said += chunk
            return said

    assert status_of(await asyncio.to_thread(talk)) == 401


async def feed(send: Callable[[bytes], Awaitable[None]]) -> None:
    """A body of 64 MiB, as far as it is taken."""
    for _ in range(64):
        await send(b"100000\r\n" + b"x" * MIB + b"\r\n")


async def test_a_small_body_that_was_not_asked_for_keeps_its_connection(
    redis_url: str, processes: Processes
) -> None:
    door = await serve(processes, redis_url)
    async with connected(door.port) as held:
        await held.send(post("", b"content-length: 10"))
        assert (await held.reply())[0] == 401
        await held.send(b"GET / HTTP")
        await held.send(HEALTH)
        assert (await held.reply())[0] == 200


async def test_pipelined_requests_are_answered_in_order_and_bounded(
    redis_url: str, processes: Processes
) -> None:
    door = await serve(processes, redis_url)
    missing = b"GET /missing HTTP/1.1\r\n" + HOST + b"\r\n"
    async with connected(door.port) as held:
        await held.send((HEALTH + missing) * (MAX_PIPELINED // 2))
        for _ in range(MAX_PIPELINED // 2):
            assert [(await held.reply())[0] for _ in range(2)] == [200, 404]
        await held.send(HEALTH * 10_000)
        replies = await held.rest()
        assert replies.count(b"HTTP/1.1 ") <= MAX_PIPELINED + 2
        assert b"HTTP/1.1 4" not in replies, "no answer is given to another request"
    assert await door.cut("pipelined") == 1
    await gone(door)


async def test_what_follows_the_last_request_is_not_served(redis_url: str, processes: Processes) -> None:
    """After ``Connection: close``, and after an upgrade that is declined, nothing is a request any more."""
    door = await serve(processes, redis_url)
    last = b"GET /healthz HTTP/1.1\r\n" + HOST
    for end in (
        b"connection: close\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n",
    ):
        async with connected(door.port) as held:
            await held.send(last + end + b"\r\n" + HEALTH)
            replies = await held.rest()
        assert status_of(replies) == 200
        assert replies.count(b"HTTP/1.1 ") == 1
        assert b"\r\nconnection: close\r\n" in replies


async def test_nonsense_behind_a_request_is_no_answer_to_it(
    redis_url: str, processes: Processes, arranged: House
) -> None:
    door = await serve(processes, redis_url)
    token = await arranged.token("alice")
    await full_session(arranged, "s1", 1, 10)
    waiting = f"GET /v1/sessions/s1/updates?after=3 HTTP/1.1\r\nauthorization: Bearer {token}\r\n".encode()
    async with connected(door.port) as held:
        await held.send(waiting + HOST + b"prefer: wait=20\r\n\r\n" + b"nonsense\r\n\r\n")
        assert await held.rest() == b""
    await gone(door)


async def test_trailers_change_nothing(redis_url: str, processes: Processes, arranged: House) -> None:
    door = await serve(processes, redis_url)
    alice = await arranged.client("alice")
    await alice.open("s1")
    body = chunked(b'{"command_id":"c1","name":"note.write","input":{}}').removesuffix(b"\r\n")
    for trailer in (b"authorization: Bearer x", b"idempotency-key: other", b"content-type: x", b"host: b"):
        async with connected(door.port) as held:
            await held.send(post(alice.token, b"transfer-encoding: chunked") + body + trailer + b"\r\n\r\n")
            status, _, receipt = await held.reply()
            assert status in (200, 201)
            assert json.loads(receipt)["command_id"] == "c1"


@pytest.mark.timeout(180)
async def test_a_reader_that_stops_is_cut_off_and_holds_little(
    redis_url: str, processes: Processes, arranged: House
) -> None:
    """Pages asked for in a pipeline, and streams: nobody takes what is sent."""
    await full_session(arranged, "s1", 100, 60_000)
    token = (await arranged.token("alice")).encode()
    door = await serve(processes, redis_url, unread_seconds=1)
    page = b"GET /v1/sessions/s1/updates HTTP/1.1\r\nauthorization: Bearer " + token + b"\r\n" + HOST
    async with httpx.AsyncClient(
        base_url=door.base, headers={"authorization": f"Bearer {token.decode()}"}
    ) as c:
        assert len((await c.get("/v1/sessions/s1/updates")).content) > 900_000
    before = door.memory
    async with contextlib.AsyncExitStack() as open_ones:
        for number in range(30):
            reader = await open_ones.enter_async_context(connected(door.port, window=4_096))
            if number % 2:
                await reader.send((page + b"\r\n") * MAX_PIPELINED)
            else:
                await reader.send(page + b"accept: text/event-stream\r\n\r\n")
        await wait_until_at_least(lambda: door.cut("unread"), 30)
        await gone(door)
        assert (await door.metrics())["lockgate_streams"] == 0
        assert (await door.metrics())['lockgate_http_requests_under_way{service="admission"}'] == 0
    assert door.memory - before < 160 * MIB


async def wait_until_equal(look: Callable[[], Awaitable[int]], value: int) -> None:
    async def equal() -> bool:
        return await look() == value

    await wait_until(equal)


async def wait_until_at_least(look: Callable[[], Awaitable[int]], value: int) -> None:
    async def enough() -> bool:
        return await look() >= value

    await wait_until(enough, 30)
