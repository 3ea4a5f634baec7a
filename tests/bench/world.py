"""The system under measurement: one store, one door, the floor beside it, and a tenant to work in."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.domain.contract import Contract, parse_bundle
from shared.domain.limits import TenantLimits
from shared.store import registry
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.embedded import EmbeddedStore
from shared.store.registry import PeerRecord
from tests.support.processes import Process, Processes

TENANT = "bench"
PEER = "worker"
PROFILE = {"id": "urn:bench:work", "version": "1"}

_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "account": {"type": "string", "maxLength": 64},
        "note": {"type": "string", "maxLength": 900},
        "lines": {
            "type": "array",
            "maxItems": 50,
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "count": {"type": "integer", "minimum": 0}},
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["account", "note", "lines"],
    "additionalProperties": False,
}


def contract() -> Contract:
    """A concurrent profile whose command takes a typical document of about 1 KiB."""
    document = {
        "contract": "bench.work",
        "version": "1",
        "interactions": {
            "do": {
                "input": _INPUT,
                "result": {"type": "object"},
                "audience": {"peers": [PEER]},
                "delivery": "one-eligible",
                "completion": {"mode": "first-success"},
                "timeoutMs": 600_000,
                "effects": "none",
            }
        },
        "session": {
            "id": PROFILE["id"],
            "profileVersion": PROFILE["version"],
            "execution": "concurrent",
            "commands": {"work.do": "do"},
        },
    }
    return parse_bundle(json.dumps(document).encode())


def command(command_id: str, size: int = 1024) -> bytes:
    """A command whose input is about ``size`` bytes of JSON."""
    lines = [{"sku": f"sku-{n:04d}", "count": n} for n in range(12)]
    payload: dict[str, Any] = {"account": "acct-20931", "note": "", "lines": lines}
    payload["note"] = "n" * max(0, size - len(json.dumps(payload, separators=(",", ":"))))
    return json.dumps(
        {"command_id": command_id, "name": "work.do", "input": payload}, separators=(",", ":")
    ).encode()


class System:
    """Everything running, with what the measurements need to address it."""

    def __init__(self, store: EmbeddedStore, processes: Processes) -> None:
        self.store = store
        self.processes = processes
        self.token = asyncio.run(self._set_up())
        self.door = self._start(
            "admission_svc",
            {"LOCKGATE_REDIS_URL": store.url, "LOCKGATE_PORT": "0", "LOCKGATE_METRICS_PORT": "off"},
        )
        self.door_port = self._port(self.door)
        self.echo_port = _free_port()
        self.echo = processes.python(
            "-m",
            "uvicorn",
            "tests.bench.echo:app",
            "--port",
            str(self.echo_port),
            "--no-access-log",
            "--log-level",
            "warning",
        )
        _await_port(self.echo_port)

    async def _set_up(self) -> str:
        async with Connection(self.store.url) as connection:
            await registry.create_tenant(connection, TENANT)
            # What is measured is the work, not the limit of a tenant that asks as fast as it can.
            limits = TenantLimits(admissions_per_second=1_000_000, burst=1_000_000)
            await registry.set_limits(connection, TENANT, limits)
            await Contracts(TENANT, connection).register(contract())
            await registry.register_peer(connection, TENANT, PeerRecord(PEER))
            token = await registry.create_token(connection, TENANT, "alice", ["caller"])
            return token.text()

    def _start(self, module: str, env: dict[str, str]) -> Process:
        return self.processes.python("-m", module, env={**env, "LOCKGATE_LOG_LEVEL": "info"})

    def _port(self, process: Process) -> int:
        found = process.wait_for(r'"port": ?(\d+)')
        return int(found[1])

    def sidecar(self, handler_url: str) -> Process:
        """A sidecar of the tenant's peer in front of ``handler_url``."""
        process = self._start(
            "settlement_svc",
            {
                "LOCKGATE_REDIS_URL": self.store.url,
                "LOCKGATE_TENANT": TENANT,
                "LOCKGATE_PEER": PEER,
                "LOCKGATE_HANDLER_URL": handler_url,
                "LOCKGATE_PORT": "0",
                "LOCKGATE_METRICS_PORT": "off",
            },
        )
        self._port(process)
        return process

    def new_session(self) -> str:
        """Open a fresh session at the door and give its id."""
        import httpx

        session_id = f"s-{secrets.token_hex(8)}"
        answer = httpx.put(
            f"http://127.0.0.1:{self.door_port}/v1/sessions/{session_id}",
            headers={"Authorization": f"Bearer {self.token}"},
            json={"actor_id": "actor", "profile": PROFILE},
        )
        answer.raise_for_status()
        return session_id


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(port: int) -> None:
    from tests.support.polling import wait_until_blocking

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until_blocking(answers)


@contextmanager
def one_store() -> Iterator[tuple[EmbeddedStore, Processes]]:
    """A store and a place for processes in a directory of their own, ended on the way out."""
    with tempfile.TemporaryDirectory(prefix="lg-bench-") as folder:
        processes = Processes(Path(folder))
        with EmbeddedStore(Path(folder) / "store") as store:
            try:
                yield store, processes
            finally:
                for printed in processes.end():
                    sys.stderr.write(printed)


@contextmanager
def running() -> Iterator[System]:
    """The whole system in a directory of its own, ended on the way out."""
    with one_store() as (store, processes):
        yield System(store, processes)
