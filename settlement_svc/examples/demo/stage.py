"""The processes of the demonstration, all separate, all in one temporary directory that goes with them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from settlement_svc.examples import bundles
from settlement_svc.examples.demo.client import until
from settlement_svc.examples.demo.promises import Grip
from shared.children import Child, ChildError, wait_until_gone
from shared.config import PREFIX
from shared.domain.contract import parse_bundle
from shared.domain.ids import command_operation_id
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.embedded import BINARY_VARIABLE, EmbeddedStore
from shared.store.inspecting import Inspector
from shared.store.keys import Keys
from shared.store.registry import PeerRecord, create_tenant, create_token, register_peer

TENANT: Final = "demo"
COUNTER: Final = "counter"
BANK: Final = "bank"
_BUNDLES: Final = ("counter.yaml", "transfer.yaml")
_WORK_MS: Final = 500
"""How long a handler works after its effect: time to catch it at work."""
_HANDLER_URL: Final = re.compile(r"listening on (http://\S+)")
T = TypeVar("T")


class Stage:
    """Everything that runs. Use as a context: whatever happens, all of it is gone afterwards."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lockgate-demo-"))
        self.store = EmbeddedStore(self.directory / "store")
        self.base = ""
        self.token = ""
        self.authority = ""
        self._children: list[Child] = []
        self._handlers: dict[str, tuple[Child, str]] = {}
        self._started = 0

    def __enter__(self) -> Stage:
        try:
            self._set_up()
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _set_up(self) -> None:
        self.store.start()
        asyncio.run(self._administrate())
        door = self._service("door", "admission_svc", PORT=0)
        for peer, module in ((COUNTER, "counter"), (BANK, "transfer")):
            self._start_handler(peer, module)
        self._service("recovery", "settlement_svc", PORT=0)
        found = until(lambda: next(events(door, "listening"), None), "the door listens")
        self.base = f"http://127.0.0.1:{found['port']}"
        until(self._door_ready, "the door is ready")

    async def _administrate(self) -> None:
        """What `lockgate tenant create`, `contract apply`, `peer register` and `token create` do."""
        async with Connection(self.store.url) as connection:
            self.authority = await create_tenant(connection, TENANT)
            contracts = Contracts(TENANT, connection)
            for name in _BUNDLES:
                source = importlib.resources.files(bundles).joinpath(name).read_bytes()
                await contracts.register(parse_bundle(source))
            for peer in (COUNTER, BANK):
                await register_peer(connection, TENANT, PeerRecord(peer))
            self.token = (await create_token(connection, TENANT, "alice", ("caller",))).text()

    def _door_ready(self) -> bool | None:
        with contextlib.suppress(httpx.TransportError):
            ready = httpx.get(f"{self.base}/readyz", trust_env=False).status_code == httpx.codes.OK
            return True if ready else None
        return None

    def _start_handler(self, peer: str, module: str) -> None:
        ledger = ("--ledger", str(self.ledger_file(peer)), "--delay-ms", str(_WORK_MS))
        child = self._child(f"{peer}-handler", f"settlement_svc.examples.{module}", *ledger)
        match = until(lambda: _HANDLER_URL.search(child.output()), f"the handler of {peer} listens")
        self._handlers[peer] = child, match[1]

    def start_sidecars(self, peer: str, count: int) -> list[Child]:
        """Start sidecars of one peer and return when they take work."""
        started = [
            self._service(
                f"{peer}-sidecar",
                "settlement_svc",
                TENANT=TENANT,
                PEER=peer,
                HANDLER_URL=self._handlers[peer][1],
                PORT=0,
            )
            for _ in range(count)
        ]
        for child in started:
            until(lambda child=child: holder_of(child) or None, "a sidecar takes work")  # type: ignore[misc]
        return started

    def _service(self, name: str, module: str, **settings: object) -> Child:
        values = {"REDIS_URL": self.store.url, "METRICS_PORT": "off", "LOG_FORMAT": "json", **settings}
        return self._child(name, module, **{PREFIX + key: str(value) for key, value in values.items()})

    def _child(self, name: str, module: str, *arguments: str, **settings: str) -> Child:
        """A child with its own log; nothing that this shell has set for other services reaches it."""
        self._started += 1
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(PREFIX) or name == BINARY_VARIABLE
        }
        log = self.directory / f"{self._started}-{name}.log"
        child = Child.module(module, *arguments, log=log, env={**inherited, **settings}, grace_s=3.0)
        self._children.append(child.start())
        return child

    def check(self) -> None:
        """ChildError, with the end of its log, for a process that ended unasked."""
        for child in self._children:
            if not child.running and child.pid:
                raise ChildError(f"{child.name} ended by itself; its log ends:\n{child.log_tail()}")

    def murder(self, child: Child) -> None:
        """SIGKILL one process; nothing in it gets the chance to tidy up."""
        child.signal(signal.SIGKILL)
        child.wait(10.0)
        self._children.remove(child)

    def look(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Look into the store as an operator would with `lockgate inspect`."""

        async def looked() -> T:
            async with Connection(self.store.url) as connection:
                return await work(connection)

        return asyncio.run(looked())

    def operation_of(self, command_id: str) -> str:
        """The operation id of a session command."""
        return command_operation_id(self.authority, command_id)

    def grip(self, command_id: str) -> Grip | None:
        """Who holds a command's branch now; None where nobody does."""
        operation = self.operation_of(command_id)
        view = self.look(lambda connection: Inspector(connection, TENANT).operation(operation))
        if view is None or not view.branches or view.branches[0].holder is None:
            return None
        branch = view.branches[0]
        assert branch.holder is not None
        return Grip(branch.holder, branch.epoch, branch.fence, branch.attempt)

    def epoch(self) -> int:
        """The tenant's epoch."""
        return int(self.look(lambda connection: connection.call("HGET", Keys(TENANT).meta, "epoch")))

    def ledger_file(self, peer: str) -> Path:
        """Where the handler of a peer writes down its effects."""
        return self.directory / f"{peer}-effects.jsonl"

    def ledger(self, peer: str) -> list[dict[str, Any]]:
        """The effects that the world outside has seen of one peer."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.ledger_file(peer).read_bytes().splitlines()]
        return []

    @contextlib.contextmanager
    def working(self, peer: str, command_id: str) -> Iterator[Grip]:
        """While the block runs the handler has had its effect and has not answered; gives the grant.

        The handler is held still (SIGSTOP), so that nothing here is a race against its answer.
        """
        operation = self.operation_of(command_id)
        promise = f"the work on {command_id} begins"
        until(lambda: any(e["operationId"] == operation for e in self.ledger(peer)) or None, promise)
        handler = self._handlers[peer][0]
        handler.signal(signal.SIGSTOP)
        try:
            yield until(lambda: self.grip(command_id), "work that has begun is held by a sidecar")
        finally:
            handler.signal(signal.SIGCONT)

    def log_tails(self) -> str:
        """The end of every log, for whoever has to find out what broke."""
        tails = (f"--- {child.log.name}\n{child.log_tail(8)}" for child in self._children)
        return "\n".join([*tails, f"--- store\n{self.store.log_tail(8)}"])

    def _clear(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.signal(signal.SIGCONT)
            child.ask_to_stop()
        wait_until_gone(self._children, 5.0)
        self.store.kill()
        self.store.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def events(child: Child, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a child's log that tell this event."""
    for line in child.output().splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == name:
                yield event


def holder_of(child: Child) -> str:
    """The identity under which a sidecar holds leases, "" before it has one."""
    return next((str(event["holder"]) for event in events(child, "working")), "")
