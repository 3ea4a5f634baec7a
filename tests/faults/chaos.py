"""Random faults against everything that runs, for as long as is asked, judged by the external ledger.

``python -m tests.faults.chaos --seconds 60 --seed 7``. The seed fixes which faults come in which order; when
exactly they meet each other and the commands is the machine's doing. Ends with ``chaos: ok``, or with every
broken promise and status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from shared.store.embedded import EmbeddedStore
from tests.faults.audit import Audit
from tests.faults.client import Client
from tests.faults.load import Load
from tests.faults.system import LEASE_MS, System, free_port
from tests.support.processes import TRACEBACK, Process, Processes
from tests.support.proxy import FaultProxy

_CLIENTS: Final = 6
_PATIENCE: Final = 0.7
_CALM_S: Final = 60.0
_SIDE_BY_SIDE: Final = 2
Starter = Callable[[], Awaitable[Process]]


class Service:
    """One process that is started again whenever it was killed."""

    def __init__(self, name: str, starter: Starter) -> None:
        self.name = name
        self.busy = asyncio.Lock()
        """Held while one fault is done to it: another one takes its turn."""
        self._starter = starter
        self.process: Process | None = None

    async def ensure(self) -> Process:
        """The running process. Raises AssertionError where it ended by itself."""
        if self.process is None:
            self.process = await self._starter()
        assert self.process.running, f"{self.name} ended by itself:\n{self.process.output}"
        return self.process

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process = None


class Chaos:
    """A whole deployment: two doors, two sidecars, a central process, a worker; half of it behind a proxy."""

    def __init__(self, system: System, proxy: FaultProxy, client: Client) -> None:
        self._system = system
        self._proxy = proxy
        self._client = client
        self._store_busy = asyncio.Lock()
        self._proxy_busy = asyncio.Lock()
        self.faults: Counter[str] = Counter()
        doors, worker = (free_port(), free_port()), free_port()
        handler = f"http://127.0.0.1:{worker}"
        client.doors[:] = [f"http://127.0.0.1:{port}" for port in doors]
        self.services = [
            Service("worker", lambda: system.worker(worker, most_ms=15.0)),
            Service("door", lambda: system.door(port=doors[0])),
            Service("door behind the proxy", lambda: system.door(proxy.url, doors[1])),
            Service("sidecar", lambda: system.sidecar(handler, wait=False)),
            Service("sidecar behind the proxy", lambda: system.sidecar(handler, proxy.url, wait=False)),
            Service("central", lambda: system.central(wait=False)),
        ]

    async def run(self, seconds: float, seed: int) -> Audit:
        """Submit and break for so long, then let everything come back and hold it against the ledger.

        Raises AssertionError with every broken promise.
        """
        await self._start_all()
        load = Load(self._client, random.Random(seed))
        await load.open()
        over = time.monotonic() + seconds

        def go_on() -> bool:
            return time.monotonic() < over

        async with asyncio.TaskGroup() as group:
            for number in range(_SIDE_BY_SIDE):
                group.create_task(self._break(random.Random(f"{seed} {number}"), go_on))
            group.create_task(load.run(_CLIENTS, go_on, _PATIENCE))
        return await Audit.of(self._system, self._client, _CALM_S)

    async def _start_all(self) -> None:
        await asyncio.gather(*(service.ensure() for service in self.services))

    async def _break(self, rng: random.Random, go_on: Callable[[], bool]) -> None:
        """One fault after the other, each undone before the next one."""
        kinds = {
            self._kill: 4,
            self._stop_for_a_while: 3,
            self._break_connections: 4,
            self._kill_store: 1,
            self._stop_store: 1,
            self._flush_scripts: 1,
        }
        while go_on():
            await rng.choices(list(kinds), list(kinds.values()))[0](rng)
            await asyncio.sleep(rng.uniform(0.0, 0.6))

    async def _kill(self, rng: random.Random) -> None:
        service, pause_s = rng.choice(self.services), rng.choice((0.0, LEASE_MS / 1000))
        async with service.busy:
            self.faults[f"kill {service.name}"] += 1
            service.kill()
            await asyncio.sleep(pause_s)
            await service.ensure()

    async def _stop_for_a_while(self, rng: random.Random) -> None:
        """SIGSTOP, mostly past the lease: what the process holds may be somebody else's when it goes on."""
        service, pause_s = rng.choice(self.services), rng.uniform(0.1, 2.5 * LEASE_MS / 1000)
        async with service.busy:
            self.faults[f"stop {service.name}"] += 1
            process = await service.ensure()
            process.pause()
            await asyncio.sleep(pause_s)
            process.resume()

    async def _break_connections(self, rng: random.Random) -> None:
        proxy, replies, delay_s = self._proxy, rng.randrange(8), rng.uniform(0.05, 1.0)
        modes: dict[str, Callable[[], None]] = {
            "cut": proxy.cut,
            "cut after a few replies": lambda: proxy.cut_after(replies),
            "drop replies": proxy.drop_replies,
            "hold": proxy.hold,
            "hold replies": proxy.hold_replies,
            "delay replies": lambda: proxy.delay(delay_s),
            "refuse": proxy.refuse,
        }
        name, pause_s = rng.choice(list(modes)), rng.uniform(0.05, 1.5 * LEASE_MS / 1000)
        async with self._proxy_busy:
            self.faults[name] += 1
            modes[name]()
            await asyncio.sleep(pause_s)
            if name == "drop replies":
                proxy.cut()
            proxy.pass_on()

    async def _kill_store(self, _: random.Random) -> None:
        async with self._store_busy:
            self.faults["kill store"] += 1
            await self._system.restart_store()

    async def _stop_store(self, rng: random.Random) -> None:
        pause_s = rng.uniform(0.05, 1.0)
        async with self._store_busy:
            self.faults["stop store"] += 1
            pid = self._system.store.pid
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            os.kill(pid, signal.SIGCONT)

    async def _flush_scripts(self, _: random.Random) -> None:
        async with self._store_busy:
            self.faults["flush scripts"] += 1
            await asyncio.to_thread(self._system.raw.script_flush)


async def storm(store: EmbeddedStore, processes: Processes, folder: Path, seconds: float, seed: int) -> str:
    """One whole run; gives what to print of it. Raises AssertionError with every broken promise."""
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(System.create(store, processes, folder))
        proxy = await stack.enter_async_context(FaultProxy(store.url))
        client = await stack.enter_async_context(system.client(timeout_s=10.0))
        chaos = Chaos(system, proxy, client)
        audit = await chaos.run(seconds, seed)
    lines = [f"{count:6} x {name}" for name, count in sorted(chaos.faults.items())]
    ended = ", ".join(f"{count} {status}" for status, count in sorted(audit.statuses().items()))
    effects = sum(entry.kind == "effect" for entry in audit.ledger)
    return "\n".join([*lines, f"{len(audit.outcomes)} commands: {ended}; {effects} effects in the ledger"])


def main() -> int:
    """The exit status: 0 where every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults come (default 60)")
    parser.add_argument("--seed", type=int, help="repeats a run's faults (default: random)")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(f"chaos: {given.seconds:g} s, seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="lockgate-chaos-"))
    processes = Processes(folder)
    try:
        with EmbeddedStore(folder / "store") as store:
            try:
                print(asyncio.run(storm(store, processes, folder, given.seconds, seed)))
            finally:
                printed = processes.end()
        lines = [line for output in printed for line in output.splitlines() if TRACEBACK in line]
        assert not printed, "a process printed a traceback:\n" + "\n".join(lines)
    except AssertionError as broken:
        print(f"{broken}\nchaos: broken, seed {seed}, everything is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    print("chaos: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
