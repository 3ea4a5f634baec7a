"""Real sidecars and central processes, stopped, killed and resumed; a ledger outside judges what was done."""

from __future__ import annotations

import importlib.resources
import json
import random
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from shared.domain.contract import Contract, parse_bundle
from shared.domain.errors import Unavailable
from shared.store.acl import Role
from shared.store.embedded import EmbeddedStore
from tests.settlement.host import TENANT, Host, contract
from tests.support import acl
from tests.support.polling import wait_until
from tests.support.processes import Process, Processes

LEASE = {"leaseMs": 1_500, "renewMs": 200, "claimTimeoutMs": 1_000, "maxClaims": 3}


def example(name: str, interaction: str, **terms: Any) -> Contract:
    """A shipped bundle with leases short enough for a test."""
    source = importlib.resources.files("settlement_svc.examples.bundles").joinpath(name).read_text()
    document = yaml.safe_load(source)
    document["interactions"][interaction] |= {"lease": LEASE, **terms}
    return parse_bundle(json.dumps(document).encode())


class Ledger:
    """What the example handlers did, as their file says."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def handler(processes: Processes, name: str, *options: str) -> str:
    """Start an example handler; gives its URL."""
    started = processes.python("-m", f"settlement_svc.examples.{name}", *options)
    return started.wait_for(r"listening on (http://\S+)").group(1)


def settlement(processes: Processes, store_url: str, **settings: object) -> Process:
    """Start a settlement process on free ports."""
    url = acl.introduced(store_url, Role.SIDECAR if "PEER" in settings else Role.SETTLEMENT, TENANT)
    values = {"REDIS_URL": url, "PORT": 0, "METRICS_PORT": "off", **settings}
    if word := acl.declared():
        values["DECLARED_DURABILITY"] = word
    return processes.python("-m", "settlement_svc", env={f"LOCKGATE_{k}": str(v) for k, v in values.items()})


def sidecar(processes: Processes, store_url: str, peer: str, url: str, **settings: object) -> Process:
    """Start a sidecar and wait until it reads."""
    started = settlement(processes, store_url, TENANT=TENANT, PEER=peer, HANDLER_URL=url, **settings)
    started.wait_for('"working"')
    return started


def port_of(process: Process) -> int:
    line = next(line for line in process.output.splitlines() if '"listening"' in line)
    return int(json.loads(line)["port"])


@pytest.mark.case(40)
@pytest.mark.requirement("RT-OWN-02", "RT-OWN-06", "RT-OWN-08", "DASP-CORE-006b")
async def test_a_stopped_sidecar_that_goes_on_after_its_lease_finishes_nothing(
    redis_url: str, processes: Processes, ledger: Ledger
) -> None:
    terms = example("counter.yaml", "add")
    async with Host.create(redis_url, terms, peers=("counter",)) as host:
        url = handler(processes, "counter", "--ledger", str(ledger.path), "--delay-ms", "300")
        first = sidecar(processes, redis_url, "counter", url)
        await host.open()
        await host.submit("c1", {"amount": 3}, name="counter.add")
        await wait_until(lambda: ledger.lines)
        first.pause()
        second = sidecar(processes, redis_url, "counter", url)
        assert (await host.outcome("c1"))["output"] == {"value": 3}
        settled = await host.operation("c1")

        first.resume()
        first.wait_for('"answer refused"|"lease lost"')
        assert await host.operation("c1") == settled
        assert [fact.kind for fact in await host.facts()] == ["accepted", "application", "outcome"]
        fences = [int(line["lease"].split("-")[1]) for line in ledger.lines]
        assert [line["attempt"] for line in ledger.lines] == [1, 2]
        assert fences[0] < fences[1]
        # The one that was stopped is as good as new.
        second.terminate()
        assert second.wait() == 0
        await host.submit("c2", {"amount": 4}, name="counter.add")
        assert (await host.outcome("c2"))["output"] == {"value": 7}


@pytest.mark.requirement("RT-DUR-06", "DASP-CORE-005a", "RT-OWN-08")
async def test_a_request_is_acknowledged_when_its_answer_is_stored_and_not_before(
    redis_url: str, processes: Processes, ledger: Ledger, raw: Any
) -> None:
    terms = example("counter.yaml", "add")
    async with Host.create(redis_url, terms, peers=("counter",)) as host:
        url = handler(processes, "counter", "--ledger", str(ledger.path), "--delay-ms", "400")
        killed = sidecar(processes, redis_url, "counter", url)
        await host.open()
        await host.submit("c1", {"amount": 3}, name="counter.add")
        stream = host.handle.keys.outbox("counter")
        await wait_until(lambda: ledger.lines)
        assert (raw.xlen(stream), raw.xpending(stream, "work")["pending"]) == (1, 1)
        killed.kill()
        # Nobody took the request off while its answer was not stored: another one is given it.
        assert raw.xlen(stream) == 1
        sidecar(processes, redis_url, "counter", url)
        assert (await host.outcome("c1"))["output"] == {"value": 3}
        assert (raw.xlen(stream), raw.xpending(stream, "work")["pending"]) == (0, 0)
        assert [line["attempt"] for line in ledger.lines] == [1, 2]


@pytest.mark.case(61, 62)
@pytest.mark.requirement("DASP-CORE-007b", "DASP-CORE-007c")
async def test_unsafe_work_whose_sidecar_died_after_the_effect_is_uncertain_and_happens_once(
    redis_url: str, processes: Processes, ledger: Ledger
) -> None:
    terms = example("transfer.yaml", "send")
    async with Host.create(redis_url, terms, peers=("bank",)) as host:
        url = handler(processes, "transfer", "--ledger", str(ledger.path), "--delay-ms", "300")
        killed = sidecar(processes, redis_url, "bank", url)
        await host.open()
        await host.submit("c1", {"to": "bob", "cents": 100}, name="transfer.send")
        await wait_until(lambda: ledger.lines)
        killed.kill()
        sidecar(processes, redis_url, "bank", url)
        outcome = await host.outcome("c1")
        assert (outcome["status"], outcome["error"]["retryable"]) == ("uncertain", False)
        # The session goes on, and the first transfer stays what it is.
        await host.submit("c2", {"to": "eve", "cents": 5}, name="transfer.send")
        assert (await host.outcome("c2"))["output"]["status"] == "sent"
        assert [(line["to"], line["attempt"]) for line in ledger.lines] == [("bob", 1), ("eve", 1)]
        assert await host.outcomes("c1") == [outcome]


@pytest.mark.requirement("DASP-CORE-007d")
async def test_unsafe_work_that_was_provably_not_begun_is_started_from_its_admission(
    redis_url: str, processes: Processes, ledger: Ledger, raw: Any
) -> None:
    """The entry was handed to a process that died before it claimed anything."""
    terms = example("transfer.yaml", "send")
    async with Host.create(redis_url, terms, peers=("bank",)) as host:
        await host.open()
        await host.submit("c1", {"to": "bob", "cents": 100}, name="transfer.send")
        stream = host.handle.keys.outbox("bank")
        assert raw.xreadgroup("work", "dead", {stream: ">"}, count=1)
        url = handler(processes, "transfer", "--ledger", str(ledger.path))
        sidecar(processes, redis_url, "bank", url)
        assert (await host.outcome("c1"))["status"] == "completed"
        assert [line["attempt"] for line in ledger.lines] == [1]


async def test_sigterm_lets_work_end_and_leaves_no_reader_behind(
    redis_url: str, processes: Processes, ledger: Ledger, raw: Any
) -> None:
    terms = example("transfer.yaml", "send")
    async with Host.create(redis_url, terms, peers=("bank",)) as host:
        url = handler(processes, "transfer", "--ledger", str(ledger.path), "--delay-ms", "400")
        ending = sidecar(processes, redis_url, "bank", url)
        await host.open()
        await host.submit("c1", {"to": "bob", "cents": 100}, name="transfer.send")
        await wait_until(lambda: ledger.lines)
        ending.terminate()
        assert ending.wait() == 0
        assert (await host.outcome("c1"))["status"] == "completed"
        assert raw.xinfo_consumers(host.handle.keys.outbox("bank"), "work") == []


async def test_what_sigterm_cannot_wait_for_is_decided_at_once(
    redis_url: str, processes: Processes, ledger: Ledger
) -> None:
    terms = example("transfer.yaml", "send", lease={"leaseMs": 60_000, "renewMs": 10_000})
    async with Host.create(redis_url, terms, peers=("bank",)) as host:
        url = handler(processes, "transfer", "--ledger", str(ledger.path), "--delay-ms", "600000")
        ending = sidecar(processes, redis_url, "bank", url, DRAIN_SECONDS=0)
        await host.open()
        await host.submit("c1", {"to": "bob", "cents": 100}, name="transfer.send")
        await wait_until(lambda: ledger.lines)
        ending.terminate()
        assert ending.wait() == 0
        assert (await host.outcome("c1"))["status"] == "uncertain"


@pytest.mark.case(54)
@pytest.mark.requirement("DASP-CORE-006a", "DASP-CORE-006c")
async def test_a_central_process_killed_again_and_again_settles_everything_once(
    redis_url: str, processes: Processes
) -> None:
    """Every record and its terminal fact agree, however often the process that wrote them died."""
    chance = random.Random(7)
    terms = contract(execution="concurrent", effects="unsafe", timeout_ms=60_000)
    central = settlement(processes, redis_url)
    async with Host.create(redis_url, terms) as host:
        await host.open()
        numbers = range(60)
        for number in numbers:
            operation = await host.submit(f"c{number}", timeout_ms=chance.randrange(200, 2_500))
            if number % 2:
                await host.grant(operation, lease_ms=chance.randrange(100, 2_000))
        for _ in range(3):
            central.wait_for('"settled"')
            central.kill()
            central = settlement(processes, redis_url)
        for number in numbers:
            outcome = await host.outcome(f"c{number}")
            op = await host.operation(f"c{number}")
            assert op.decision is not None
            assert outcome["status"] == ("uncertain" if number % 2 else "failed")
            assert outcome["error"]["code"] == op.decision.reason
            assert op.reservation.startswith("quarantined" if number % 2 else "replayable")
        facts = await host.facts()
        terminal = [fact.command_id for fact in facts if fact.kind == "outcome"]
        assert sorted(terminal) == sorted(f"c{number}" for number in numbers)
        assert {
            (await host.operation(f.command_id)).outcome_sequence for f in facts if f.kind == "outcome"
        } == {fact.sequence for fact in facts if fact.kind == "outcome"}


@pytest.mark.requirement("DASP-CORE-005a")
async def test_a_sidecar_goes_on_when_a_killed_store_is_back(
    own_store: EmbeddedStore, processes: Processes, ledger: Ledger
) -> None:
    terms = example("counter.yaml", "add", timeoutMs=60_000)
    async with Host.create(own_store.url, terms, peers=("counter",)) as host:
        url = handler(processes, "counter", "--ledger", str(ledger.path))
        working = sidecar(processes, own_store.url, "counter", url)
        await host.open()
        await host.submit("c1", {"amount": 1}, name="counter.add")
        assert (await host.outcome("c1"))["output"] == {"value": 1}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(working)}") as health:
            own_store.kill()
            await wait_until(lambda: _answers(health, 503))
            assert (await health.get("/healthz")).status_code == 200
            own_store.start()
            await wait_until(lambda: _answers(health, 200))
        await wait_until(lambda: _submitted(host))
        assert (await host.outcome("c2"))["output"] == {"value": 3}
        assert working.running


async def _answers(health: httpx.AsyncClient, status: int) -> bool:
    return (await health.get("/readyz")).status_code == status


async def _submitted(host: Host) -> bool:
    try:
        await host.runtime.refresh()
        await host.submit("c2", {"amount": 2}, name="counter.add")
    except Unavailable:
        return False
    return True


async def test_health_says_why_a_sidecar_takes_no_work(redis_url: str, processes: Processes) -> None:
    started = settlement(
        processes, redis_url, TENANT=TENANT, PEER="worker", HANDLER_URL="http://127.0.0.1:1/", METRICS_PORT=0
    )
    started.wait_for('"listening"')
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(started)}") as health:
        assert (await health.get("/healthz")).json() == {"status": "ok"}
        response = await health.get("/readyz")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {"kind": "unavailable", "description": f"tenant {TENANT} is not available"}
        async with Host.create(redis_url, contract(), peers=("other",)):
            await wait_until(lambda: _says(health, "peer worker is not registered"))
        assert (await health.get("/metrics")).status_code == 404
        assert (await health.post("/healthz")).status_code == 405
    started.terminate()
    assert started.wait() == 0


async def _says(health: httpx.AsyncClient, text: str) -> bool:
    return text in (await health.get("/readyz")).text


async def test_metrics_beside_health_count_what_was_settled(redis_url: str, processes: Processes) -> None:
    terms = contract(execution="concurrent", timeout_ms=100)
    async with Host.create(redis_url, terms) as host:
        port = _free_port()
        central = settlement(processes, redis_url, PORT=port, METRICS_PORT=port, TENANT=TENANT)
        await host.open()
        await host.submit("c1")
        assert (await host.outcome("c1"))["error"]["code"] == "timeout"
        central.wait_for('"settled"')
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as health:
            assert (await health.get("/readyz")).json() == {"status": "ready"}
            page = (await health.get("/metrics")).text
        assert 'lockgate_settled_total{outcome="failed"} 1.0' in page


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ([], {"PEER": "worker"}, "a sidecar needs LOCKGATE_TENANT, LOCKGATE_PEER and LOCKGATE_HANDLER_URL"),
        ([], {"HANDLER_URL": "http://127.0.0.1:1/"}, "set LOCKGATE_PEER too"),
        ([], {"TENANT": "Not A Tenant"}, "LOCKGATE_TENANT: must be"),
        ([], {"TENANT": "acme", "PEER": "a b", "HANDLER_URL": "http://h/"}, "LOCKGATE_PEER: must be"),
        ([], {"TENANT": "acme", "PEER": "worker", "HANDLER_URL": "ftp://h/"}, "the handler URL must be"),
        ([], {"CONCURRENCY": "0"}, "LOCKGATE_CONCURRENCY must be"),
        ([], {"CONCURENCY": "4"}, "LOCKGATE_CONCURENCY is not a setting"),
        (["--role", "sidecar"], {}, "a sidecar needs a peer"),
        (
            ["--role", "central", "--peer", "worker", "--tenant", "acme", "--handler-url", "http://h/"],
            {},
            "has none",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    processes: Processes, arguments: list[str], settings: dict[str, str], said: str
) -> None:
    env = {
        f"LOCKGATE_{name}": value for name, value in {"REDIS_URL": "redis://127.0.0.1:1", **settings}.items()
    }
    refused = processes.python("-m", "settlement_svc", *arguments, env=env)
    assert refused.wait() == 2
    assert said in " ".join(refused.output.split())


async def test_a_taken_port_is_told_in_one_line(redis_url: str, processes: Processes) -> None:
    async with Host.create(redis_url, contract()):
        first = settlement(processes, redis_url)
        first.wait_for('"listening"')
        second = settlement(processes, redis_url, PORT=port_of(first))
        assert second.wait() == 1
        assert "cannot listen on 127.0.0.1" in second.output
        assert first.running
