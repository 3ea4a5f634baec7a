"""One tenant with the real processes that serve it, over a store that may die."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx

import lua
from shared.domain.ids import command_operation_id
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.embedded import EmbeddedStore
from shared.store.keys import Keys
from shared.store.registry import GROUP, PeerRecord, create_tenant, create_token, register_peer
from tests.faults.client import Client, Journal
from tests.faults.contracts import CONCURRENT, PEER, SERIAL, contract
from tests.faults.ledger import Ledger
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes
from tests.support.raw import raw_client

TENANT: Final = "faults"
LEASE_MS: Final = 600
TIMEOUT_MS: Final = 60_000
_READY_S: Final = 30.0


def free_port() -> int:
    """A port that nobody listens on now, for a service that comes back to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class System:
    """The tenant, its external ledger and its journal. Processes are started as the test says.

    ``url`` of a starter is where the process finds the store: the store itself, or a proxy in front of it.
    """

    def __init__(self, store: EmbeddedStore, processes: Processes, folder: Path) -> None:
        self.store = store
        self.keys = Keys(TENANT)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.journal = Journal(folder / "journal.jsonl")
        self.authority = ""
        self.token = ""
        self._processes = processes
        self._door_port = free_port()
        self.raw = raw_client(store.url)
        """A client of the store itself, for looking; it finds a restarted store again."""

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls,
        store: EmbeddedStore,
        processes: Processes,
        folder: Path,
        *,
        lease_ms: int = LEASE_MS,
        timeout_ms: int = TIMEOUT_MS,
    ) -> AsyncIterator[System]:
        """Register everything in the store; its scripts are loaded, so that a stop at a script is one at its
        run.
        """
        system = cls(store, processes, folder)
        async with Connection(store.url) as connection:
            system.authority = await create_tenant(connection, TENANT)
            await register_peer(connection, TENANT, PeerRecord(PEER))
            contracts = Contracts(TENANT, connection)
            for profile in (SERIAL, CONCURRENT):
                await contracts.register(contract(profile, lease_ms, timeout_ms))
            system.token = (await create_token(connection, TENANT, "alice", ["caller"])).text()
            for name in lua.NAMES:
                await connection.load(lua.load(name))
        try:
            yield system
        finally:
            system.ledger.close()
            system.journal.close()
            system.raw.close()

    # Processes

    async def door(self, url: str = "", port: int | None = None) -> Process:
        """An admission process, on the same port every time unless another is given."""
        port = self._door_port if port is None else port
        process = self._start("admission_svc", url, port)
        await self._ready(process, port)
        return process

    async def sidecar(
        self, handler_url: str, url: str = "", concurrency: int = 16, wait: bool = True
    ) -> Process:
        """A sidecar of the tenant's one peer."""
        more = {
            "TENANT": TENANT,
            "PEER": PEER,
            "HANDLER_URL": handler_url,
            "CONCURRENCY": str(concurrency),
        }
        process = self._start("settlement_svc", url, 0, **more)
        if wait:
            await self._says(process, "working")
        return process

    async def central(self, url: str = "", wait: bool = True) -> Process:
        """A central settlement process."""
        process = self._start("settlement_svc", url, 0)
        if wait:
            await self._says(process, '"settling"')
        return process

    async def worker(self, port: int, most_ms: float = 0.0) -> Process:
        """The handler as a process of its own."""
        process = self._processes.python(
            "-m",
            "tests.faults.worker",
            *("--port", str(port)),
            *("--ledger", str(self.ledger.path)),
            *("--most-ms", str(most_ms)),
        )
        await self._says(process, "worker ready")
        return process

    def _start(self, module: str, url: str, port: int, **more: str) -> Process:
        settings = {
            "REDIS_URL": url or self.store.url,
            "PORT": str(port),
            "METRICS_PORT": "off",
            "DRAIN_SECONDS": "2",
            **more,
        }
        env = {f"LOCKGATE_{name}": value for name, value in settings.items()}
        return self._processes.python("-m", module, env=env)

    async def _says(self, process: Process, text: str) -> None:
        def said() -> bool:
            assert process.running, f"it ended:\n{process.output}"
            return re.search(text, process.output) is not None

        await wait_until(said, _READY_S)

    async def _ready(self, process: Process, port: int) -> None:
        async with httpx.AsyncClient(timeout=2.0) as http:

            async def ready() -> bool:
                assert process.running, f"it ended:\n{process.output}"
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
                return False

            await wait_until(ready, _READY_S, every=0.05)

    # The store

    async def restart_store(self) -> None:
        """SIGKILL the store and start it again on what it had written; other tasks go on meanwhile."""
        await asyncio.to_thread(self.store.kill)
        await asyncio.to_thread(self.store.start)

    # Looking

    @property
    def door_url(self) -> str:
        return f"http://127.0.0.1:{self._door_port}"

    def client(self, doors: list[str] | None = None, timeout_s: float = 15.0) -> Client:
        """A caller of the tenant."""
        return Client(self.token, doors or [self.door_url], self.journal, timeout_s)

    def operation_id(self, command_id: str) -> str:
        return command_operation_id(self.authority, command_id)

    def record(self, command_id: str) -> dict[str, str]:
        """A command's record, fields as text; empty where there is none."""
        return _texts(self.raw.hgetall(self.keys.op(self.operation_id(command_id))))

    def session(self, session_id: str) -> dict[str, str]:
        """A session's record, fields as text."""
        return _texts(self.raw.hgetall(self.keys.session(session_id)))

    def outbox(self) -> list[dict[str, str]]:
        """What is offered to the peer, oldest first."""
        entries: Any = self.raw.xrange(self.keys.outbox(PEER))
        return [_texts(fields) for _, fields in entries]

    def unacknowledged(self) -> int:
        """How many offers were handed out and not acknowledged."""
        summary: Any = self.raw.xpending(self.keys.outbox(PEER), GROUP)
        return int(summary["pending"])


def _texts(fields: Any) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
