"""The judge itself: every kind of broken promise is told, and a sound system has none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.faults.audit import Audit
from tests.faults.client import Client, Command, Reply
from tests.faults.contracts import SERIAL
from tests.faults.ledger import Entry
from tests.faults.system import System
from tests.faults.worker import Worker

PAID, REFUSED = Command("paid", "s1", "pay", 3), Command("refused", "s1", "pay", 4, refuse=True)


def _effect(system: System, command: Command, **changes: str) -> None:
    """Write an effect into the ledger that nobody asked for."""
    called = system.ledger.of("called", command.id)[0]
    lease, key = changes.get("lease", called.lease), changes.get("effect_key", called.effect_key)
    system.ledger.write(
        Entry("effect", command.id, command.kind, called.operation_id, called.attempt, lease, key)
    )


def _fact(system: System, kind: str, payload: str) -> None:
    """Write another fact about the paid command behind the head of the session."""
    head = int(system.session("s1")["head"]) + 1
    fields = {"k": kind, "c": PAID.id, "p": payload, "t": 1}
    system.raw.xadd(system.keys.updates("s1"), fields, id=f"{head}-0")  # type: ignore[arg-type]
    system.raw.hset(system.keys.session("s1"), "head", head)


FAILED = '{"status":"failed","output":null,"error":{"code":"x","message":"","retryable":false}}'
TAMPERINGS: dict[str, Callable[[System], object]] = {
    "2 effects, outcome completed": lambda s: _effect(s, PAID),
    "1 effects, outcome failed": lambda s: _effect(s, REFUSED),
    "different effect keys": lambda s: _effect(s, REFUSED, effect_key="other"),
    "0 effects, outcome completed": lambda s: s.ledger.path.write_text(""),
    "used for two calls": lambda s: s.ledger.write(s.ledger.of("called", PAID.id)[0]),
    "was dispatched and is not recorded": lambda s: s.ledger.write(
        Entry("called", "unknown", "pay", "op", 1, "1-1-x", "k")
    ),
    "clients were told": lambda s: s.journal.answered(Reply(PAID.id, 200, "duplicate", 2)),
    "its facts are": lambda s: _fact(s, "outcome", FAILED),
    "does not follow": lambda s: _fact(
        s, "application", '{"name":"fault.added","data":{"id":"paid","value":9}}'
    ),
    "outcome read": lambda s: s.raw.hset(s.keys.op(s.operation_id(PAID.id)), "outcome_seq", 1),
    "the record says": lambda s: s.raw.hset(s.keys.op(s.operation_id(PAID.id)), "phase", "active"),
    "an answer left": lambda s: s.raw.hset(s.keys.op(s.operation_id(PAID.id)), "r:0", "1 {}"),
    "of completed commands": lambda s: s.raw.hset(s.keys.session("s1"), "state", '{"value":4}'),
    "not contiguous": lambda s: s.raw.xdel(s.keys.updates("s1"), "2-0"),
    "not at rest": lambda s: s.raw.hset(s.keys.session("s1"), "busy", s.operation_id(PAID.id)),
    "operations are counted": lambda s: s.raw.hset(s.keys.meta, "usage", "9 9 9 9 9"),
    "parked": lambda s: s.raw.hset(s.keys.parked, "op", "{}"),
}


async def _ended(system: System, client: Client) -> None:
    async with Worker(system.ledger) as worker:
        _, sidecar = await asyncio.gather(system.door(), system.sidecar(worker.url))
        await client.open("s1", SERIAL)
        for command in (PAID, REFUSED):
            await client.submit(command)
            await client.settled(command)
        await Audit.of(system, client)
        # Nobody may repair what is tampered with below.
        sidecar.kill()


async def test_every_kind_of_broken_promise_is_told(system: System) -> None:
    async with system.client() as client:
        await _ended(system, client)
        sound = {key: system.raw.dump(key) for key in system.raw.keys("lg:{*")}
        ledger, replies = system.ledger.path.read_bytes(), list(system.journal.replies)
        for told, tamper in TAMPERINGS.items():
            tamper(system)
            with pytest.raises(AssertionError, match=told):
                await Audit.of(system, client, within_s=5.0)
            system.raw.delete(*system.raw.keys("lg:{*"))
            for key, value in sound.items():
                system.raw.restore(key, 0, value)  # type: ignore[arg-type]
            system.ledger.path.write_bytes(ledger)
            system.journal.replies[:] = replies
        await Audit.of(system, client)
