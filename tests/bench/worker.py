"""A command's way through a sidecar against its handler called directly, and what a command keeps."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from statistics import median

from shared.store.connection import Connection
from shared.store.keys import Keys
from tests.bench.load import percentile, post
from tests.bench.table import Row
from tests.bench.world import TENANT, System, command

COMMANDS = 300
HANDLED = b'{"result":{"done":true}}'


def rows(system: System) -> list[Row]:
    """One command at a time: p50 of POST with ``Prefer: wait`` until settled, beside the handler alone."""
    return asyncio.run(_measure(system))


async def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(HANDLED) + HANDLED)
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _call_directly(port: int, body: bytes) -> None:
    """As the sidecar does it: a connection of its own for every attempt."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert (await reader.read()).endswith(HANDLED)
    writer.close()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> dict[str, object]:
    """One request over a kept connection, as plain as the direct call."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    receipt: dict[str, object] = json.loads(await reader.readexactly(length))
    return receipt


async def _measure(system: System) -> list[Row]:
    server = await asyncio.start_server(_handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    sidecar = await asyncio.to_thread(system.sidecar, url)
    session = await asyncio.to_thread(system.new_session)
    before = await _bytes(system)
    direct, through = [], []
    door = await asyncio.open_connection("127.0.0.1", system.door_port)
    for _ in range(COMMANDS):
        body = command(f"c-{secrets.token_hex(8)}")
        began = time.perf_counter()
        await _call_directly(port, body)
        direct.append((time.perf_counter() - began) * 1000)
        request = post(f"/v1/sessions/{session}/commands", system.token, body, "Prefer: wait=10\r\n")
        began = time.perf_counter()
        receipt = await _exchange(*door, request)
        through.append((time.perf_counter() - began) * 1000)
        assert receipt["state"] == "settled", receipt
    door[1].close()
    kept = (await _bytes(system) - before) / COMMANDS
    server.close()
    await asyncio.to_thread(sidecar.terminate)
    return _table(direct, through, kept)


def _table(direct: list[float], through: list[float], kept: float) -> list[Row]:
    d50, t50 = median(direct), median(through)
    stored = len(command("c-0123456789abcdef"))
    return [
        Row("handler called directly", f"p50 {d50:.2f} ms, p99 {percentile(direct, 0.99):.2f} ms"),
        Row(
            "command to outcome through door and sidecar",
            f"p50 {t50:.2f} ms, p99 {percentile(through, 0.99):.2f} ms",
            f"{t50 / d50:.1f} x direct",
            "p50 ≤ 2 x direct + 5 ms",
            t50 <= 2 * d50 + 5,
        ),
        Row(
            "memory of the store per settled command",
            f"{kept:,.0f} bytes",
            f"{kept / stored:.2f} x the command",
        ),
    ]


async def _bytes(system: System) -> int:
    """Bytes of all keys of the tenant, as the store counts them."""
    total = 0
    async with Connection(system.store.url) as connection:
        keys = await connection.call("KEYS", f"lg:{{{TENANT}}}:*")
        assert Keys(TENANT).meta in keys
        for reply in await connection.pipeline(*(("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys)):
            total += int(reply)
    return total
