"""Random lives of commands on the real store against a model written from the requirement text."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import msgspec
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.domain.decide import Change
from shared.domain.records import Answer, Branch, Refusal
from shared.store.codes import Code
from shared.store.connection import Connection
from shared.store.reads import StoredFact, read_fact
from shared.store.replies import Claim, Grant, Reply, Revisions
from tests.decide.model import Command, Granted, Kind, Session, dishonest
from tests.decide.rights import without
from tests.scripts.scenes import AGAIN, RESULT, code_of
from tests.support.world import World

T = TypeVar("T")
ANSWERS: dict[Kind, Answer] = {
    "ok": RESULT,
    "again": AGAIN,
    "refused": Answer(refused=Refusal("refused-it", "no")),
}
TIMEOUT_MS = 6000
LEASE_MS = 1000
indexes = st.integers(min_value=0, max_value=99)
peers_ = st.sampled_from([("alfa",), ("alfa", "bravo")])
effects_ = st.sampled_from(["none", "idempotent", "fenced", "unsafe"])


class Life(RuleBasedStateMachine):
    """Every rule asks the store for one thing and compares its answer with what the model allows."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.sessions = [Session("s1", serial=True), Session("s2", serial=False)]
        self.epoch = 1
        self.denied: frozenset[str] = frozenset()
        self.world = self.do(lambda: self._create(url))
        self.now = self.do(self.world.start)
        for session in self.sessions:
            self.do(lambda s=session: self.world.open(s.session_id))  # type: ignore[misc]

    async def _create(self, url: str) -> World:
        self.connection = Connection(url)
        await self.connection.call("FLUSHALL")
        return await World.create(self.connection)

    def do(self, call: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await call()

        return self.runner.run(run())

    def teardown(self) -> None:
        self.do(self.connection.close)
        self.runner.close()

    # What there is to choose from

    @property
    def commands(self) -> list[Command]:
        return [command for session in self.sessions for command in session.commands]

    def pick(self, index: int) -> tuple[Session, Command]:
        command = self.commands[index % len(self.commands)]
        (session,) = [s for s in self.sessions if command in s.commands]
        return session, command

    def terms(self, command: Command) -> dict[str, Any]:
        return {"effects": command.effects, "max_attempts": 2, "max_claims": 2}

    # Rules

    @initialize(effects=st.lists(effects_, min_size=3, max_size=5))
    def some_work(self, effects: list[str]) -> None:
        for n, effect in enumerate(effects):
            self.admit(n % 2, effect, ("alfa", "bravo")[: 1 + n % 2])

    @precondition(lambda self: len(self.commands) < 7)
    @rule(index=st.integers(0, 1), effects=effects_, peers=peers_)
    def admit(self, index: int, effects: str, peers: tuple[str, ...]) -> None:
        session = self.sessions[index]
        kind = "serial" if session.serial else "concurrent"
        name = f"{session.session_id}-{len(session.commands)}"
        new = self.world.command(
            name, session_id=session.session_id, kind=kind, timeout_ms=TIMEOUT_MS, peers=peers
        )
        reply = self.do(lambda: self.world.admit(new))
        if session.phase == "open":
            assert reply.code is Code.OK
            command = Command(new, reply.number(0), self.now + TIMEOUT_MS, effects)
            assert reply.number(1) == command.deadline_ms
            session.commands.append(command)
        else:
            wanted = Code.SESSION_CLOSING if session.phase == "closing" else Code.NOT_FOUND
            assert reply.code is wanted

    @precondition(lambda self: self.commands)
    @rule(index=indexes, other=st.booleans())
    def repeat(self, index: int, other: bool) -> None:
        session, command = self.pick(index)
        new = command.new
        if other:
            kind = "serial" if session.serial else "concurrent"
            new = self.world.command(
                new.command_id, session_id=session.session_id, kind=kind, input_bytes=b"{}", timeout_ms=1
            )
        reply = self.do(lambda: self.world.admit(new))
        if session.phase == "closed":
            assert reply.code is Code.NOT_FOUND
        elif other or command.purged:
            assert (reply.code, reply.values) == (Code.CONFLICT, ())
        else:
            assert reply.code is Code.DUPLICATE
            assert int(reply.text(0).split(" ")[2]) == command.sequence

    @precondition(lambda self: self.commands)
    @rule(index=indexes, open_gate=st.booleans())
    def claim(self, index: int, open_gate: bool) -> None:
        session, command = self.pick(index)
        branch = self.branch(command)
        attempt = branch.attempt if branch is not None else 1
        peer = branch.peer if branch is not None else "alfa"
        holder = secrets.token_hex(4)
        wish = Claim(
            command.new.operation_id, 0, peer, attempt, holder, LEASE_MS, 2, open_gate, session.session_id
        )
        reply = self.do(lambda: self.world.store.claim(wish, self.world.revisions))
        offered = branch is not None and branch.outbox is not None and branch.holder is None
        free = offered and not command.settled and self.now < command.deadline_ms
        if isinstance(reply, Reply):
            assert not free, reply
            return
        self.granted(session, command, reply)
        command.grants.append(Granted(reply.lease, attempt, reply.until_ms, opened=open_gate))

    def granted(self, session: Session, command: Command, grant: Grant) -> None:
        """What must hold of every grant."""
        assert not command.settled
        assert self.now < command.deadline_ms
        assert (grant.granted_ms, grant.until_ms) == (self.now, self.now + LEASE_MS)
        fences = [int(g.lease.fence) for g in command.grants]
        assert int(grant.lease.fence) > max(fences, default=0)
        assert int(grant.lease.epoch) == self.epoch
        last = command.current
        if last is not None:
            assert last.until_ms <= self.now or last.answer == "again"
        if command.effects == "unsafe":
            assert not command.may_have_acted, "unsafe work is never given out again"
        if session.serial:
            assert session.first_unsettled() is command, "serial commands run in admission order"
            others = [other for other in session.commands if other is not command]
            assert not any(other.open_until(self.now) for other in others), "one command at a time"

    def usable(self, command: Command, grant: Granted) -> bool:
        """Whether the holder of this grant may still do something."""
        branch = self.branch(command)
        return (
            branch is not None
            and not command.settled
            and branch.holder == grant.lease.holder
            and grant.until_ms > self.now
            and self.now < command.deadline_ms
            and grant.answer is None
        )

    def some_grant(self, index: int, which: int) -> tuple[Command, Granted] | None:
        _, command = self.pick(index)
        if not command.grants:
            return None
        return command, command.grants[which % len(command.grants)]

    @precondition(lambda self: any(c.grants for c in self.commands))
    @rule(index=indexes, which=indexes)
    def open(self, index: int, which: int) -> None:
        found = self.some_grant(index, which)
        if found is not None:
            command, grant = found
            reply = self.do(lambda: self.world.store.open_gate(grant.lease, self.world.revisions))
            assert (reply.code is Code.OK) == (self.usable(command, grant) and not grant.opened), reply
            grant.opened = grant.opened or reply.code is Code.OK

    @precondition(lambda self: any(c.grants for c in self.commands))
    @rule(index=indexes, which=indexes)
    def renew(self, index: int, which: int) -> None:
        found = self.some_grant(index, which)
        if found is not None:
            command, grant = found
            ((code, until),) = self.do(
                lambda: self.world.store.renew([grant.lease], LEASE_MS, self.world.revisions)
            )
            assert (code is Code.RENEWED) == self.usable(command, grant), code
            if code is Code.RENEWED:
                assert until == self.now + LEASE_MS
                grant.until_ms = until

    @precondition(lambda self: any(c.grants for c in self.commands))
    @rule(index=indexes, which=indexes)
    def release(self, index: int, which: int) -> None:
        found = self.some_grant(index, which)
        if found is not None:
            command, grant = found
            reply = self.do(lambda: self.world.store.release(grant.lease, self.world.revisions))
            assert (reply.code is Code.OK) == self.usable(command, grant), reply
            if reply.code is Code.OK:
                grant.until_ms = self.now

    @precondition(lambda self: any(c.grants for c in self.commands))
    @rule(index=indexes, which=indexes, kind=st.sampled_from(list(ANSWERS)))
    def answer(self, index: int, which: int, kind: Kind) -> None:
        found = self.some_grant(index, which)
        if found is not None:
            command, grant = found
            branch = self.branch(command)
            mine = branch is not None and branch.holder == grant.lease.holder
            allowed = self.usable(command, grant) and grant.opened
            reply = self.do(lambda: self.world.answer(grant.lease, ANSWERS[kind]))
            assert (reply.code is Code.OK) == allowed, reply
            assert (reply.code is Code.DUPLICATE) == (mine and grant.answer == kind), reply
            assert (reply.code is Code.PROTOCOL_CONFLICT) == (mine and grant.answer not in (None, kind)), (
                reply
            )
            if reply.code is Code.OK:
                grant.answer = kind

    @rule(ms=st.sampled_from([1, 50, 200, 999, 1000, 1500]))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        self.do(lambda: self.world.at(self.now))

    @precondition(lambda self: self.commands)
    @rule(index=indexes, kind=st.sampled_from(["ok", "again", "refused", "silence", "silence"]))
    def work(self, index: int, kind: Any) -> None:
        """One worker that claims, opens and answers at once, or falls silent."""
        waiting = [n for n, command in enumerate(self.commands) if not command.settled]
        if not waiting:
            return
        index = waiting[index % len(waiting)]
        _, command = self.pick(index)
        before = len(command.grants)
        self.claim(index, True)
        if kind != "silence" and len(command.grants) > before:
            self.answer(index, before, kind)

    @precondition(lambda self: self.commands)
    @rule()
    def wake_up(self) -> None:
        """What the settling loop does: time goes on to the next wake-up, and all that is due is decided."""
        due = self.do(lambda: self.world.reads.due(2**53, 1000))
        later = [when for _, when in due if when > self.now]
        if later and all(when > self.now for _, when in due):
            self.time_passes(min(later) - self.now)
        for index, command in enumerate(self.commands):
            if not command.settled:
                self.settle(index, 0)
        if self.sessions[0].phase != "closed":
            self.turn()

    @precondition(lambda self: self.commands)
    @rule(index=indexes, ahead=st.sampled_from([0, 0, 0, 1, 5000]))
    def settle(self, index: int, ahead: int) -> None:
        """Decide by a clock that may be ahead: the store's own decides what is committed."""
        session, command = self.pick(index)
        if command.purged:
            return
        reply = self.do(
            lambda: self.world.decide(
                command.new,
                self.now + ahead,
                "due",
                rights=without(*self.denied),
                **self.terms(command),
            )
        )
        if reply is not None:
            assert reply.code in (Code.OK, Code.OUTSIDE_WINDOW, Code.ASSERTION, Code.INVALID), reply
            assert ahead or reply.code is Code.OK, reply
            self.learn(session, command)

    def learn(self, session: Session, command: Command) -> None:
        """A command that settled just now ended as the requirement text says."""
        op = self.do(lambda: self.world.load(command.new))
        if op.phase != "settled" or command.settled:
            return
        assert op.outcome_sequence is not None
        assert op.decision is not None
        sequence = op.outcome_sequence
        fact = self.do(lambda: self.world.reads.fact(session.session_id, sequence))
        assert fact is not None
        outcome = msgspec.json.decode(fact.payload)
        code = outcome["error"] and outcome["error"]["code"]
        denied = op.branches[0].peer in self.denied
        assert list(dishonest(command, outcome["status"], code, self.now, denied=denied)) == []
        assert (op.branches[0].status == "revoked") == (code == "revoked")
        assert (code == "session-closed") <= (session.phase == "closing")
        assert op.decision.at_ms == fact.at_ms == self.now
        assert (op.reservation == "quarantined") == (outcome["status"] == "uncertain")
        assert (op.decision.outcome == "success") == (outcome["status"] == "completed")
        command.outcome = fact.payload
        event(f"ended {outcome['status']}: {code}")

    @rule()
    def turn(self) -> None:
        session = self.sessions[0]
        record = self.do(lambda: self.world.reads.session("s1", self.world.revisions))
        assert record is not None
        queued = self.do(lambda: self.world.reads.queued("s1"))
        following = self.do(lambda: self.world.reads.operation(queued[0], "s1")) if queued else None
        reply = self.do(
            lambda: self.world.store.turn(
                "s1", self.world.revisions, busy=record.busy, following=following, claim_timeout_ms=1000
            )
        )
        if reply.text(0) == "dispatched":
            first = session.first_unsettled()
            assert following is not None
            assert first is not None
            assert first.new.operation_id == following.id
        else:
            assert reply.code in (
                Code.OK,
                Code.HELD,
                Code.SESSION_CLOSING,
                Code.OUTSIDE_WINDOW,
                Code.NOT_FOUND,
            )

    @precondition(lambda self: len(self.commands) > 4)
    @rule(index=st.integers(0, 1), really=st.sampled_from([False, False, True]))
    def close(self, index: int, really: bool) -> None:
        session = self.sessions[index]
        if not really:
            return
        reply = self.do(lambda: self.world.store.close_session(session.session_id, self.world.revisions))
        assert reply.code is (Code.NOT_FOUND if session.phase == "closed" else Code.OK)
        session.phase = "closed" if session.phase == "closed" else "closing"

    @precondition(lambda self: any(session.phase == "closing" for session in self.sessions))
    @rule(index=st.integers(0, 1), last=st.booleans())
    def purge(self, index: int, last: bool) -> None:
        session = self.sessions[index]
        ids = [command.new.operation_id for command in session.commands]
        reply = self.do(lambda: self.world.store.purge(session.session_id, ids, last, self.world.revisions))
        if session.phase == "closed":
            assert reply.code is Code.NOT_FOUND
            return
        done = session.phase == "closing" and all(command.settled for command in session.commands)
        assert (reply.code is Code.OK) == done, reply
        if done:
            session.phase = "closed" if last else "closing"
            for command in session.commands:
                command.purged = True

    @rule(denied=st.sampled_from([(), (), (), ("alfa",), ("bravo",), ("alfa", "bravo")]))
    def policy(self, denied: tuple[str, ...]) -> None:
        """Another policy: everybody has to decide under it, and open work is looked at once."""
        if self.denied == frozenset(denied):
            return
        self.denied = frozenset(denied)
        revision = self.do(lambda: self.connection.call("HINCRBY", self.world.keys.meta, "policy_rev", 1))
        stale, self.world.revisions = (
            self.world.revisions,
            msgspec.structs.replace(self.world.revisions, policy=str(revision)),
        )
        for index, command in enumerate(self.commands):
            if not command.settled:
                self.look_again(index, command, stale)

    def look_again(self, index: int, command: Command, stale: Revisions) -> None:
        """What was decided under the old policy is refused; what may not go on ends, whatever it was at."""
        op = self.do(lambda: self.world.load(command.new))
        change = Change(wake_at_ms=self.now)
        reply = self.do(lambda: self.world.store.replace(op, change, stale, 1))
        assert reply.code is Code.STALE_SNAPSHOT
        self.settle(index, 0)
        taken = op.branches[0].peer in self.denied and self.now < command.deadline_ms
        assert command.settled or not taken

    @rule(what=st.sampled_from(["scripts forgotten", "another epoch"]))
    def server(self, what: str) -> None:
        if what == "scripts forgotten":
            self.do(lambda: self.connection.call("SCRIPT", "FLUSH"))
        else:
            self.do(lambda: self.connection.call("HSET", self.world.keys.meta, "replid", "0" * 40))
            self.epoch += 1
            new = self.world.command("nowhere", session_id="s3")
            assert code_of(self.do(lambda: self.world.admit(new))) is Code.NOT_FOUND

    # What holds after every step

    def branch(self, command: Command) -> Branch | None:
        key = self.world.keys.op(command.new.operation_id)
        words = self.do(lambda: self.connection.call("HGET", key, "b:0"))
        return None if words is None else Branch.parse(words.decode())

    @invariant()
    def promises_hold(self) -> None:
        """One look at everything: all in one round trip, for there are thousands of steps."""
        k = self.world.keys
        looks: list[tuple[Any, ...]] = [("ZRANGE", k.due, 0, -1)]
        looks += [("XRANGE", k.outbox(peer), "-", "+") for peer in ("alfa", "bravo")]
        for session in self.sessions:
            looks.append(("HMGET", k.session(session.session_id), "head", "pending", "commands"))
            looks.append(("XRANGE", k.updates(session.session_id), "-", "+"))
        looks += [("HGET", k.op(command.new.operation_id), "b:0") for command in self.commands]
        due, alfa, bravo, *rest = self.do(lambda: self.connection.pipeline(*looks))
        for n, session in enumerate(self.sessions):
            if session.phase != "closed":
                self.facts_are_contiguous_and_final(
                    session, rest[2 * n], [read_fact(f) for f in rest[2 * n + 1]]
                )
            else:
                assert rest[2 * n + 1] == []
        offers = [bytes(entry[1][3]).decode() for entry in (*alfa, *bravo)]
        self.work_is_offered_once_and_wakes(offers, due, rest[4:])

    def facts_are_contiguous_and_final(self, session: Session, row: Any, facts: list[StoredFact]) -> None:
        assert [fact.sequence for fact in facts] == list(range(1, int(row[0]) + 1))
        assert [f.sequence for f in facts if f.kind == "accepted"] == [c.sequence for c in session.commands]
        ended = {f.command_id: f.payload for f in facts if f.kind == "outcome"}
        assert len(ended) == sum(fact.kind == "outcome" for fact in facts), "two outcomes of one command"
        assert ended == {c.new.command_id: c.outcome for c in session.commands if c.settled}
        pending = sum(not command.settled for command in session.commands)
        assert (int(row[1]), int(row[2])) == (pending, len(session.commands))

    def work_is_offered_once_and_wakes(self, offers: list[str], due: list[bytes], words: list[Any]) -> None:
        assert len(offers) == len(set(offers)), "one request at a time"
        for command, raw in zip(self.commands, words, strict=True):
            operation = command.new.operation_id
            assert (operation.encode() in due) == (not command.settled)
            if raw is None:
                assert command.purged
                continue
            branch = Branch.parse(raw.decode())
            assert branch.fence >= command.fence
            command.fence = branch.fence
            assert (operation in offers) == (branch.outbox is not None)
            assert branch.outbox is None or not command.settled


@pytest.mark.requirement(
    "RT-OWN-02",
    "RT-OWN-03",
    "RT-DEC-15",
    "RT-DEC-17",
    "RT-ATT-09",
    "RT-RES-11",
    "DASP-CORE-006a",
    "DASP-CORE-006b",
    "DASP-CORE-007b",
    "DASP-CORE-007c",
    "DASP-CORE-009a",
    "RT-STORE-13",
    "RT-ADM-35",
    "RT-AUTH-08",
)
@pytest.mark.case(54)
@pytest.mark.timeout(600)  # shrinking a failure takes its time
def test_no_life_of_commands_breaks_a_promise(redis_url: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        cast("type[Life]", lambda: Life(redis_url)),
        settings=settings(
            max_examples=30,
            stateful_step_count=70,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
