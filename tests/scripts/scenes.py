"""Situations that script tests start from, and one call of every verb, arranged so that nothing speaks
against it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from unittest.mock import patch as patched

import msgspec

from shared.domain.decide import BranchChange, Change
from shared.domain.decide.change import Words
from shared.domain.guard import TimeGuard
from shared.domain.records import Answer, Branch, CommandError, Decision, Fact, Operation, Outcome, encode
from shared.store.codes import Code
from shared.store.replies import NEXT_TURN, Grant, NewOperation, NewSession, Reply, SessionRecord
from tests.support.world import DIGEST, World

RESULT = Answer(result=msgspec.Raw(b'{"value":3}'))
OTHER_RESULT = Answer(result=msgspec.Raw(b'{"value":4}'))
AGAIN = Answer(result=msgspec.Raw(b'{"again":true}'))

Ended = Reply | Grant | Sequence[tuple[Code, int]]
Call = Callable[[], Awaitable[Ended]]


def code_of(outcome: Ended) -> Code:
    """The code a call ended with; of a renewal that of its only lease."""
    if isinstance(outcome, Grant):
        return Code.OK
    if isinstance(outcome, Reply):
        return outcome.code
    ((code, _),) = outcome
    return code


def any_time(world: World) -> TimeGuard:
    """A guard that ends at the world's bound, also where a guard would refuse that itself."""

    class Unchecked(msgspec.Struct):
        not_before_ms: int
        not_after_ms: int

    return cast("TimeGuard", Unchecked(0, world.clock.bound))


class _NotSent(Exception):
    pass


async def intercepted(world: World, call: Call) -> tuple[str, Sequence[bytes], Sequence[Any]]:
    """Script, keys and arguments of a call that is not sent."""
    sent: list[tuple[str, Sequence[bytes], Sequence[Any]]] = []

    async def run(name: str, keys: Sequence[bytes], args: Sequence[Any], *_: Any) -> Reply:
        sent.append((name, keys, args))
        raise _NotSent

    with patched.object(world.store, "run", run), suppress(_NotSent):
        await call()
    (found,) = sent
    return found


@asynccontextmanager
async def unchanged(world: World) -> AsyncIterator[None]:
    """Whatever happens inside leaves every byte of the tenant as it was (RT-STORE-04, RT-GUARD-08)."""
    before = await world.dump()
    yield
    assert await world.dump() == before


async def meta(world: World, **fields: Any) -> None:
    """Overwrite fields of the tenant's meta."""
    await world.connection.call("HSET", world.keys.meta, *[v for pair in fields.items() for v in pair])


async def patch(world: World, new: NewOperation, **fields: Any) -> None:
    """Overwrite fields of an operation's record."""
    key = world.keys.op(new.operation_id)
    await world.connection.call("HSET", key, *[v for pair in fields.items() for v in pair])


async def branch_of(world: World, new: NewOperation, index: int = 0) -> Branch:
    words = await world.connection.call("HGET", world.keys.op(new.operation_id), f"b:{index}")
    return Branch.parse(words.decode())


async def reword(world: World, new: NewOperation, **words: Any) -> None:
    """Overwrite words of an operation's first branch, past every rule."""
    changed = msgspec.structs.replace(await branch_of(world, new), **words)
    await patch(world, new, **{"b:0": changed.words()})


async def offered(world: World, command_id: str = "c1", **changes: Any) -> NewOperation:
    """A command that waits to be claimed by ``alfa``."""
    await world.open()
    new = world.command(command_id, **changes)
    assert (await world.admit(new)).code is Code.OK
    return new


async def held(
    world: World, holder: str = "h1", *, open_gate: bool = True, **changes: Any
) -> tuple[NewOperation, Grant]:
    """A command under a lease of 1000 ms."""
    new = await offered(world, **changes)
    return new, await world.granted(new, holder, open_gate=open_gate)


async def answered(world: World, answer: Answer = RESULT) -> tuple[NewOperation, Grant]:
    """A command whose answer is stored and not yet folded."""
    new, grant = await held(world)
    assert (await world.answer(grant.lease, answer)).code is Code.OK
    return new, grant


async def settled(world: World) -> tuple[NewOperation, Grant]:
    """A command that was answered and completed."""
    new, grant = await answered(world)
    reply = await world.decide(new, grant.granted_ms)
    assert reply is not None
    assert reply.code is Code.OK
    return new, grant


async def outbox_ids(world: World, peer: str = "alfa") -> list[str]:
    """Entries in a peer's outbox."""
    entries = await world.connection.call("XRANGE", world.keys.outbox(peer), "-", "+")
    return [entry[0].decode() for entry in entries]


async def outcomes(world: World, session_id: str = "s1") -> list[bytes]:
    """Payloads of every outcome fact of a session, after checking that its facts are contiguous."""
    page = await world.reads.page(session_id, 0, 1000, world.revisions)
    assert page is not None
    assert [fact.sequence for fact in page.facts] == list(range(1, page.head + 1))
    return [fact.payload for fact in page.facts if fact.kind == "outcome"]


def terminal_change(op: Operation, status: str = "failure", **changes: Any) -> Change:
    """A closure as bare as it can be, guarded by ``same``."""
    outcome = Outcome("failed", None, CommandError("test", "a test", retryable=False))
    values: dict[str, Any] = {
        "phase": "settled",
        "decision": Decision("failed", "test", "complete"),
        "facts": (Fact("outcome", op.admission.command_id, encode(outcome)),),
        "reservation": "replayable",
        "branches": (BranchChange(0, "same", Words(op.branches[0]).ended(status)),),
    }
    return Change(**{**values, **changes})


# One call of every verb: each arranges what the call needs and gives the call; a second may end otherwise.


async def _admit(world: World) -> Call:
    await world.open()
    return lambda: world.store.admit(world.command(), world.revisions, any_time(world))


async def _lookup(world: World) -> Call:
    new = await offered(world)
    return lambda: world.store.lookup(new.operation_id, new.intent, "s1", world.revisions)


async def _open_session(world: World) -> Call:
    new = NewSession("s9", "a1", "urn:x:p", "1", DIGEST, "alice", b"{}")
    return lambda: world.store.open_session(new, world.revisions, any_time(world))


async def _claim(world: World) -> Call:
    new = await offered(world)
    return lambda: world.claim(new, "h1")


async def _open_gate(world: World) -> Call:
    _, grant = await held(world, open_gate=False)
    return lambda: world.store.open_gate(grant.lease, world.revisions)


async def _renew(world: World) -> Call:
    _, grant = await held(world)
    return lambda: world.store.renew([grant.lease], 1000, world.revisions)


async def _release(world: World) -> Call:
    _, grant = await held(world)
    return lambda: world.store.release(grant.lease, world.revisions)


async def _answer(world: World) -> Call:
    _, grant = await held(world)
    return lambda: world.answer(grant.lease, RESULT)


async def _replace(world: World) -> Call:
    new = await offered(world)
    op = await world.load(new)
    return lambda: world.commit(op, terminal_change(op))


async def _close(world: World) -> Call:
    await world.open()
    return lambda: world.store.close_session("s1", world.revisions)


async def _turn(world: World) -> Call:
    first, _ = await answered(world)
    second = world.command("c2")
    await world.admit(second)
    await world.decide(first, 0)
    following = await world.load(second)
    return lambda: world.store.turn(
        "s1", world.revisions, busy=NEXT_TURN, following=following, claim_timeout_ms=1000
    )


async def _purge(world: World) -> Call:
    new, _ = await settled(world)
    await world.store.close_session("s1", world.revisions)
    return lambda: world.store.purge("s1", [new.operation_id], True, world.revisions)


async def _cursor(world: World) -> Call:
    await offered(world)
    return lambda: world.store.put_cursor("s1", "alice/laptop", 1, world.revisions)


CALLS: dict[str, Callable[[World], Awaitable[Call]]] = {
    "admit": _admit,
    "lookup": _lookup,
    "open_session": _open_session,
    "claim": _claim,
    "open_gate": _open_gate,
    "renew": _renew,
    "release": _release,
    "answer": _answer,
    "replace": _replace,
    "close": _close,
    "turn": _turn,
    "purge": _purge,
    "cursor": _cursor,
}
DONE = {"lookup": Code.DUPLICATE, "renew": Code.RENEWED}
"""What a call ends with when nothing speaks against it, where that is not OK."""


async def session_of(world: World, session_id: str = "s1") -> SessionRecord:
    """The session's record."""
    session = await world.reads.session(session_id, world.revisions)
    assert session is not None
    return session
