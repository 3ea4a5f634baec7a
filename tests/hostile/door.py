"""A real door process with narrow bounds, and a client of bare sockets that keeps no rule."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.admission.house import House
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes

PATIENCE_S = 20.0
HOST = b"host: door\r\n"


@dataclass
class Served:
    """A service that listens, its metrics on another port."""

    process: Process
    port: int
    metrics_port: int

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def metrics(self) -> dict[str, float]:
        """Every series by its name and labels."""
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        lines = [line for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def cut(self, reason: str) -> int:
        """How many connections were ended for a reason."""
        name = f'lockgate_http_connections_cut_total{{reason="{reason}",service="admission"}}'
        return int((await self.metrics()).get(name, 0))

    async def connections(self) -> int:
        return int((await self.metrics())['lockgate_http_connections{service="admission"}'])

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4_096


async def serve(processes: Processes, url: str, module: str = "admission_svc", **settings: object) -> Served:
    """Start a service on free ports and wait until it listens."""
    values = {"REDIS_URL": url, "PORT": 0, "METRICS_PORT": 0, **settings}
    env = {f"LOCKGATE_{name.upper()}": str(value) for name, value in values.items()}
    process = processes.python("-m", module, env=env)
    line = (await asyncio.to_thread(process.wait_for, r"^.*\blistening\b.*$"))[0]
    ports = [re.search(rf'\b{name}"?[=:] ?(\d+)', line) for name in ("port", "metrics_port")]
    return Served(process, *(int(port[1]) for port in ports if port is not None))


class Socket:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send what the other side takes; one that has closed already takes nothing."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await asyncio.wait_for(self._writer.drain(), PATIENCE_S)

    async def rest(self) -> bytes:
        """Everything until the other side closes; AssertionError when it does not."""
        found = bytearray()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while chunk := await self._reader.read(65_536):
                    found += chunk
        except ConnectionError:
            pass
        except TimeoutError:
            raise AssertionError(f"still open after {bytes(found[-200:])!r}") from None
        return bytes(found)

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """The next response, which must name its length."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            named = (line.partition(": ") for line in lines)
            headers = {name.lower(): value for name, _, value in named}
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(first.split(" ")[1]), headers, body


@contextlib.asynccontextmanager
async def connected(port: int, *, window: int = 0) -> AsyncIterator[Socket]:
    """A connection; ``window`` is how many bytes its own side of the network takes in, 0 as the system has
    it. One that is not read from stays small: nothing is read ahead.
    """
    raw = socket.socket()
    if window:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=4_096 if window else 65_536)
    try:
        yield Socket(reader, writer)
    finally:
        writer.transport.abort()


def status_of(reply: bytes) -> int:
    """The status of the first response in what came back."""
    assert reply.startswith(b"HTTP/1.1 "), reply[:200]
    return int(reply[9:12])


def description(reply: bytes) -> str:
    """What a whole, last response says."""
    return str(json.loads(reply.partition(b"\r\n\r\n")[2])["description"])


async def full_session(house: House, session_id: str, updates: int, size: int) -> None:
    """A session of ``alice`` with so many updates of so many bytes."""
    alice = await house.client("alice")
    assert (await alice.open(session_id)).status_code == 201
    for number in range(updates):
        command = f"{session_id}-{number}"
        assert (await alice.submit(session_id, command)).status_code == 201
        said = {"note.written": {"text": "x" * size}}
        await house.work(command, session_id=session_id, updates=said)


async def gone(served: Served, left: int = 0) -> None:
    """Wait until no more connections than ``left`` are open."""

    async def few() -> bool:
        return await served.connections() <= left

    await wait_until(few, PATIENCE_S)
