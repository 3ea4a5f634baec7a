"""``up``: everything on this machine, for development: store, services, a tenant and the examples at work."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import click
import httpx
import msgspec

from shared.children import Child, ChildError, wait_until_gone
from shared.cli.base import DATA_DIRECTORY, Refused, run, told
from shared.config import PREFIX
from shared.domain.contract import parse_bundle
from shared.domain.credentials import parse_token, secret_digest
from shared.domain.errors import Denied
from shared.store import registry
from shared.store.connection import Connection
from shared.store.contracts import Contracts
from shared.store.embedded import BINARY_VARIABLE, EmbeddedStore
from shared.store.health import lost_reason
from shared.store.registry import PeerRecord

_READY_S: Final = 30.0
_DRAIN_S: Final = 20
_BUNDLES: Final = "settlement_svc.examples.bundles"
_KEPT: Final = (BINARY_VARIABLE, PREFIX + "LOG_LEVEL", PREFIX + "LOG_FORMAT")
_PRINCIPALS: Final = {"caller": "alice", "operator": "operator"}


class Example(msgspec.Struct, frozen=True):
    """A shipped example: its bundle, the peer that works for it, and the module that runs its handler."""

    bundle: str
    peer: str
    handler: str


EXAMPLES: Final = (
    Example("counter.yaml", "counter", "settlement_svc.examples.counter"),
    Example("transfer.yaml", "bank", "settlement_svc.examples.transfer"),
)


@click.command()
@click.option(
    "--data-dir",
    default=DATA_DIRECTORY,
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the store keeps its data, and the services their logs.",
)
@click.option("--tenant", default="dev", show_default=True, metavar="NAME", help="The tenant to set up.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="The port; 0 takes a free one.",
)
@click.option(
    "--examples/--no-examples", default=True, show_default=True, help="Run the example workers too."
)
def up(data_dir: Path, tenant: str, host: str, port: int, examples: bool) -> None:
    """Run everything on this machine.

    An embedded durable store, admission, settlement, a development tenant and the examples at work. Prints
    the base URL, the tokens and commands to try. Ctrl-C drains: requests and work under way end first. The
    data stays in the data directory and is there at the next start.

    Example: lockgate up --data-dir /tmp/lockgate --port 8080
    """
    port = _free_port(host, port)
    store = EmbeddedStore(data_dir)
    with told():
        store.start()
    try:
        kept = _kept_tokens(data_dir)
        tokens = run(_prepare(store.url, data_dir, tenant, examples, kept.get(tenant, {})))
        _keep_tokens(data_dir, {**kept, tenant: tokens})
        with _Interrupts() as interrupts:
            _serve(store, data_dir, tenant, host, port, examples, tokens, interrupts)
    finally:
        store.stop()


def _serve(
    store: EmbeddedStore,
    data_dir: Path,
    tenant: str,
    host: str,
    port: int,
    examples: bool,
    tokens: dict[str, str],
    interrupts: _Interrupts,
) -> None:
    services = _Services(store.url, data_dir, tenant)
    try:
        services.start(host, port, EXAMPLES if examples else ())
        services.wait_ready(interrupts)
        if not interrupts.asked:
            _greet(f"http://{host}:{port}", tenant, data_dir, tokens, examples)
        while not interrupts.asked:
            services.check()
            if not store.running:
                raise Refused(f"the store ended by itself; its log ends:\n{store.log_tail()}")
            time.sleep(0.2)
        click.echo("draining; Ctrl-C again ends at once", err=True)
    except ChildError as error:
        raise Refused(str(error)) from error
    finally:
        services.end(interrupts)


class _Interrupts:
    """Counts the signals that ask to end; the second one means at once."""

    def __init__(self) -> None:
        self.asked = 0
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._former[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked += 1


class _Services:
    """The processes beside the store, by the order in which they end."""

    def __init__(self, redis_url: str, data_dir: Path, tenant: str) -> None:
        self._url = redis_url
        self._data_dir = data_dir
        self._tenant = tenant
        self._door: list[Child] = []
        self._workers: list[Child] = []
        self._handlers: list[Child] = []
        self._ready: list[tuple[Child, str]] = []

    def start(self, host: str, port: int, examples: tuple[Example, ...]) -> None:
        """Start all of them; ChildError where one does not start."""
        for example in examples:
            handler_port = _free_port("127.0.0.1", 0)
            handler = self._child(f"{example.peer}-handler", example.handler, "--port", str(handler_port))
            self._handlers.append(handler)
            self._worker(
                f"{example.peer}-sidecar",
                TENANT=self._tenant,
                PEER=example.peer,
                HANDLER_URL=f"http://127.0.0.1:{handler_port}/",
            )
        self._worker("settlement")
        door = self._child("admission", "admission_svc", HOST=host, PORT=port, METRICS_PORT=port)
        self._door.append(door)
        self._ready.append((door, f"http://{host}:{port}/readyz"))

    def _worker(self, name: str, **settings: object) -> None:
        port = _free_port("127.0.0.1", 0)
        child = self._child(name, "settlement_svc", PORT=port, METRICS_PORT=port, **settings)
        self._workers.append(child)
        self._ready.append((child, f"http://127.0.0.1:{port}/readyz"))

    def _child(self, name: str, module: str, *arguments: str, **settings: object) -> Child:
        """A child whose settings are these alone: what this shell has set for other services is left out."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k in _KEPT}
        values = {"REDIS_URL": self._url, "DRAIN_SECONDS": _DRAIN_S, **settings}
        child = Child.module(
            module,
            *arguments,
            log=self._data_dir / f"{name}.log",
            env={**inherited, **{PREFIX + key: str(value) for key, value in values.items()}},
            grace_s=_DRAIN_S + 5.0,
        )
        return child.start()

    def wait_ready(self, interrupts: _Interrupts) -> None:
        """Return when every service says that it may serve; ChildError where one ends or takes too long."""
        give_up = time.monotonic() + _READY_S
        waiting = list(self._ready)
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while waiting and not interrupts.asked:
                self.check()
                child, url = waiting[0]
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(url).status_code == httpx.codes.OK:
                        waiting.pop(0)
                        continue
                if time.monotonic() >= give_up:
                    raise ChildError(f"{child.name} is not ready; its log ends:\n{child.log_tail()}")
                time.sleep(0.05)

    def check(self) -> None:
        """ChildError where a service ended by itself."""
        for child in (*self._door, *self._workers, *self._handlers):
            if not child.running:
                raise ChildError(f"{child.name} ended by itself; {child.log} ends:\n{child.log_tail()}")

    def end(self, interrupts: _Interrupts) -> None:
        """Drain in the order of the work: the door first, then the workers, then what they call."""
        for group in (self._door, self._workers, self._handlers):
            for child in group:
                child.ask_to_stop()
            give_up = time.monotonic() + _DRAIN_S + 5.0
            while any(child.running for child in group) and time.monotonic() < give_up:
                if interrupts.asked > 1:
                    break
                time.sleep(0.05)
            for child in group:
                if child.running:
                    child.kill()
            wait_until_gone(group, 5.0)


async def _prepare(
    url: str, data_dir: Path, tenant: str, examples: bool, kept: dict[str, str]
) -> dict[str, str]:
    """Set the tenant up, once: what is there already is left as it is. Gives its tokens by role."""
    async with Connection(url) as connection:
        if tenant not in await registry.tenant_names(connection):
            await registry.create_tenant(connection, tenant)
        elif (reason := await lost_reason(connection, tenant)) is not None:
            raise Refused(
                f"tenant {tenant} in {data_dir} is lost: {reason}; choose another --tenant or --data-dir"
            )
        if examples:
            contracts = Contracts(tenant, connection)
            for example in EXAMPLES:
                source = importlib.resources.files(_BUNDLES).joinpath(example.bundle).read_bytes()
                await contracts.register(parse_bundle(source))
                await registry.register_peer(connection, tenant, PeerRecord(example.peer))
        return {
            role: kept[role]
            if await _holds(connection, tenant, kept.get(role, ""))
            else (await registry.create_token(connection, tenant, principal, (role,))).text()
            for role, principal in _PRINCIPALS.items()
        }


def _kept_tokens(data_dir: Path) -> dict[str, dict[str, str]]:
    """The tokens of former starts by tenant and role; none where their file is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_token_file(data_dir).read_bytes(), type=dict[str, dict[str, str]])
    return {}


def _keep_tokens(data_dir: Path, tokens: dict[str, dict[str, str]]) -> None:
    """Write the tokens down for the next start, readable to their owner alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(_token_file(data_dir), flags, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(tokens), indent=2))


def _token_file(data_dir: Path) -> Path:
    return data_dir / "tokens.json"


async def _holds(connection: Connection, tenant: str, text: str) -> bool:
    try:
        token = parse_token(text)
    except Denied:
        return False
    record = await registry.find_token(connection, tenant, token.token_id)
    summary = await registry.show_tenant(connection, tenant)
    return (
        record is not None
        and record.secret_sha256 == secret_digest(token.secret)
        and token.authority8 == summary.authority[:8]
    )


def _greet(base: str, tenant: str, data_dir: Path, tokens: dict[str, str], examples: bool) -> None:
    click.echo(
        f"lockgate is up: {base} (tenant {tenant}; data and logs in {data_dir})\n"
        f"caller token    {tokens['caller']}\n"
        f"operator token  {tokens['operator']}"
    )
    if examples:
        click.echo("\nTry it in another terminal; repeat it and nothing is done twice:\n")
        click.echo("\n".join(_walk(base, tokens["caller"])))
    click.echo("\nCtrl-C drains and ends; everything stays for the next start.")


def _walk(base: str, token: str) -> Iterator[str]:
    yield f"export BASE={base} TOKEN={token}"
    common = '-H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json"'
    profile = '{"actor_id":"counter","profile":{"id":"urn:example:dasp:counter","version":"1"}}'
    yield f"curl -X PUT $BASE/v1/sessions/first {common} -d '{profile}'"
    command = '{"command_id":"c-1","name":"counter.add","input":{"amount":3}}'
    yield f"curl -X POST $BASE/v1/sessions/first/commands {common} -H \"Prefer: wait=10\" -d '{command}'"
    yield f'curl "$BASE/v1/sessions/first/updates?after=0" {common}'


def _free_port(host: str, port: int) -> int:
    """The port itself where it can be listened on, for 0 a free one. Refused where it is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            found: int = probe.getsockname()[1]
            return found
    except OSError as error:
        raise Refused(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from error
