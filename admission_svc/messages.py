"""The bodies of the session routes: closed shapes in, exact shapes out.

``/openapi.json`` is generated from these types, so the description cannot differ from what is read and
written. Names are those of DASP.md where the draft has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from shared.domain.canonical import Document
from shared.domain.errors import InputFault, InvalidInput
from shared.domain.ids import MAX_SAFE, IdKind, check, check_uri, safe_integer
from shared.domain.limits import TenantLimits, TenantUsage
from shared.domain.records import CommandError
from shared.domain.shape import array, at, members, text

MAX_BATCH: Final = 100
MAX_PAGE: Final = 100
_ROOT: Final = "body"

Id: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_.-]{0,127}$")]
Cursor: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAFE)]
Sequence: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAFE)]


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object without further members."""


class ProfileRef(Closed, frozen=True):
    """A session profile by its identity: an absolute URI and a version."""

    id: str
    version: str


class SessionOpen(Closed, frozen=True):
    """What a session is opened or reopened with; the profile is an assertion, not a choice."""

    actor_id: Id
    profile: ProfileRef

    @classmethod
    def read(cls, value: object) -> SessionOpen:
        """Raises InvalidInput with the place and the rule."""
        found = members(value, _ROOT, ("actor_id", "profile"))
        profile = members(found["profile"], "/profile", ("id", "version"))
        asserted = ProfileRef(
            check_uri(profile["id"], "/profile/id"), text(profile["version"], "/profile/version", 64)
        )
        return cls(check(IdKind.ACTOR, found["actor_id"], "/actor_id"), asserted)


class CommandSubmit(Closed, frozen=True):
    """A command as submitted. ``input`` is an object of the profile; the id may come by header instead."""

    name: Name
    input: dict[str, Any]
    command_id: Id | msgspec.UnsetType = msgspec.UNSET


class BatchSubmit(Closed, frozen=True):
    """Commands that are judged each on its own merits, in order."""

    commands: Annotated[list[CommandSubmit], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


class CursorPut(Closed, frozen=True):
    """How far a client has applied."""

    cursor: Cursor

    @classmethod
    def read(cls, value: object) -> CursorPut:
        """Raises InvalidInput with the place and the rule."""
        found = members(value, _ROOT, ("cursor",))
        return cls(safe_integer(found["cursor"], "/cursor", 0))


class Command(msgspec.Struct, frozen=True):
    """A command whose shape was checked; nothing of its profile was.

    ``written`` is the canonical form of ``input``, None where the input breaks a bound of session payloads:
    ``fault`` says which. A single command is refused for it, in a batch it is that member's receipt.
    """

    command_id: str
    name: str
    input: Any
    written: bytes | None
    path: str
    fault: InvalidInput | None = None
    traceparent: str = ""


def read_command(document: Document, header_id: str | None, trace: str = "") -> Command:
    """The one command in a body, its id there or in the ``Idempotency-Key`` header, or the same in both.

    Raises InvalidInput with the place and the rule.
    """
    value = document.value
    if header_id is None:
        found = members(value, _ROOT, ("command_id", "name", "input"))
        command_id = check(IdKind.COMMAND, found["command_id"], "/command_id")
    else:
        found = members(value, _ROOT, ("name", "input"), ("command_id",))
        command_id = header_id
        if "command_id" in found and found["command_id"] != header_id:
            raise InvalidInput("Idempotency-Key", "must equal the command_id of the body")
    name = check(IdKind.NAME, found["name"], "/name")
    payload = found["input"]
    written = _cut_out(document.canonical(), command_id, name) if len(found) == 3 else None
    written = document.check_payload(payload, "/input", written)
    return Command(command_id, name, payload, written, "/input", traceparent=trace)


def _cut_out(whole: bytes, command_id: str, name: str) -> bytes:
    """The canonical input out of a canonical command: its members sort as command_id, input, name, and ids
    and names are written as they are.
    """
    return whole[len(command_id) + 25 : -len(name) - 11]


def read_batch(document: Document) -> Iterator[Command]:
    """The commands of a batch. A fault of shape or identity refuses the whole before anything is judged: no
    receipt could name such a command. Raises InvalidInput.
    """
    found = members(document.value, _ROOT, ("commands",))
    for i, value in enumerate(array(found["commands"], "/commands", 1, MAX_BATCH)):
        place = at("/commands", i)
        member = members(value, place, ("command_id", "name", "input"))
        command_id = check(IdKind.COMMAND, member["command_id"], at(place, "command_id"))
        name = check(IdKind.NAME, member["name"], at(place, "name"))
        where = at(place, "input")
        written, fault = None, None
        try:
            written = document.check_payload(member["input"], where)
        except InvalidInput as bad:
            if bad.code is not InputFault.TOO_LARGE:
                raise
            fault = bad
        yield Command(command_id, name, member["input"], written, where, fault)


class SessionOpened(Closed, frozen=True):
    """A session and its committed head."""

    session_id: Id
    actor_id: Id
    profile: ProfileRef
    cursor: Cursor


class View(Closed, frozen=True):
    """A session's state with every saved effect through ``cursor`` and none after it."""

    session_id: Id
    actor_id: Id
    profile: ProfileRef
    cursor: Cursor
    state: dict[str, Any]


class Closing(Closed, frozen=True):
    """A session that is being closed for good."""

    session_id: Id
    phase: Literal["closing"]


class Receipt(Closed, frozen=True):
    """What became of a submission: ``accepted`` and ``duplicate`` carry the admission's sequence,
    ``rejected`` an error. It says nothing about completion (DASP-CORE-008a).
    """

    session_id: Id
    command_id: Id
    disposition: Literal["accepted", "duplicate", "rejected"]
    admission_sequence: Sequence | None
    error: CommandError | None


class OutcomeValue(Closed, frozen=True):
    """How a command ended: for good, whatever happens later."""

    status: Literal["completed", "failed", "uncertain", "cancelled"]
    output: dict[str, Any] | None
    error: CommandError | None


class CommandOutcome(Closed, frozen=True):
    """``pending`` without, or ``settled`` with the sequence of the terminal update and its payload."""

    session_id: Id
    command_id: Id
    state: Literal["pending", "settled"]
    sequence: Sequence | None
    outcome: OutcomeValue | None


class WaitedReceipt(Closed, frozen=True):
    """A receipt held for the outcome, as ``Prefer: wait`` asked, with the outcome as it is now."""

    session_id: Id
    command_id: Id
    disposition: Literal["accepted", "duplicate", "rejected"]
    admission_sequence: Sequence | None
    error: CommandError | None
    state: Literal["pending", "settled"]
    sequence: Sequence | None
    outcome: OutcomeValue | None


class Receipts(Closed, frozen=True):
    """The receipts of a batch, in the order of its commands."""

    receipts: list[Receipt]


class Update(msgspec.Struct, frozen=True):
    """A saved fact as a CloudEvent in structured JSON, type ``dasp.v1.update``."""

    specversion: Literal["1.0"]
    id: str
    source: str
    type: Literal["dasp.v1.update"]
    datacontenttype: Literal["application/json"]
    time: str
    data: dict[str, Any]


class Updates(Closed, frozen=True):
    """A replay page: contiguous, ascending, from ``after`` + 1; ``next`` is where the next page begins."""

    session_id: Id
    after: Cursor
    next: Cursor
    head: Cursor
    events: Annotated[list[Update], msgspec.Meta(max_length=MAX_PAGE)]


class CursorHeld(Closed, frozen=True):
    """The cursor the server holds for a client; 0 before it was first put."""

    cursor: Cursor


class ProfileOffer(Closed, frozen=True, rename="camel"):
    """A session profile of this authority and the contract it is pinned to."""

    id: str
    version: str
    contract: str
    contract_version: str
    contract_digest: str
    execution: Literal["serial", "concurrent"]
    commands: list[str]


class Limits(Closed, frozen=True, rename="camel"):
    """What one request, fact or session may hold; durations in seconds, sizes in UTF-8 bytes.

    ``tenant``: what the tenant as a whole may use; null where that cannot be read, which refuses new work.
    """

    message_bytes: int
    update_bytes: int
    string_bytes: int
    payload_nesting: int
    payload_entries: int
    page_updates: int
    batch_commands: int
    wait_seconds: int
    cursors_per_session: int
    tenant: TenantLimits | None


class Durability(Closed, frozen=True, rename="camel"):
    """What acknowledged writes survive, as inspected, and what they do not (DASP-CORE-012d)."""

    boundary: Literal["unknown", "volatile", "process-restart", "power-loss"]
    appendfsync: str | None
    replicas: int | None
    covers: list[str]
    does_not_cover: list[str]


class Capabilities(Closed, frozen=True, rename="camel"):
    """What this deployment offers beyond the core; ``memory`` means that a restart of the store loses all."""

    result_fencing: bool
    effect_fencing: bool
    workflow: bool
    memory: bool


class Authority(Closed, frozen=True):
    """The host authority behind a token: its stable identity, limits and what it promises.

    ``usage`` is what the tenant keeps now, for its operators; null for everybody else.
    """

    tenant: str
    authority: str
    source: str
    core: Literal["draft-01"]
    durability: Durability
    limits: Limits
    usage: TenantUsage | None
    capabilities: Capabilities
    profiles: list[ProfileOffer]


class Health(Closed, frozen=True):
    """Whether the process lives, or may serve; ``reason`` where it may not."""

    status: Literal["ok", "unready"]
    reason: str | None = None


class Problem(Closed, frozen=True):
    """Every refusal that is not a receipt (RT-HTTP-14)."""

    kind: Literal[
        "invalid-input", "denied", "unavailable", "conflict", "expired", "unsupported", "protocol-conflict"
    ]
    description: str | msgspec.UnsetType = msgspec.UNSET


encode: Final = msgspec.json.Encoder().encode


def stored(body: bytes) -> Any:
    """Stored JSON as a member of a message: it goes out as it is, byte for byte."""
    return msgspec.Raw(body)
