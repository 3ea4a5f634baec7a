"""What a handler is told of one assignment: the JSON document of DESIGN section 7."""

from __future__ import annotations

import msgspec

from shared.domain.records import Admission
from shared.store.replies import Grant, Lease


class ContractRef(msgspec.Struct, frozen=True):
    """The contract an assignment is pinned to."""

    id: str
    version: str
    digest: str


class SessionView(msgspec.Struct, frozen=True, rename="camel"):
    """The session at the instant of the grant. ``state`` is null where the profile has none; the answer to
    an assignment is only taken into the state that ``state_revision`` names.
    """

    id: str
    cursor: int
    state: msgspec.Raw | None
    state_revision: str | None


class Assignment(msgspec.Struct, frozen=True, rename="camel"):
    """One attempt at one branch. Durations and instants are store milliseconds.

    ``lease`` is opaque. ``effect_key`` is the same for every attempt at a branch and no other branch's:
    hand it on to whatever has the effect, so that a repetition can be told (RT-EFF-03).
    """

    operation_id: str
    branch_id: str
    peer: str
    attempt: int
    lease: str
    lease_ms: int
    deadline_ms: int
    effect_key: str
    contract: ContractRef
    interaction: str
    input: msgspec.Raw
    session: SessionView | None


def lease_token(lease: Lease) -> str:
    """The opaque text of (epoch, fence, holder)."""
    return f"{lease.epoch}-{lease.fence}-{lease.holder}"


def effect_key(operation_id: str, branch_id: str) -> str:
    """The identity of a branch's effect; operation ids have one length, so no two branches share a key."""
    return f"{operation_id}.{branch_id}"


def document(grant: Grant, admission: Admission, lease_ms: int, *, with_state: bool) -> bytes:
    """The request body for a grant. ``with_state`` says whether the session's profile declares a view
    state.
    """
    branch_id = admission.branches[grant.lease.branch]
    session = None
    if admission.session_id:
        session = SessionView(
            id=admission.session_id,
            cursor=grant.head,
            state=msgspec.Raw(grant.state) if with_state else None,
            state_revision=grant.state_revision if with_state else None,
        )
    return msgspec.json.encode(
        Assignment(
            operation_id=grant.lease.operation_id,
            branch_id=branch_id,
            peer=grant.lease.peer,
            attempt=grant.attempt,
            lease=lease_token(grant.lease),
            lease_ms=lease_ms,
            deadline_ms=grant.deadline_ms,
            effect_key=effect_key(grant.lease.operation_id, branch_id),
            contract=ContractRef(admission.contract, admission.version, admission.digest),
            interaction=admission.interaction,
            input=msgspec.Raw(grant.input),
            session=session,
        )
    )
