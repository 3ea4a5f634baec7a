"""What the store holds, as values: operations, branches, sessions, facts and answers.

The scripts write these forms and only parse a branch's words; everything else is opaque to them. Instants are
store milliseconds, revisions are opaque text that may only be echoed (RT-STORE-06).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

Phase = Literal["admitted", "active", "closed", "settled"]
Status = Literal["pending", "success", "failure", "revoked", "cancelled", "indeterminate"]
Gate = Literal["closed", "open", "answered"]
Seat = Literal["none", "busy", "queued"]
DecisionOutcome = Literal["success", "partial", "failed", "indeterminate"]
Settlement = Literal["pending", "complete", "indeterminate"]
OutcomeStatus = Literal["completed", "failed", "uncertain", "cancelled"]
FactKind = Literal["accepted", "application", "outcome"]

PHASES: Final[tuple[Phase, ...]] = ("admitted", "active", "closed", "settled")
STATUSES: Final[tuple[Status, ...]] = (
    "pending",
    "success",
    "failure",
    "revoked",
    "cancelled",
    "indeterminate",
)


class Branch(msgspec.Struct, frozen=True):
    """One branch with its assignment and lease.

    ``until_ms`` is the end of the lease; without a holder it is the end of the time in which the offer should
    be claimed. ``outbox`` is the id of the stream entry that offers it, absent while nothing is offered.
    ``digest`` is that of the answer stored last. Fence 0 is not a fence (RT-SEL-06).
    """

    status: Status
    peer: str
    attempt: int
    epoch: int
    fence: int
    holder: str | None
    until_ms: int
    gate: Gate
    claims: int
    next_ms: int
    outbox: str | None
    digest: str | None

    @classmethod
    def parse(cls, words: str) -> Branch:
        """Read the twelve stored words; ValueError for anything else."""
        status, peer, attempt, epoch, fence, holder, until, gate, claims, next_ms, outbox, digest = (
            words.split(" ")
        )
        values = {
            "status": status,
            "peer": peer,
            "attempt": int(attempt),
            "epoch": int(epoch),
            "fence": int(fence),
            "holder": None if holder == "-" else holder,
            "until_ms": int(until),
            "gate": gate,
            "claims": int(claims),
            "next_ms": int(next_ms),
            "outbox": None if outbox == "-" else outbox,
            "digest": None if digest == "-" else digest,
        }
        branch = msgspec.convert(values, cls)
        if branch.fence < 1 or branch.attempt < 1:
            raise ValueError(f"fence and attempt start at 1: {words!r}")
        return branch

    def words(self) -> str:
        """The stored form."""
        return (
            f"{self.status} {self.peer} {self.attempt} {self.epoch} {self.fence} "
            f"{self.holder or '-'} {self.until_ms} {self.gate} {self.claims} {self.next_ms} "
            f"{self.outbox or '-'} {self.digest or '-'}"
        )


class Admission(msgspec.Struct, frozen=True, omit_defaults=True):
    """The frozen part of an operation: who asked for what, under which contract, of whom.

    ``principal`` stays the original invoker for ever (RT-CTX-03). ``candidates`` are the eligible peers of a
    one-eligible branch in ASCII order; ``branches`` the branch ids in storage order (DESIGN section 4).
    ``session_owner`` opened the session, "" where that is the principal itself: a policy needs to know.
    """

    principal: str
    contract: str
    version: str
    digest: str
    interaction: str
    branches: tuple[str, ...]
    candidates: tuple[str, ...]
    policy_revision: str
    directory_revision: str
    invocation_key: str = ""
    session_id: str = ""
    command_id: str = ""
    name: str = ""
    traceparent: str = ""
    session_owner: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """A handler's definitive no: a code of the Name pattern and a message for people."""

    code: str
    message: str


class NamedData(msgspec.Struct, frozen=True):
    """An application update as the handler gives it; ``data`` is canonical JSON."""

    name: str
    data: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a carrier stores for a branch after it validated it: a result or a refusal, never both.

    ``state_revision`` is the view state revision the handler worked from (serial sessions).
    """

    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    refused: Refusal | None = None
    updates: tuple[NamedData, ...] = ()
    state: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    state_revision: str = ""


class StoredAnswer(msgspec.Struct, frozen=True):
    """An answer as evidence: when the store took it, and its bytes."""

    stored_ms: int
    body: bytes


class Decision(msgspec.Struct, frozen=True):
    """How an operation closed; ``at_ms`` is the commit instant and 0 until committed."""

    outcome: DecisionOutcome
    reason: str
    settlement: Settlement
    at_ms: int = 0


class Tallies(msgspec.Struct, frozen=True, omit_defaults=True):
    """What deciding remembers beyond the branches: whether any attempt was lost behind an open gate."""

    lost: bool = False


class CommandError(msgspec.Struct, frozen=True):
    """The error member of outcomes and receipts (DASP.md section 1)."""

    code: str
    message: str
    retryable: bool


class Outcome(msgspec.Struct, frozen=True):
    """A command's terminal outcome; ``output`` is canonical JSON of an object, or null."""

    status: OutcomeStatus
    output: msgspec.Raw | None
    error: CommandError | None


class Fact(msgspec.Struct, frozen=True):
    """One session update without its sequence; ``payload`` is compact JSON (DASP.md section 1)."""

    kind: FactKind
    command_id: str
    payload: bytes


class SessionSeat(msgspec.Struct, frozen=True):
    """The part of a session that decisions about its commands depend on."""

    seat: Seat
    phase: Literal["open", "closing"]
    state_revision: str
    state: bytes = b""


class Operation(msgspec.Struct, frozen=True):
    """One operation as loaded, with everything a decision may depend on.

    ``wake_ms`` is the wake-up that was seen in ``due``; ``words`` are the branches exactly as stored.
    """

    id: str
    admission: Admission
    admitted_ms: int
    deadline_ms: int
    sequence: int
    revision: str
    phase: Phase
    reservation: str
    words: tuple[str, ...]
    branches: tuple[Branch, ...]
    answers: Mapping[int, StoredAnswer] = {}
    tallies: Tallies = Tallies()
    decision: Decision | None = None
    outcome_sequence: int | None = None
    wake_ms: int | None = None
    seat: SessionSeat | None = None


_encoder = msgspec.json.Encoder()
_answer_decoder = msgspec.json.Decoder(Answer)


def encode(value: msgspec.Struct) -> bytes:
    """Compact JSON of a record."""
    return _encoder.encode(value)


def decode_answer(body: bytes) -> Answer:
    """The answer in stored bytes."""
    return _answer_decoder.decode(body)


def answer_digest(body: bytes) -> str:
    """SHA-256 of an answer's bytes in 43 URL-safe characters: a branch's words must stay ASCII."""
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()


def accepted_payload(name: str) -> bytes:
    """Payload of command.accepted."""
    return b'{"name":"' + name.encode() + b'"}'
