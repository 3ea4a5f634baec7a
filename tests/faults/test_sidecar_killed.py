"""A sidecar killed with SIGKILL at every step of its life; the next one has only what the store holds.

Each test kills the sidecar at one step of a command in a serial session with a second command waiting behind
it. The next sidecar finishes both and is the victim of the next test. No central process helps. After the
last test everything is audited together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import pytest
import pytest_asyncio

from shared.store.embedded import EmbeddedStore
from tests.faults.audit import Audit
from tests.faults.client import Client, Command
from tests.faults.contracts import SERIAL
from tests.faults.system import System
from tests.faults.worker import Hold, Worker
from tests.support.breakpoints import BreakpointProxy, Stop
from tests.support.processes import Process, Processes

pytestmark = pytest.mark.asyncio(loop_scope="module")
LEASE_MS: Final = 800


class Crew:
    """One system for all tests of the file, with the one sidecar that runs at a time."""

    def __init__(self, system: System, proxy: BreakpointProxy, worker: Worker, client: Client) -> None:
        self.system = system
        self.proxy = proxy
        self.worker = worker
        self.client = client
        self._sidecar: Process | None = None

    async def sidecar(self) -> Process:
        """The sidecar that runs, a new one where the last was killed."""
        if self._sidecar is None:
            self._sidecar = await self.system.sidecar(self.worker.url, self.proxy.url)
        return self._sidecar

    def kill(self) -> None:
        """SIGKILL the sidecar."""
        assert self._sidecar is not None
        self._sidecar.kill()
        self._sidecar = None

    async def two_commands(self, session: str, kind: str) -> tuple[Command, Command]:
        """Submit a command and another one that waits for it."""
        await self.client.open(session, SERIAL)
        first, second = Command(f"{session}-1", session, kind, 3), Command(f"{session}-2", session, "safe", 5)
        for command in (first, second):
            assert (await self.client.once(command)).status == 201
        return first, second

    def offers(self, command: Command) -> int:
        """How many entries of the outbox ask for a command."""
        operation = self.system.operation_id(command.id)
        return sum(entry["o"] == operation for entry in self.system.outbox())

    def calls(self, command: Command) -> int:
        return len(self.system.ledger.of("called", command.id))

    def effects(self, command: Command) -> int:
        return len(self.system.ledger.of("effect", command.id))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def crew(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    processes = Processes(folder)
    async with AsyncExitStack() as stack:
        store = stack.enter_context(EmbeddedStore(folder / "store"))
        stack.callback(processes.end)
        system = await stack.enter_async_context(System.create(store, processes, folder, lease_ms=LEASE_MS))
        proxy = await stack.enter_async_context(BreakpointProxy(store.url))
        worker = await stack.enter_async_context(Worker(system.ledger))
        await system.door()
        client = await stack.enter_async_context(system.client())
        made = Crew(system, proxy, worker, client)
        yield made
        await made.sidecar()
        await Audit.of(system, client)
    assert not processes.end()


def _in_store(name: str, after: bool, *containing: bytes) -> Callable[[Crew, str], Stop]:
    """A stop at a command to the store about one operation."""

    def stop(crew: Crew, operation: str) -> Stop:
        place = crew.proxy.stop_after if after else crew.proxy.stop_before
        return place(name, operation.encode(), *containing)

    return stop


@dataclass(frozen=True)
class Step:
    """Where the sidecar dies, what the store must hold at that instant, and what must become of the command.

    ``again``: repeatable work is done once more by the next sidecar, and unsafe work ends uncertain.
    ``calls`` and ``effects`` are those of the dead sidecar's one attempt.
    """

    name: str
    stop: Callable[[Crew, str], Stop | Hold]
    gate: str
    again: bool
    calls: int
    effects: int
    offered: bool = True


STEPS: Final = (
    Step("before the claim", _in_store("lease claim", False), "closed", again=False, calls=0, effects=0),
    Step("after the claim", _in_store("lease claim", True), "open", again=True, calls=0, effects=0),
    Step(
        "in the handler",
        lambda crew, _: crew.worker.hold("before the effect"),
        "open",
        again=True,
        calls=1,
        effects=0,
    ),
    Step(
        "after the effect",
        lambda crew, _: crew.worker.hold("after the effect"),
        "open",
        again=True,
        calls=1,
        effects=1,
    ),
    Step("before the answer", _in_store("lease answer", False), "open", again=True, calls=1, effects=1),
    Step(
        "after the answer",
        _in_store("lease answer", True),
        "answered",
        again=False,
        calls=1,
        effects=1,
        offered=False,
    ),
    Step(
        "before the outcome",
        _in_store("replace", False, b"outcome"),
        "answered",
        again=False,
        calls=1,
        effects=1,
        offered=False,
    ),
    Step(
        "after the outcome",
        _in_store("replace", True, b"outcome"),
        "settled",
        again=False,
        calls=1,
        effects=1,
        offered=False,
    ),
)


async def _die_at(crew: Crew, step: Step, kind: str) -> tuple[Command, Command]:
    """Bring a sidecar to a step of a command's life, check the evidence and kill it."""
    await crew.sidecar()
    session = f"{step.name.replace(' ', '-')}-{kind}"
    await crew.client.open(session, SERIAL)
    stop = step.stop(crew, crew.system.operation_id(f"{session}-1"))
    first, second = await crew.two_commands(session, kind)
    await (stop.reached() if isinstance(stop, Stop) else stop.wait())
    record = crew.system.record(first.id)
    if step.gate == "settled":
        assert record["phase"] == "settled"
    else:
        assert record["phase"] in ("admitted", "active")
        assert record["b:0"].split(" ")[7] == step.gate
        assert await crew.client.outcome(first) is None, "nothing short of the outcome counts as one"
    assert ("r:0" in record) == (step.gate == "answered")
    assert crew.offers(first) == (1 if step.offered else 0)
    assert (crew.calls(first), crew.effects(first)) == (step.calls, step.effects)
    crew.kill()
    if isinstance(stop, Hold):
        stop.released.set()
    return first, second


@pytest.mark.requirement(
    "DASP-CORE-007a",
    "DASP-CORE-007b",
    "DASP-CORE-007d",
    "DASP-CORE-008a",
    "DASPX-08",
    "RT-DUR-06",
    "RT-DUR-07",
    "RT-DUR-09",
)
@pytest.mark.case(54, 62)
@pytest.mark.parametrize("kind", ["safe", "pay"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name.replace(" ", "-"))
async def test_the_next_sidecar_goes_on_from_what_the_store_proves(crew: Crew, step: Step, kind: str) -> None:
    first, second = await _die_at(crew, step, kind)
    await crew.sidecar()
    outcome = await crew.client.settled(first)
    if kind == "pay" and step.again:
        assert outcome.status == "uncertain"
        assert crew.calls(first) == step.calls, "unsafe work that may have begun is never begun again"
    else:
        assert outcome.status == "completed"
        assert crew.calls(first) == step.calls + (1 if step.again or not step.calls else 0)
    assert (await crew.client.settled(second)).status == "completed"


@pytest.mark.requirement("RT-STORE-16")
@pytest.mark.case(63)
async def test_recovery_asks_with_the_key_of_the_lost_attempt(crew: Crew) -> None:
    (step,) = [step for step in STEPS if step.name == "after the effect"]
    first, _ = await _die_at(crew, step, "keyed")
    await crew.sidecar()
    assert (await crew.client.settled(first)).status == "completed"
    assert len({entry.effect_key for entry in crew.system.ledger.of("called", first.id)}) == 1
    assert (crew.calls(first), crew.effects(first)) == (2, 1)


@pytest.mark.requirement("RT-OUT-02", "DASP-CORE-007d", "DASPX-08")
async def test_a_command_whose_turn_was_not_given_yet_is_dispatched_once(crew: Crew) -> None:
    await crew.sidecar()
    second = Command("untold-2", "untold", "pay", 5)
    stop = crew.proxy.stop_before("session turn", crew.system.operation_id(second.id).encode())
    await crew.client.open("untold", SERIAL)
    first = Command("untold-1", "untold", "safe", 3)
    # Answered and not settled, the first keeps its seat however long the second takes to be admitted.
    ending = crew.proxy.stop_before("replace", crew.system.operation_id(first.id).encode(), b"outcome")
    await crew.client.submit(first)
    await ending.reached()
    await crew.client.submit(second)
    ending.release()
    await stop.reached()
    assert crew.system.record(first.id)["phase"] == "settled"
    assert crew.system.record(second.id)["phase"] == "admitted"
    assert crew.offers(second) == 0
    crew.kill()
    await crew.sidecar()
    assert (await crew.client.settled(second)).status == "completed"
    assert (crew.calls(second), crew.effects(second)) == (1, 1)


@pytest.mark.requirement("RT-OUT-02", "RT-OUT-05", "RT-OUT-07")
async def test_an_offer_that_was_not_taken_comes_again_as_the_same_message(crew: Crew) -> None:
    await crew.sidecar()
    await crew.client.open("again", SERIAL)
    command = Command("again-1", "again", "pay")
    stop = crew.proxy.stop_before("lease claim", crew.system.operation_id(command.id).encode())
    await crew.client.submit(command)
    await stop.reached()
    (offer,) = [entry for entry in crew.system.outbox() if entry["o"] == crew.system.operation_id(command.id)]
    crew.kill()
    await crew.sidecar()
    # The dead sidecar was handed the first offer: what is claimed now was offered anew.
    claim = crew.proxy.stop_before("lease claim", crew.system.operation_id(command.id).encode())
    await claim.reached()
    (again,) = [entry for entry in crew.system.outbox() if entry["o"] == crew.system.operation_id(command.id)]
    assert again == offer
    attempt, _, fence = crew.system.record(command.id)["b:0"].split(" ")[2:5]
    assert attempt == "1"
    assert int(fence) > 1, "a new fence, and nothing else"
    claim.release()
    assert (await crew.client.settled(command)).status == "completed"
    assert [entry.attempt for entry in crew.system.ledger.of("called", command.id)] == [1]


@pytest.mark.requirement("RT-OUT-02", "RT-OUT-07")
async def test_a_retry_that_was_persisted_and_not_offered_yet_is_offered_once(crew: Crew) -> None:
    await crew.sidecar()
    await crew.client.open("retry", SERIAL)
    command = Command("retry-1", "retry", "safe")
    operation = crew.system.operation_id(command.id).encode()
    hold = crew.worker.hold("before the effect")
    hold.lose_answer = True
    await crew.client.submit(command)
    await hold.wait()
    # The loss is decided first; then the attempt it left is offered.
    persisted = crew.proxy.stop_after("replace", operation)
    hold.released.set()
    await persisted.reached()
    assert crew.system.record(command.id)["b:0"].split(" ")[2] == "2"
    assert crew.offers(command) == 0
    crew.kill()
    await crew.sidecar()
    assert (await crew.client.settled(command)).status == "completed"
    assert [entry.attempt for entry in crew.system.ledger.of("called", command.id)] == [1, 2]


@pytest.mark.requirement("DASP-CORE-007b")
@pytest.mark.case(61)
@pytest.mark.parametrize("kind", ["safe", "keyed", "pay"])
async def test_a_lost_answer_is_uncertain_unless_the_work_may_be_asked_again(crew: Crew, kind: str) -> None:
    await crew.sidecar()
    session = f"lost-{kind}"
    hold = crew.worker.hold("after the effect")
    hold.lose_answer = True
    first, second = await crew.two_commands(session, kind)
    await hold.wait()
    hold.released.set()
    outcome = await crew.client.settled(first)
    assert outcome.status == ("uncertain" if kind == "pay" else "completed")
    assert crew.calls(first) == (1 if kind == "pay" else 2)
    assert crew.effects(first) == (2 if kind == "safe" else 1)
    assert len({entry.effect_key for entry in crew.system.ledger.of("called", first.id)}) == 1
    assert (await crew.client.settled(second)).status == "completed"


@pytest.mark.requirement("DASP-CORE-007b")
@pytest.mark.parametrize("kind", ["safe", "pay"])
async def test_a_handler_that_died_before_the_request_came_is_one_whose_answer_was_lost(
    crew: Crew, kind: str
) -> None:
    sidecar = await crew.sidecar()
    told = len(sidecar.output)
    session = f"reset-{kind}"
    stop = crew.proxy.stop_after("lease claim", crew.system.operation_id(f"{session}-1").encode())
    first, second = await crew.two_commands(session, kind)
    await stop.reached()
    crew.worker.reset_connections()
    stop.release()
    assert (await crew.client.settled(first)).status == ("uncertain" if kind == "pay" else "completed")
    assert crew.effects(first) == (0 if kind == "pay" else 1)
    assert (await crew.client.settled(second)).status == "completed"
    assert "released" in sidecar.output[told:], "what is known to be lost is not waited for"
    assert "work failed" not in sidecar.output[told:]


LOST_REPLIES: Final = (
    # The command, arguments that tell it from others like it, what it means that its reply was lost.
    ("lease claim", (), "uncertain", 0),
    ("lease answer", (), "completed", 1),
    ("replace", (b"outcome",), "completed", 1),
    ("session turn", (), "completed", 1),
)


@pytest.mark.requirement("RT-STORE-16", "RT-DUR-08", "RT-DUR-10")
@pytest.mark.parametrize(("name", "containing", "status", "effects"), LOST_REPLIES)
async def test_a_store_reply_that_was_lost_is_looked_up_before_anything_follows(
    crew: Crew, name: str, containing: tuple[bytes, ...], status: str, effects: int
) -> None:
    await crew.sidecar()
    session = f"cut-{name.replace(' ', '-')}"
    about = f"{session}-2" if name == "session turn" else f"{session}-1"
    cut = crew.proxy.cut_after(name, crew.system.operation_id(about).encode(), *containing)
    first, second = await crew.two_commands(session, "pay")
    await cut.reached()
    outcome = await crew.client.settled(first)
    assert (outcome.status, crew.effects(first)) == (status, effects)
    assert crew.calls(first) == effects, "a grant that nobody heard of calls nobody"
    assert (await crew.client.settled(second)).status == "completed"
    assert crew.calls(second) == 1
