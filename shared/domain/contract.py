"""Contracts: bundles pinned by digest, and the session profiles that some of them carry.

The digest is ``sha256:`` and the SHA-256 of the bundle's RFC 8785 form, so the same content written as YAML
or JSON, in any order of members, is the same contract (RT-CAN-07). What is read is frozen and compiled; share
and cache it freely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from shared.domain.bundle import read_interaction
from shared.domain.canonical import INVOCATION, SESSION, canonical, parse
from shared.domain.errors import InvalidInput, Unsupported
from shared.domain.ids import IdKind, check, check_uri
from shared.domain.interaction import CompletionMode, Delivery, Interaction, Projection
from shared.domain.schema import Validator
from shared.domain.shape import at, choice, members, obj, quoted, text
from shared.domain.source import MAX_BUNDLE_BYTES, read_source
from shared.domain.strict import Json

MAX_INTERACTIONS: Final = 128
MAX_NAMES: Final = 256
"""Commands, and updates, of one profile."""
MAX_STATE_BYTES: Final = MAX_BUNDLE_BYTES
"""Canonical bytes of a session's view state, which travels with every command. No initial one is larger."""
NO_STATE: Final = b"{}"


class Execution(StrEnum):
    """Whether a session works on one command at a time, in admission order, or on all at once."""

    SERIAL = "serial"
    CONCURRENT = "concurrent"


class OnUncertain(StrEnum):
    """Whether a serial session goes on after a command whose effects are not known."""

    HALT = "halt"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The session section of a contract.

    ``commands`` maps a command to its interaction. ``initial`` is the canonical view state before any
    command; without a ``state`` schema the view is and stays an empty object.
    """

    id: str
    version: str
    execution: Execution
    on_uncertain: OnUncertain
    commands: Mapping[str, str]
    updates: Mapping[str, Validator]
    state: Validator | None
    initial: bytes

    @property
    def serial(self) -> bool:
        """Whether commands run one at a time."""
        return self.execution is Execution.SERIAL


@dataclass(frozen=True, slots=True, eq=False)
class Contract:
    """A registered bundle. ``document`` is its canonical form, over which ``digest`` is taken."""

    id: str
    version: str
    digest: str
    interactions: Mapping[str, Interaction]
    session: Profile | None
    document: bytes

    def command(self, name: str) -> Interaction:
        """The interaction behind a command of the session profile; Unsupported where there is none."""
        interaction = self.session.commands.get(name) if self.session else None
        if interaction is None:
            raise Unsupported("the session's profile has no such command")
        return self.interactions[interaction]

    def interaction(self, name: str) -> Interaction:
        """An interaction by its id; Unsupported where the contract has no such interaction."""
        found = self.interactions.get(name)
        if found is None:
            raise Unsupported("the contract has no such interaction")
        return found


def parse_bundle(source: bytes) -> Contract:
    """The contract in a YAML or JSON bundle.

    Raises InvalidInput with the place (a JSON Pointer, or a line of YAML) and the rule, and Unsupported for
    pipelines, which this host does not offer (RT-WF-09).
    """
    value = read_source(source)
    if isinstance(value, dict) and "pipelines" in value:
        raise Unsupported("pipelines are not offered by this host")
    document = canonical(value, "bundle")
    # What is registered is read again from its canonical form, by every process that meets it.
    value = parse(document, INVOCATION, max_bytes=MAX_BUNDLE_BYTES, root="bundle").value
    found = members(value, "bundle", ("contract", "version", "interactions"), ("session",))
    interactions = _interactions(found["interactions"], "/interactions")
    return Contract(
        id=check(IdKind.CONTRACT, found["contract"], "/contract"),
        version=_version(found["version"], "/version"),
        digest="sha256:" + hashlib.sha256(document).hexdigest(),
        interactions=MappingProxyType(interactions),
        session=_session(found["session"], interactions, "/session") if "session" in found else None,
        document=document,
    )


def _version(value: Json, path: str) -> str:
    if isinstance(value, (int, float)):
        raise InvalidInput(path, "must be text; put it in quotes")
    return check(IdKind.VERSION, value, path)


def _interactions(value: Json, path: str) -> dict[str, Interaction]:
    found = obj(value, path)
    if not 0 < len(found) <= MAX_INTERACTIONS:
        raise InvalidInput(path, f"must have 1 to {MAX_INTERACTIONS} interactions")
    read = {
        check(IdKind.INTERACTION, name, at(path, name)): read_interaction(name, body, at(path, name))
        for name, body in found.items()
    }
    for name, interaction in read.items():
        if interaction.cancels is not None:
            target = read.get(interaction.cancels.interaction)
            if target is None or target.cancels is not None:
                raise InvalidInput(
                    at(path, name, "cancels", "interaction"),
                    "must be an interaction of this bundle that cancels nothing itself",
                )
    return read


def _session(value: Json, interactions: Mapping[str, Interaction], path: str) -> Profile:
    found = members(
        value,
        path,
        ("id", "profileVersion", "execution", "commands"),
        ("onUncertain", "updates", "state", "initial"),
    )
    execution = choice(found["execution"], at(path, "execution"), Execution)
    state, initial = _state(found, execution, path)
    return Profile(
        id=check_uri(found["id"], at(path, "id")),
        version=text(found["profileVersion"], at(path, "profileVersion"), 64, "; put a number in quotes"),
        execution=execution,
        on_uncertain=choice(found.get("onUncertain", OnUncertain.HALT), at(path, "onUncertain"), OnUncertain),
        commands=_commands(found["commands"], interactions, at(path, "commands")),
        updates=_updates(found.get("updates", {}), at(path, "updates")),
        state=state,
        initial=initial,
    )


def _commands(value: Json, interactions: Mapping[str, Interaction], path: str) -> Mapping[str, str]:
    found = obj(value, path)
    if not 0 < len(found) <= MAX_NAMES:
        raise InvalidInput(path, f"must have 1 to {MAX_NAMES} commands")
    read: dict[str, str] = {}
    for name, target in found.items():
        place = at(path, name)
        check(IdKind.NAME, name, place)
        if not isinstance(target, str) or target not in interactions:
            raise InvalidInput(place, "must name an interaction of this bundle")
        _check_command(interactions[target], place)
        read[name] = target
    return MappingProxyType(read)


def _check_command(interaction: Interaction, path: str) -> None:
    """A command is one piece of work with one answer, which becomes the outcome's output, an object."""
    fits = (
        interaction.delivery is Delivery.ONE_ELIGIBLE
        and interaction.completion.mode is CompletionMode.FIRST_SUCCESS
        and interaction.aggregate.projection is Projection.FIRST
        and interaction.aggregate.output is None
        and interaction.cancels is None
    )
    if not fits:
        raise InvalidInput(
            path,
            f"needs {quoted(interaction.name)} to be one-eligible and first-success, with no cancels and no "
            "aggregate of its own",
        )
    for side, validator in (("input", interaction.input), ("result", interaction.result)):
        _check_object(validator, at("/interactions", interaction.name, side))


def _check_object(validator: Validator, path: str) -> None:
    """Refuse a schema that says itself that it allows no object: every session payload is one."""
    declared = validator.schema.get("type", "object") if isinstance(validator.schema, dict) else "object"
    if validator.schema is False or "object" not in (declared if isinstance(declared, list) else [declared]):
        raise InvalidInput(path, "must allow objects, since session payloads are objects")


def _updates(value: Json, path: str) -> Mapping[str, Validator]:
    found = obj(value, path)
    if len(found) > MAX_NAMES:
        raise InvalidInput(path, f"must not have more than {MAX_NAMES} updates")
    read: dict[str, Validator] = {}
    for name, schema in found.items():
        place = at(path, name)
        read[check(IdKind.NAME, name, place)] = Validator(schema, place)
        _check_object(read[name], place)
    return MappingProxyType(read)


def _state(found: dict[str, Json], execution: Execution, path: str) -> tuple[Validator | None, bytes]:
    place, start = at(path, "state"), at(path, "initial")
    if ("state" in found) != ("initial" in found):
        raise InvalidInput(start, "goes with state: the state before any command")
    if "state" not in found:
        return None, NO_STATE
    if execution is not Execution.SERIAL:
        raise InvalidInput(place, "needs serial execution: concurrent commands have no common state")
    validator = Validator(found["state"], place)
    _check_object(validator, place)
    # Read again under the rules of sessions, which hold for the state as they hold for what handlers answer.
    initial = parse(canonical(found["initial"], start), SESSION, root=start)
    written = initial.check_payload(initial.value, start)
    validator.check(initial.value, start)
    return validator, written
