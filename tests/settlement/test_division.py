"""Central processes share the tenants: each tenant is settled by one of them, and by another when that one
goes.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from settlement_svc.app import Central
from settlement_svc.division import GONE_MS, Division, owner
from settlement_svc.settle import QUIET_S
from shared.store import registry
from shared.store.connection import Connection
from shared.store.embedded import EmbeddedStore
from shared.store.keys import SETTLERS
from shared.store.runtime import Runtime
from shared.store.settlers import Settlers
from tests.settlement.host import PEER, Host, contract
from tests.settlement.scripted import ScriptedHandler
from tests.settlement.test_processes import settlement
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes
from tests.support.raw import raw_client

pytestmark = pytest.mark.unrestricted("a user of one tenant takes no part in any division")

NAMES = [f"tenant-{number}" for number in range(10)]
TERMS = contract(execution="concurrent", timeout_ms=600_000)


def test_everybody_who_knows_the_same_members_names_the_same_owner() -> None:
    members = [f"{number:016x}" for number in range(5)]
    owners = {name: owner(name, members) for name in map(str, range(1_000))}
    assert owners == {name: owner(name, frozenset(members)) for name in owners}
    shares = [list(owners.values()).count(member) for member in members]
    assert min(shares) > 100


def test_who_comes_or_goes_moves_only_its_own_share() -> None:
    members = {f"{number:016x}" for number in range(5)}
    gone = min(members)
    for name in map(str, range(1_000)):
        before, after = owner(name, members), owner(name, members - {gone})
        assert after == before or before == gone


async def test_members_are_those_whose_last_beat_is_near(redis_url: str, raw: Any) -> None:
    async with Connection(redis_url) as connection:
        settlers = Settlers(connection)
        now = await registry.store_now_ms(connection)
        hour = 3_600_000
        raw.zadd(
            SETTLERS,
            {
                "near": now - GONE_MS + 2_000,
                "gone": now - GONE_MS - 1,
                "long ago": now - hour,
                "ahead": now + hour,
            },
        )
        assert await settlers.beat("me", GONE_MS) == {"me", "near"}
        # What was not heard of for long is taken off; who beat before the clock was set back does not count.
        assert set(raw.zrange(SETTLERS, 0, -1)) == {b"me", b"near", b"gone", b"ahead"}
        await settlers.leave("me")
        assert raw.zscore(SETTLERS, "me") is None


async def test_a_process_that_was_never_heard_or_is_refused_settles_everything(
    redis_url: str, raw: Any
) -> None:
    """Nobody else counts on it, so it may count on nobody."""
    raw.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", "~lg:tenants", "~lg:{*", "&*", "+@all")
    try:
        async with (
            Connection(redis_url) as open_to_all,
            Connection(_as(redis_url, "narrow", "pw")) as limited,
        ):
            for member in ("x", "y"):
                await Settlers(open_to_all).beat(member, GONE_MS)
            division = Division(limited)
            assert all(map(division.mine, NAMES))
            await division.beat()
            assert all(map(division.mine, NAMES))
            assert set(raw.zrange(SETTLERS, 0, -1)) == {b"x", b"y"}
            await division.leave()
            shared = Division(open_to_all)
            await shared.beat()
            assert not all(map(shared.mine, [f"t{number}" for number in range(100)]))
            # Refused only later on, by a store whose memory is out: the same.
            raw.delete(SETTLERS)
            raw.set(SETTLERS, "of another type")
            await shared.beat()
            assert all(map(shared.mine, NAMES))
    finally:
        raw.execute_command("ACL", "DELUSER", "narrow")


def _as(url: str, user: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"


async def test_while_the_store_is_away_the_division_stays(own_store: EmbeddedStore) -> None:
    async with Connection(own_store.url) as connection:
        await Settlers(connection).beat("other", GONE_MS)
        division = Division(connection)
        await division.beat()
        mine = [name for name in NAMES if division.mine(name)]
        assert len(mine) < len(NAMES)
        own_store.kill()
        await division.beat()
        assert [name for name in NAMES if division.mine(name)] == mine
        await division.leave()


@pytest.fixture
async def tenants(redis_url: str) -> AsyncIterator[list[Host]]:
    """Ten tenants with a session each."""
    # The test is no process of the system: it looks after no tenant.
    async with Runtime(redis_url, look_every_s=None) as runtime:
        await runtime.refresh()
        hosts = [await Host.furnish(redis_url, runtime, name, TERMS) for name in NAMES]
        for host in hosts:
            await host.open()
        yield hosts


def share(process: Process) -> set[str]:
    """The tenants a process settles, by what it says."""
    tenants: set[str] = set()
    for line in process.output.splitlines():
        event = json.loads(line)
        if event["event"] == "settling":
            tenants.add(event["tenant"])
        elif event["event"] == "left to others":
            tenants.discard(event["tenant"])
    return tenants


def divided(*processes: Process) -> bool:
    """Whether every tenant is settled by exactly one of the processes."""
    shares = [share(process) for process in processes]
    return sorted(name for each in shares for name in each) == sorted(NAMES)


def settled(*processes: Process) -> list[str]:
    """The operations whose end a process committed."""
    events = [json.loads(line) for process in processes for line in process.output.splitlines()]
    return [event["operation"] for event in events if event["event"] == "settled"]


async def test_two_processes_divide_ten_tenants_and_each_takes_over_when_the_other_goes(
    redis_url: str, tenants: list[Host], processes: Processes, raw: Any
) -> None:
    started: list[Process] = []
    commands: list[tuple[Host, str]] = []

    def start() -> Process:
        started.append(settlement(processes, redis_url))
        return started[-1]

    async def everything_ends(round_number: int) -> None:
        names = [f"r{round_number}-{number}" for number in range(5)]
        for host in tenants:
            for name in names:
                await host.submit(name, timeout_ms=1)
                commands.append((host, name))
        for host, name in commands[-len(tenants) * len(names) :]:
            assert (await host.outcome(name, within=30.0))["error"]["code"] == "timeout"

    first, second = start(), start()
    await wait_until(lambda: divided(first, second), 30.0)
    await everything_ends(0)

    first.kill()
    await everything_ends(1)
    await wait_until(lambda: share(second) == set(NAMES), 30.0)

    third = start()
    await wait_until(lambda: share(third) and divided(second, third), 30.0)
    assert share(second)
    await everything_ends(2)

    # Who ends in order takes its word back itself.
    second.terminate()
    assert second.wait() == 0
    members = {member for member, _ in raw.zrange(SETTLERS, 0, -1, withscores=True)}
    assert len(members) == 2, "the one that was killed and the one that is left"
    await wait_until(lambda: share(third) == set(NAMES), 30.0)
    await everything_ends(3)

    ended = settled(*started)
    assert len(ended) == len(set(ended)), "an operation was settled twice"
    for host, name in commands:
        assert len(await host.outcomes(name)) == 1


async def test_two_that_settle_the_same_tenants_settle_nothing_twice(
    redis_url: str, tenants: list[Host], processes: Processes, raw: Any
) -> None:
    """Division is no guard: where it fails, and all look at everything, the assertions are."""
    raw.set(SETTLERS, "no registry at all")
    both = [settlement(processes, redis_url), settlement(processes, redis_url)]
    await wait_until(lambda: all(share(process) == set(NAMES) for process in both), 30.0)
    names = [f"c{number}" for number in range(20)]
    for host in tenants:
        for name in names:
            await host.submit(name, timeout_ms=1)
    for host in tenants:
        for name in names:
            await host.outcome(name, within=30.0)
            assert len(await host.outcomes(name)) == 1
    ended = settled(*both)
    assert len(ended) == len(set(ended)) == len(tenants) * len(names)


async def test_a_process_that_is_given_its_tenant_changes_nobodys_share(
    redis_url: str, tenants: list[Host], raw: Any
) -> None:
    runtime = tenants[0].runtime
    stop = asyncio.Event()
    running = asyncio.create_task(Central(runtime, NAMES[0]).run(stop))
    await tenants[0].submit("c1", timeout_ms=1)
    await tenants[0].outcome("c1")
    assert raw.exists(SETTLERS) == 0
    stop.set()
    await running


async def test_what_falls_to_another_process_costs_no_subscription(
    redis_url: str, tenants: list[Host], raw: Any
) -> None:
    runtime = tenants[0].runtime
    runtime.wake._check_s = runtime.wake._linger_s = 0.1
    stop = asyncio.Event()
    central = Central(runtime)
    running = asyncio.create_task(central.run(stop))

    def watched() -> set[str]:
        return {name for name in NAMES if runtime.wake.subscribed(name)}

    await wait_until(lambda: watched() == set(NAMES))
    raw.zadd(SETTLERS, {"other": await registry.store_now_ms(runtime.connection) + GONE_MS - 500})
    assert central._division is not None
    rest = {name for name in NAMES if owner(name, ["other", central._division.member]) != "other"}
    assert len(rest) < len(NAMES)
    await wait_until(lambda: watched() == rest)
    assert central._tasks.keys() == rest
    raw.zrem(SETTLERS, "other")
    await wait_until(lambda: watched() == set(NAMES))
    stop.set()
    await running
    assert raw.exists(SETTLERS) == 0


@contextmanager
def watching(url: str) -> Iterator[list[str]]:
    """Every command that reaches the store meanwhile, as text."""
    seen: list[str] = []
    with raw_client(url) as client:
        with client.monitor() as monitor:

            def read() -> None:
                # Reading ends in one way or another when the block closes the connection under it.
                with suppress(Exception):
                    for command in monitor.listen():
                        seen.append(command["command"])

            reader = threading.Thread(target=read)
            reader.start()
            yield seen
        reader.join()


async def test_an_idle_tenant_costs_at_most_a_command_a_second_whoever_serves_it(
    redis_url: str, tenants: list[Host], processes: Processes
) -> None:
    """Through a whole idle period, with two central processes and for one tenant a sidecar."""
    async with ScriptedHandler() as handler:
        both = settlement(processes, redis_url), settlement(processes, redis_url)
        worker = settlement(processes, redis_url, TENANT=NAMES[0], PEER=PEER, HANDLER_URL=handler.url)
        worker.wait_for('"working"')
        await wait_until(lambda: divided(*both), 30.0)
        with watching(redis_url) as seen:
            await wait_until(Calm(seen), 30.0)
            seen.clear()
            seconds = QUIET_S + 2.0
            began = time.monotonic()
            await wait_until(lambda: time.monotonic() > began + seconds, 2 * seconds, every=0.2)
            commands = list(seen)
    for name in NAMES:
        asked = [text for text in commands if f"{{{name}}}" in text or text.endswith(f" {name}")]
        assert 1 <= len(asked) <= seconds, (name, asked)
    assert len(commands) <= len(NAMES) * seconds, "with what the processes ask for themselves"


class Calm:
    """Whether nothing was asked about any tenant for a second, but for the reading of outboxes."""

    def __init__(self, seen: list[str]) -> None:
        self._seen, self._count, self._since = seen, -1, 0.0

    def __call__(self) -> bool:
        count = sum("lg:{" in text and not text.startswith("XREADGROUP") for text in self._seen)
        if count != self._count:
            self._count, self._since = count, time.monotonic()
        return time.monotonic() > self._since + 1.0
