"""One typed method per atomic change: the only way the services alter what a tenant's store holds.

What every call has in common lives in :meth:`TenantStore.run`: the script cache, the clock sample in each
reply, an epoch that moved, a clock that stepped back a little, memory that is out. A reply that was lost is
*unknown* and raised as such; nothing here sends a script twice on its own, except where the first is known
not to have run (DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import lua
from shared.domain.decide import Change
from shared.domain.errors import Unavailable
from shared.domain.guard import TimeGuard
from shared.domain.ids import MessageKind, message_id
from shared.domain.records import Operation, encode
from shared.store.clock import SMALL_ROLLBACK_MS, StoreClock
from shared.store.codes import Code
from shared.store.connection import Connection, ReplyError, evalsha, evalsha_many
from shared.store.keys import Keys
from shared.store.replies import (
    NEXT_TURN,
    Claim,
    ClockRefusal,
    Grant,
    Lease,
    NewOperation,
    NewSession,
    OutOfMemory,
    Reply,
    Revisions,
    TenantLost,
)
from shared.store.wake import operation_topic, session_topic

Arg = bytes | str | int
TOMBSTONES_PER_CHUNK = 64
CLIENTS_PER_SESSION = 1000
_CONCERNS_ALL = frozenset({Code.AUTHORITY_LOST, Code.EPOCH_MOVED, Code.CLOCK_ROLLBACK, Code.OUTSIDE_WINDOW})


GUARD_KEYS = (b"lg:{-}:meta", b"lg:{-}:op:")
"""What :func:`missing_guard` reads: keys that no tenant can have."""
_NO_SCRIPT = "0" * 40


async def missing_guard(connection: Connection) -> str | None:
    """Why this store cannot judge a transition inside the commit, in words for an operator, or None.

    Nothing but a script that runs at the store proves it: a store without that may not serve (RT-GUARD-15,
    RT-STORE-17). Asks for a tenant that cannot exist and reads nothing else: users of different tenants share
    these keys, so none may write there. That scripts may also write shows by asking for one that nobody has.
    """
    try:
        await evalsha(connection, lua.load("lookup"), GUARD_KEYS, ["", "", ""], reads=True)
        await connection.call("EVALSHA", _NO_SCRIPT, 0)
    except ReplyError as error:
        if error.code == "NOSCRIPT":
            return None
        return f"the store does not run the scripts that guard every transition ({error.code})"
    return "the store runs a script that nobody has"


def _behind_ms(reply: Reply, not_before_ms: int) -> int:
    """How far the store's clock has yet to go: to its last committed time, or to the start of the request."""
    if reply.code is Code.CLOCK_ROLLBACK:
        return reply.number(0)
    before = reply.code is Code.OUTSIDE_WINDOW and reply.text(0) == "guard"
    return max(0, not_before_ms - reply.now_ms) if before else 0


class TenantStore:
    """The scripts of one tenant over one shared connection.

    ``on_epoch_moved`` decides whether a restarted server kept this tenant's data and raises its epoch; it
    raises TenantLost where it did not.
    """

    def __init__(
        self,
        tenant: str,
        connection: Connection,
        clock: StoreClock,
        on_epoch_moved: Callable[[TenantStore, str], Awaitable[None]],
        scripts: Mapping[str, lua.Script] | None = None,
    ) -> None:
        self.tenant = tenant
        self.keys = Keys(tenant)
        self.connection = connection
        self.clock = clock
        self._on_epoch_moved = on_epoch_moved
        self._scripts = scripts or {name: lua.load(name) for name in lua.NAMES}

    async def run(
        self, name: str, keys: Sequence[bytes], args: Sequence[Arg], authority: str, not_before_ms: int = 0
    ) -> Reply:
        """Run one script; resolve what concerns the store as a whole, return every other answer.

        Raises TenantLost, ClockRefusal, OutOfMemory, ReplyLost (outcome unknown) or StoreUnavailable (not
        sent).
        """
        waited = moved = 0
        while True:
            reply = await self._once(name, keys, args)
            if reply.code is Code.AUTHORITY_LOST:
                raise TenantLost("the tenant's store is not the one its authority was recorded in")
            if reply.code is Code.EPOCH_MOVED and moved < 2:
                moved += 1
                await self._on_epoch_moved(self, authority)
            elif waited < 3 and 0 < (behind := _behind_ms(reply, not_before_ms)) <= SMALL_ROLLBACK_MS:
                waited += 1
                await self.clock.wait_out(behind)
            elif reply.code is Code.CLOCK_ROLLBACK:
                raise ClockRefusal(
                    f"the store's clock stepped back {reply.number(0)} ms; refused until it has caught up"
                )
            elif reply.code is Code.EPOCH_MOVED:
                raise TenantLost("the store's replication id keeps changing")
            else:
                return reply

    async def _once(self, name: str, keys: Sequence[bytes], args: Sequence[Arg]) -> Reply:
        sent = self.clock.monotonic_ms()
        try:
            raw = await evalsha(self.connection, self._scripts[name], keys, args)
        except ReplyError as error:
            if error.code == "OOM":
                raise OutOfMemory("the store is out of memory and takes no new work") from error
            raise
        reply = Reply.of(raw)
        self.clock.observe(reply.now_ms, sent, self.clock.monotonic_ms())
        return reply

    def not_after(self, *bounds: int | None) -> int:
        """The upper bound of a transition that starts now: the given ones and what a jumping clock may not
        pass.

        Raises ClockRefusal while the store's clock is suspect: nothing time-driven may be granted then.
        """
        if self.clock.suspect:
            raise ClockRefusal(
                "the store's clock jumped ahead; refused until samples agree again or an operator accepts it"
            )
        return min([self.clock.not_after(), *(bound for bound in bounds if bound is not None)])

    async def admit(self, new: NewOperation, revisions: Revisions, guard: TimeGuard) -> Reply:
        """Create one operation whole, or learn what its key holds (RT-ADM-24, RT-GUARD-01)."""
        keys, args = self._admission(new, revisions, guard)
        return await self.run("admit", keys, args, revisions.authority, guard.not_before_ms)

    async def admit_many(
        self, news: Sequence[NewOperation], revisions: Revisions, guard: TimeGuard
    ) -> list[Reply | None]:
        """Admit several, in their order, a few in one write, each on its own merits.

        None stands for a member whose reply was lost or concerns the store as a whole: ask for it again by
        :meth:`admit`, which resolves or raises that; whatever happened, it admits at most once.
        """
        calls = [self._admission(new, revisions, guard) for new in news]
        sent = self.clock.monotonic_ms()
        try:
            ends = await evalsha_many(self.connection, self._scripts["admit"], calls)
        except Unavailable:
            return [None] * len(news)
        received = self.clock.monotonic_ms()
        replies: list[Reply | None] = []
        for end in ends:
            reply = None if isinstance(end, Unavailable) else Reply.of(end)
            if reply is not None:
                self.clock.observe(reply.now_ms, sent, received)
            concerns_all = reply is not None and reply.code in _CONCERNS_ALL
            replies.append(None if concerns_all else reply)
        return replies

    def _admission(
        self, new: NewOperation, revisions: Revisions, guard: TimeGuard
    ) -> tuple[list[bytes], list[Arg]]:
        k = self.keys
        keys = [k.meta, k.op(new.operation_id), k.due]
        if new.session_id:
            keys += [k.session(new.session_id), k.updates(new.session_id), k.queue(new.session_id)]
        wake = session_topic(new.session_id) if new.session_id else operation_topic(new.operation_id)
        args: list[Arg] = [
            revisions.authority,
            revisions.policy,
            revisions.directory,
            guard.not_before_ms,
            guard.not_after_ms,
            new.kind[0],
            new.intent,
            new.timeout_ms,
            new.claim_timeout_ms,
            new.admission,
            new.input,
            wake,
            new.operation_id,
            new.session_id,
            new.command_id,
            new.accepted,
            new.reserve,
            len(new.offers),
        ]
        for offer in new.offers:
            keys.append(k.outbox(offer.peer))
            args += [offer.peer, offer.message_id]
        return keys, args

    async def lookup(self, operation_id: str, intent: bytes, session_id: str, revisions: Revisions) -> Reply:
        """What :meth:`admit` would answer from the record alone; needs no clock and no memory."""
        keys = [self.keys.meta, self.keys.op(operation_id)]
        if session_id:
            keys.append(self.keys.session(session_id))
        return await self.run(
            "lookup", keys, [revisions.authority, revisions.policy, intent], revisions.authority
        )

    async def open_session(self, new: NewSession, revisions: Revisions, guard: TimeGuard) -> Reply:
        """Create a session once, or learn the one that its id names."""
        args: list[Arg] = [
            revisions.authority,
            revisions.policy,
            guard.not_before_ms,
            guard.not_after_ms,
            new.actor_id,
            new.profile_id,
            new.profile_version,
            new.digest,
            new.owner,
            new.state,
        ]
        return await self.run(
            "session_open",
            [self.keys.meta, self.keys.session(new.session_id)],
            args,
            revisions.authority,
            guard.not_before_ms,
        )

    async def claim(
        self, claim: Claim, revisions: Revisions, decision_expires_ms: int | None = None
    ) -> Grant | Reply:
        """Ask for a lease; the holder of a live one gets the same grant again (RT-OWN-01, RT-OWN-10)."""
        keys = self._lease_keys(claim.operation_id, claim.peer)
        if claim.session_id:
            keys.append(self.keys.session(claim.session_id))
        args: list[Arg] = [
            *self._lease_head("claim", revisions, self.not_after(decision_expires_ms), claim.operation_id),
            claim.branch,
            claim.peer,
            claim.attempt,
            claim.holder,
            claim.lease_ms,
            1 if claim.open_gate else 0,
            claim.max_claims,
            claim.operation_id,
        ]
        reply = await self.run("lease", keys, args, revisions.authority)
        if reply.code is not Code.OK:
            return reply
        v = reply.values
        lease = Lease(
            claim.operation_id, claim.branch, claim.peer, reply.text(0), reply.text(1), claim.holder
        )
        return Grant(
            lease=lease,
            attempt=claim.attempt,
            until_ms=reply.number(2),
            granted_ms=reply.now_ms,
            deadline_ms=reply.number(3),
            admission=v[4],
            input=v[5],
            head=reply.number(7),
            state=v[8],
            state_revision=reply.text(9),
        )

    async def open_gate(
        self, lease: Lease, revisions: Revisions, decision_expires_ms: int | None = None
    ) -> Reply:
        """Record that the handler may be called, before it is; a lost reply grants no call (DESIGN 6)."""
        return await self._lease_verb("open", lease, revisions, self.not_after(decision_expires_ms))

    async def release(self, lease: Lease, revisions: Revisions) -> Reply:
        """Give a lease back; what follows is decided from the gate (RT-OWN-11)."""
        return await self._lease_verb("release", lease, revisions, self.not_after(), lease.operation_id)

    async def answer(self, lease: Lease, digest: str, body: bytes, revisions: Revisions) -> Reply:
        """Store an answer and acknowledge its request in one step (RT-DUR-06). Evidence: policy is judged by
        the fold.
        """
        return await self._lease_verb(
            "answer", lease, revisions, self.not_after(), digest, body, lease.operation_id
        )

    async def renew(
        self,
        leases: Sequence[Lease],
        lease_ms: int,
        revisions: Revisions,
        decision_expires_ms: int | None = None,
    ) -> Sequence[tuple[Code, int]]:
        """Extend leases; per lease RENEWED with its new end in ms, or the code that refuses it (RT-OWN-04,
        RT-OWN-05).

        A refusal that concerns all of them (stale snapshot, window) comes back for each.
        """
        keys = [self.keys.meta, *(self.keys.op(lease.operation_id) for lease in leases)]
        args: list[Arg] = [
            "renew",
            revisions.authority,
            revisions.policy,
            self.not_after(decision_expires_ms),
            lease_ms,
        ]
        for lease in leases:
            args += [lease.branch, lease.epoch, lease.fence, lease.holder]
        reply = await self.run("lease", keys, args, revisions.authority)
        if reply.code is not Code.OK:
            return [(reply.code, 0)] * len(leases)
        pairs = zip(reply.values[::2], reply.values[1::2], strict=True)
        return [(Code(code.decode()), int(until)) for code, until in pairs]

    async def replace(self, op: Operation, change: Change, revisions: Revisions, replay_ms: int) -> Reply:
        """Commit one decision while everything it was decided from holds (RT-STORE-03..09, RT-STORE-13)."""
        k = self.keys
        session_id = op.admission.session_id
        keys = [k.meta, k.op(op.id), k.due]
        if session_id:
            keys += [k.session(session_id), k.updates(session_id), k.queue(session_id)]
        sections = self._sections(op, change, keys)
        topics = [operation_topic(op.id), *([session_topic(session_id)] if session_id else [])]
        wake = "" if change.only_wakes else " ".join(topics)
        reservation = {None: "", "quarantined": "quarantined", "replayable": f"replayable {replay_ms}"}
        args: list[Arg] = [
            revisions.authority,
            revisions.policy,
            op.revision,
            change.not_before_ms,
            self.not_after(change.not_after_ms),
            op.id,
            wake,
            op.seat.seat if op.seat is not None else "",
            session_id,
            change.state_revision,
            "" if op.wake_ms is None else op.wake_ms,
            "" if change.wake_at_ms is None else change.wake_at_ms,
            "" if change.wake_in_ms is None else change.wake_in_ms,
            change.phase or "",
            b"" if change.decision is None else encode(change.decision),
            reservation[change.reservation],
            b"" if change.tallies is None else encode(change.tallies),
            change.state or b"",
            "1" if change.halt else "",
            *sections,
        ]
        return await self.run("replace", keys, args, revisions.authority)

    def _sections(self, op: Operation, change: Change, keys: list[bytes]) -> list[Arg]:
        # An answer does not move the revision and may find an earlier wake-up in place: whoever only re-arms
        # has to have seen it, or would put off what the answer wants done now.
        kept = op.words if change.only_wakes else ()
        branches = len(kept) + len(change.branches)
        args: list[Arg] = [branches, len(change.sets), len(change.deletes), len(change.facts)]
        for index, words in enumerate(kept):
            args += [index, "same", "", words, "=", 0, 0, ""]
        for branch in change.branches:
            old = op.branches[branch.index]
            args += [
                branch.index,
                branch.assertion,
                "1" if branch.expired else "",
                op.words[branch.index],
                branch.words,
            ]
            args.append(self._position(keys, old.peer) if old.outbox is not None else 0)
            args.append(self._position(keys, branch.send_to) if branch.send_to is not None else 0)
            attempt = int(branch.words.split(" ")[2])
            branch_id = op.admission.branches[branch.index]
            args.append(message_id(MessageKind.REQUEST, op.admission.digest, op.id, branch_id, attempt))
        for field, value in change.sets:
            args += [field, value]
        args += change.deletes
        for fact in change.facts:
            args += [fact.kind, fact.command_id, fact.payload]
        return args

    def _position(self, keys: list[bytes], peer: str) -> int:
        key = self.keys.outbox(peer)
        if key not in keys:
            keys.append(key)
        return keys.index(key) + 1

    async def close_session(self, session_id: str, revisions: Revisions, expiry: int | None = None) -> Reply:
        """Begin to close a session for good, on a permission that ends at ``expiry`` (store ms)."""
        keys = [self.keys.session(session_id), self.keys.due]
        return await self._session(session_id, "close", keys, [], revisions, expiry)

    async def turn(
        self,
        session_id: str,
        revisions: Revisions,
        *,
        busy: str,
        following: Operation | None,
        claim_timeout_ms: int,
        decision_expires_ms: int | None = None,
    ) -> Reply:
        """Give the next serial command its turn, as loaded: ``busy`` ("" none) and the first in the queue."""
        k = self.keys
        next_id = following.id if following is not None else ""
        peer_key, request = k.meta, ""
        if following is not None:
            branch = following.branches[0]
            admission = following.admission
            peer_key = k.outbox(branch.peer)
            request = message_id(
                MessageKind.REQUEST, admission.digest, next_id, admission.branches[0], branch.attempt
            )
        keys = [
            k.session(session_id),
            k.due,
            k.queue(session_id),
            k.op(busy) if busy not in ("", NEXT_TURN) else k.meta,
            k.op(next_id) if next_id else k.meta,
            peer_key,
        ]
        args = (busy, next_id, claim_timeout_ms, request)
        return await self._session(session_id, "turn", keys, args, revisions, decision_expires_ms)

    async def purge(
        self, session_id: str, operations: Sequence[str], last: bool, revisions: Revisions
    ) -> Reply:
        """Turn settled operations of a closing session into tombstones; ``last`` closes the session."""
        k = self.keys
        keys = [
            k.session(session_id),
            k.due,
            k.queue(session_id),
            k.updates(session_id),
            k.cursors(session_id),
            *(k.op(operation) for operation in operations),
        ]
        return await self._session(session_id, "purge", keys, ["1" if last else "0"], revisions)

    async def put_cursor(
        self, session_id: str, client: str, cursor: int, revisions: Revisions, expiry: int | None = None
    ) -> Reply:
        """Move a client's cursor forward, never back and never beyond the head (DASP-CORE-012h)."""
        keys = [self.keys.session(session_id), self.keys.due, self.keys.cursors(session_id)]
        args: list[Arg] = [client, cursor, CLIENTS_PER_SESSION]
        return await self._session(session_id, "cursor", keys, args, revisions, expiry)

    async def _session(
        self,
        session_id: str,
        verb: str,
        keys: Sequence[bytes],
        args: Sequence[Arg],
        revisions: Revisions,
        decision_expires_ms: int | None = None,
    ) -> Reply:
        head: list[Arg] = [
            verb,
            revisions.authority,
            revisions.policy,
            self.not_after(decision_expires_ms),
            session_topic(session_id),
            session_id,
        ]
        return await self.run("session", [self.keys.meta, *keys], [*head, *args], revisions.authority)

    async def raise_epoch(self, authority: str, stored: str, inspected: str, boundary: str) -> Reply:
        """Accept the server that answers now under a higher epoch; the caller judged it kept the data."""
        return await self._once("epoch", [self.keys.meta], ["accept", authority, stored, inspected, boundary])

    def _lease_keys(self, operation_id: str, peer: str) -> list[bytes]:
        k = self.keys
        return [k.meta, k.op(operation_id), k.due, k.outbox(peer)]

    def _lease_head(self, verb: str, revisions: Revisions, not_after: int, operation_id: str) -> list[Arg]:
        return [verb, revisions.authority, revisions.policy, not_after, operation_topic(operation_id)]

    async def _lease_verb(
        self, verb: str, lease: Lease, revisions: Revisions, not_after: int, *more: Arg
    ) -> Reply:
        args: list[Arg] = [
            *self._lease_head(verb, revisions, not_after, lease.operation_id),
            lease.branch,
            lease.epoch,
            lease.fence,
            lease.holder,
            *more,
        ]
        return await self.run(
            "lease", self._lease_keys(lease.operation_id, lease.peer), args, revisions.authority
        )
