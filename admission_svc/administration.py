"""What operators change over HTTP. Every change builds on the revision it was permitted under, so that a
permission taken away meanwhile changes nothing any more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from admission_svc.auth import Desk, Visit, authorize
from admission_svc.http import Call, Header, Reply
from admission_svc.messages import Closed, encode, stored
from admission_svc.openapi import Operation, Parameter
from shared.domain.errors import Conflict, InvalidInput
from shared.domain.policy import PolicyDocument
from shared.domain.policy_document import (
    MAX_PATTERN,
    MAX_PATTERNS,
    MAX_RULES,
    MAX_TTL_MS,
    compile_policy,
)
from shared.store.policies import Applied, AppliedPolicy, apply_policy, other_revision, show_policy
from shared.store.reads import SnapshotMoved
from shared.store.runtime import Runtime

_REVISION: Final = re.compile(rb'"([0-9]{1,16})"')
IF_MATCH: Final[Parameter] = (
    "header",
    "If-Match",
    {"type": "string"},
    "the revision, in double quotes, that the change builds on; another one is a conflict",
)

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATTERN)]
PatternList = Annotated[list[Pattern], msgspec.Meta(min_length=1, max_length=MAX_PATTERNS)]
Absent = msgspec.UnsetType


class PolicyRule(Closed, frozen=True, rename="camel"):
    """One rule: lists of patterns, exact text in which ``*`` stands for any run of characters."""

    principals: PatternList
    actions: PatternList
    effect: Literal["allow", "deny"]
    profiles: PatternList | Absent = msgspec.UNSET
    sessions: PatternList | Absent = msgspec.UNSET
    contracts: PatternList | Absent = msgspec.UNSET
    interactions: PatternList | Absent = msgspec.UNSET
    peers: PatternList | Absent = msgspec.UNSET
    sinks: PatternList | Absent = msgspec.UNSET
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_TTL_MS)] | Absent = msgspec.UNSET


class PolicyRules(Closed, frozen=True):
    """A policy: the first rule that covers a question decides, and where none does it is denied."""

    rules: Annotated[list[PolicyRule], msgspec.Meta(max_length=MAX_RULES)]


class PolicyApplied(Closed, frozen=True):
    """The revision after an application; ``changed`` is false where the same policy was in force already."""

    revision: str
    changed: bool


class PolicyShown(Closed, frozen=True, rename="camel"):
    """The policy in force; ``document`` and what is told of its application are null where there is none."""

    revision: str
    document: PolicyRules | None
    applied_at_ms: int | None
    applied_by: str | None


class Administration:
    """Handlers of the routes for operators."""

    def __init__(self, runtime: Runtime, desk: Desk) -> None:
        self._runtime = runtime
        self._desk = desk

    async def put_policy(self, call: Call) -> Reply:
        """PUT /v1/policy: the same policy again is the same answer, without a change."""
        header, expected = call.header(b"authorization"), _expected(call.header(b"if-match"))
        call.parameters()
        await self._desk.serve(header, _operate)
        # Compiling a large document takes a while; others are served meanwhile.
        document = await asyncio.to_thread(compile_policy, (await call.document()).value)

        async def apply(visit: Visit) -> Applied:
            return await self._apply(visit, document, expected)

        done = await self._desk.serve(header, apply)
        return Reply(200, encode(PolicyApplied(done.revision, done.changed)), _tag(done.revision))

    async def get_policy(self, call: Call) -> Reply:
        """GET /v1/policy."""
        call.parameters()
        shown = await self._desk.serve(call.header(b"authorization"), self._show)
        document = None if shown.document is None else stored(shown.document)
        body = PolicyShown(shown.revision, document, shown.applied_ms or None, shown.applied_by or None)
        return Reply(200, encode(body), _tag(shown.revision))

    async def _apply(self, visit: Visit, document: PolicyDocument, expected: str) -> Applied:
        """Applied under the revision the caller was permitted under, whatever it expects itself."""
        authorize(visit, "operate")
        revision = visit.revisions.policy
        if expected and expected != revision:
            # A repetition of what was applied already has done what it was to do.
            present = await self._show(visit)
            if present.document == document.text:
                return Applied(present.revision, changed=False)
            raise other_revision()
        try:
            done = await apply_policy(
                self._runtime.connection,
                visit.tenant,
                document,
                visit.caller.principal,
                expected=revision,
                authority=visit.revisions.authority,
            )
        except Conflict:
            raise SnapshotMoved("the tenant's policy moved") from None
        if not done.changed and done.revision != revision:
            raise SnapshotMoved("the tenant's policy moved")
        return done

    async def _show(self, visit: Visit) -> AppliedPolicy:
        authorize(visit, "operate")
        shown = await show_policy(self._runtime.connection, visit.tenant, visit.revisions.authority)
        if shown.revision != visit.revisions.policy:
            raise SnapshotMoved("the tenant's policy moved")
        return shown


async def _operate(visit: Visit) -> None:
    authorize(visit, "operate")


def _expected(header: bytes | None) -> str:
    """The revision in an ``If-Match``, "" where there is none. Raises InvalidInput for any other form."""
    if header is None:
        return ""
    match = _REVISION.fullmatch(header.strip())
    if match is None:
        raise InvalidInput("If-Match", 'must be one revision in double quotes, as in "7"')
    return match[1].decode()


def _tag(revision: str) -> tuple[Header, ...]:
    return ((b"etag", b'"%b"' % revision.encode()),)


def administration_operations(r: Administration) -> Sequence[Operation]:
    """The rows of the route table."""
    return (
        Operation(
            "PUT",
            "/v1/policy",
            r.put_policy,
            "Make a policy the tenant's own, from the next decision on",
            {200: PolicyApplied},
            body=PolicyRules,
            parameters=(IF_MATCH,),
            problems=(400, 403, 409, 413, 415, 503),
        ),
        Operation(
            "GET",
            "/v1/policy",
            r.get_policy,
            "The policy in force and its revision",
            {200: PolicyShown},
            problems=(400, 403, 503),
        ),
    )
