"""A worker's handler whose effects are entries of the external ledger.

Inside a test it stops where the test says; as a process of its own (``python -m tests.faults.worker``) it
can be killed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from tests.faults.ledger import Entry, Kind, Ledger

Step = Literal["before the effect", "after the effect"]


class Hold:
    """A step at which the handler stands still, for the first request that gets there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.released = asyncio.Event()
        self.lose_answer = False
        """Whether the connection is cut instead of answering, once released."""

    async def wait(self, within_s: float = 15.0) -> None:
        """Wait until a request got there."""
        async with asyncio.timeout(within_s):
            await self.reached.wait()


class Worker:
    """Serves every interaction of :mod:`tests.faults.contracts`.

    ``pause_s`` gives how long each piece of work takes beside the effect itself.
    """

    def __init__(self, ledger: Ledger, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        self._ledger = ledger
        self._pause_s = pause_s
        self._holds: dict[Step, Hold] = {}
        self._keys = {entry.effect_key for entry in ledger.of("effect")}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self, step: Step) -> Hold:
        """Let the next request stand still at a step."""
        self._holds[step] = Hold()
        return self._holds[step]

    async def start(self, port: int = 0) -> None:
        """Listen on loopback; 0 takes a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        # Aborted sockets are closed in the loop's next turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def reset_connections(self) -> None:
        """End every connection with RST, as the system does for a process that died with some unaccepted."""
        for writer in list(self._writers):
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._close(writer))

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A carrier connects before it is allowed to call, and may never be.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            answer = await self._work(msgspec.json.decode(await reader.readexactly(length)))
            if answer is not None:
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(answer), answer)
                )
                await writer.drain()

    async def _work(self, asked: dict[str, Any]) -> bytes | None:
        """Have the effect and give the answer; None where the connection is to be cut instead."""
        self._note("called", asked)
        work = asked["input"]
        if work["refuse"]:
            return msgspec.json.encode({"refused": {"code": "fault.refused", "message": "as asked"}})
        if await self._stand_still("before the effect"):
            return None
        await asyncio.sleep(self._pause_s() / 2)
        # A keyed effect happens once for its key, whoever asks how often.
        if asked["interaction"] != "keyed" or asked["effectKey"] not in self._keys:
            self._keys.add(asked["effectKey"])
            self._note("effect", asked)
        if await self._stand_still("after the effect"):
            return None
        await asyncio.sleep(self._pause_s() / 2)
        answer: dict[str, Any] = {"result": {"amount": work["amount"]}}
        session = asked["session"]
        if session["state"] is not None:
            value = session["state"]["value"] + work["amount"]
            answer["state"] = {"value": value}
            answer["updates"] = [{"name": "fault.added", "data": {"id": work["id"], "value": value}}]
        return msgspec.json.encode(answer)

    async def _stand_still(self, step: Step) -> bool:
        hold = self._holds.pop(step, None)
        if hold is None:
            return False
        hold.reached.set()
        await hold.released.wait()
        return hold.lose_answer

    def _note(self, kind: Kind, asked: dict[str, Any]) -> None:
        self._ledger.write(
            Entry(
                kind,
                asked["input"]["id"],
                asked["interaction"],
                asked["operationId"],
                asked["attempt"],
                asked["lease"],
                asked["effectKey"],
            )
        )


async def _serve_for_ever(port: int, ledger: Ledger, most_ms: float) -> None:
    worker = Worker(ledger, lambda: random.uniform(0.0, most_ms) / 1000)
    await worker.start(port)
    print("worker ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--most-ms", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(_serve_for_ever(given.port, Ledger(given.ledger), given.most_ms))


if __name__ == "__main__":
    main()
