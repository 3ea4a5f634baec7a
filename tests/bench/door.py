"""The door against the floor: requests per second and processor time per request, in alternating runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.load import Load, cpu_seconds, drive, get, post
from tests.bench.table import Row, spread
from tests.bench.world import System, command

CONNECTIONS = 32
ROUNDS = 5
REQUESTS = 4000


@dataclass(frozen=True)
class Run:
    """One run: requests per second, and µs of processor time per request of the server and of the store."""

    per_second: float
    server_us: float
    store_us: float
    p50_ms: float


def measure(system: System, pid: int, port: int, requests: Sequence[bytes], status: int) -> Run:
    """Drive one run; every reply must have ``status``."""
    server, store = cpu_seconds(pid), cpu_seconds(system.store.pid)
    load: Load = asyncio.run(drive("127.0.0.1", port, requests, CONNECTIONS))
    server, store = cpu_seconds(pid) - server, cpu_seconds(system.store.pid) - store
    assert load.statuses == {status: len(requests)}, load.statuses
    each = 1e6 / len(requests)
    return Run(load.per_second, server * each, store * each, load.percentile(0.5))


def rows(system: System) -> list[Row]:
    """Alternating runs of every kind of request, then medians and ratios to the floor."""
    kinds: dict[str, Callable[[], Run]] = {
        "bare ASGI echo, 1 KiB": lambda: _echo(system),
        "POST command, 1 KiB": lambda: _commands(system),
        "POST batch of 100": lambda: _batches(system),
        "POST duplicate, 1 KiB": lambda: _duplicates(system),
        "GET page of 100 updates": lambda: _pages(system),
    }
    for warm in kinds.values():
        warm()
    runs: dict[str, list[Run]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, once in kinds.items():
            runs[name].append(once())
    return _table(runs)


def _table(runs: dict[str, list[Run]]) -> list[Row]:
    def cpu(name: str) -> float:
        return median(run.server_us for run in runs[name])

    echo, single, batch = (
        cpu("bare ASGI echo, 1 KiB"),
        cpu("POST command, 1 KiB"),
        cpu("POST batch of 100") / 100,
    )
    made = []
    for name, each in runs.items():
        door = spread([run.server_us for run in each], "µs door")
        store = f"{median(run.store_us for run in each):,.0f} µs store"
        rate = f"{median(run.per_second for run in each):,.0f}/s"
        ratio, aim, met = f"{cpu(name) / echo:.2f} x echo", "", None
        if name == "POST command, 1 KiB":
            aim, met = "≤ 3.5 x echo", cpu(name) <= 3.5 * echo
        made.append(Row(name, f"{door}, {store}, {rate}", ratio, aim, met))
    made.append(
        Row(
            "one command of a batch",
            f"{batch:,.0f} µs door",
            f"{batch / single:.2f} x single",
            "≤ 0.4 x single",
            batch <= 0.4 * single,
        )
    )
    return made


def _echo(system: System) -> Run:
    body = command("c")
    return measure(system, system.echo.pid, system.echo_port, [post("/", "t", body)] * REQUESTS, 200)


def _path(session_id: str, rest: str) -> str:
    return f"/v1/sessions/{session_id}/{rest}"


def _commands(system: System) -> Run:
    path = _path(system.new_session(), "commands")
    requests = [post(path, system.token, command(f"c-{secrets.token_hex(8)}")) for _ in range(REQUESTS)]
    return measure(system, system.door.pid, system.door_port, requests, 201)


def _duplicates(system: System) -> Run:
    path = _path(system.new_session(), "commands")
    one = post(path, system.token, command(f"c-{secrets.token_hex(8)}"))
    measure(system, system.door.pid, system.door_port, [one], 201)
    return measure(system, system.door.pid, system.door_port, [one] * REQUESTS, 200)


def _batches(system: System) -> Run:
    path = _path(system.new_session(), "commands:batch")
    requests = []
    for _ in range(REQUESTS // 100):
        commands = b",".join(command(f"c-{secrets.token_hex(8)}") for _ in range(100))
        requests.append(post(path, system.token, b'{"commands":[' + commands + b"]}"))
    return measure(system, system.door.pid, system.door_port, requests, 200)


def _pages(system: System) -> Run:
    session = system.new_session()
    path = _path(session, "commands")
    fill = [post(path, system.token, command(f"c-{secrets.token_hex(8)}", 128)) for _ in range(100)]
    measure(system, system.door.pid, system.door_port, fill, 201)
    page = get(_path(session, "updates?after=0&limit=100"), system.token)
    return measure(system, system.door.pid, system.door_port, [page] * (REQUESTS // 10), 200)
