"""The rules of a session's profile: what may be admitted as a command, and what a handler may answer.

Sizes are bounded here so that every saved fact, rendered as a compact CloudEvent with the longest ids and a
16-digit sequence, fits 65,536 bytes: nothing that was admitted or answered can fail for its size later.
"""

from __future__ import annotations

from typing import Final

import msgspec

from shared.domain.bundle import MAX_RESULT_BYTES
from shared.domain.canonical import (
    INVOCATION,
    MAX_FACT_BYTES,
    MAX_MESSAGE_BYTES,
    SESSION,
    Document,
    canonical,
    parse,
)
from shared.domain.contract import MAX_STATE_BYTES, Contract, Profile
from shared.domain.errors import InputFault, InvalidInput
from shared.domain.ids import IdKind, check
from shared.domain.interaction import Interaction
from shared.domain.records import Answer, NamedData, Refusal
from shared.domain.shape import array, at, members
from shared.domain.strict import Json

ENVELOPE_BYTES: Final = 2_048
"""Reserved for everything of an update's CloudEvent but its payload."""
MAX_FACT_PAYLOAD_BYTES: Final = MAX_FACT_BYTES - ENVELOPE_BYTES
MAX_UPDATES: Final = 64
"""Application updates of one answer."""
MAX_UPDATE_BYTES: Final = MAX_RESULT_BYTES
MAX_REFUSAL_BYTES: Final = 4_096
OUTCOME_BYTES: Final = MAX_REFUSAL_BYTES + 256
"""What an outcome may hold beside its output: its status and an error."""
"""A refusal's message as JSON text: output, error and envelope together still fit a fact."""


def check_command(
    contract: Contract, name: str, document: Document, value: Json, path: str = "/input"
) -> tuple[Interaction, bytes]:
    """The interaction behind a command and the canonical bytes of its input, found at ``path`` of
    ``document``.

    Raises Unsupported for a name the profile has not, InvalidInput where the input is no payload or breaks
    the schema. Nothing is filled in, trimmed or converted: what is admitted is what was sent
    (DASP-CORE-002g).
    """
    interaction = contract.command(name)
    written = document.check_payload(value, path)
    interaction.input.check(value, path)
    return interaction, written


def read_answer(
    body: bytes, interaction: Interaction, profile: Profile | None, *, state_revision: str = ""
) -> Answer:
    """A handler's answer, validated: ``{result, updates?, state?}`` or ``{refused: {code, message}}``.

    Members hold canonical JSON. ``profile`` is that of the session the work belongs to, ``None`` for
    invocations, which have no updates; ``state`` exists only where the profile declares it, and then
    ``state_revision`` says which one the handler worked from. Raises InvalidInput for everything else: such
    an answer is no result.
    """
    rules = SESSION if profile is not None else INVOCATION
    document = parse(body, rules, max_bytes=MAX_MESSAGE_BYTES, root="answer")
    if isinstance(document.value, dict) and "refused" in document.value:
        return Answer(refused=_refusal(members(document.value, "answer", ("refused",))["refused"]))
    found = members(document.value, "answer", ("result",), _optional(profile))
    answer = Answer(result=msgspec.Raw(_result(document, found["result"], interaction)))
    if profile is None:
        return answer
    updates = _updates(document, found.get("updates", []), profile)
    if profile.state is None or "state" not in found:
        return msgspec.structs.replace(answer, updates=updates)
    state = _bounded(document, found["state"], "/state", MAX_STATE_BYTES)
    profile.state.check(found["state"], "/state")
    return msgspec.structs.replace(
        answer, updates=updates, state=msgspec.Raw(state), state_revision=state_revision
    )


def _optional(profile: Profile | None) -> tuple[str, ...]:
    if profile is None:
        return ()
    return ("updates",) if profile.state is None else ("updates", "state")


def _bounded(document: Document, value: Json, path: str, most: int) -> bytes:
    written = document.check_payload(value, path)
    if len(written) > most:
        raise InvalidInput(path, f"must not exceed {most} bytes as canonical JSON", code=InputFault.TOO_LARGE)
    return written


def _result(document: Document, value: Json, interaction: Interaction) -> bytes:
    written = _bounded(document, value, "/result", interaction.max_result_bytes)
    interaction.result.check(value, "/result")
    return written


def _refusal(value: Json) -> Refusal:
    found = members(value, "/refused", ("code", "message"))
    code = check(IdKind.NAME, found["code"], "/refused/code")
    message = found["message"]
    if not isinstance(message, str) or len(canonical(message)) > MAX_REFUSAL_BYTES:
        raise InvalidInput("/refused/message", f"must be text of at most {MAX_REFUSAL_BYTES} bytes as JSON")
    return Refusal(code, message)


def _updates(document: Document, value: Json, profile: Profile) -> tuple[NamedData, ...]:
    return tuple(
        _update(document, item, at("/updates", i), profile)
        for i, item in enumerate(array(value, "/updates", 0, MAX_UPDATES))
    )


def _update(document: Document, value: Json, path: str, profile: Profile) -> NamedData:
    found = members(value, path, ("name", "data"))
    name = check(IdKind.NAME, found["name"], at(path, "name"))
    schema = profile.updates.get(name)
    if schema is None:
        raise InvalidInput(at(path, "name"), "is not an update of the profile")
    written = _bounded(document, found["data"], at(path, "data"), MAX_UPDATE_BYTES)
    schema.check(found["data"], at(path, "data"))
    return NamedData(name, msgspec.Raw(written))
