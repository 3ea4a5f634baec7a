"""The policy document: rules as people write them, read strictly and compiled once.

A rule names things by patterns: exact text in which ``*`` stands for any run of characters, also none;
nothing else is special. Matching never backtracks, so what a caller sends cannot make it slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from shared.domain.canonical import canonical
from shared.domain.errors import InputFault, InvalidInput
from shared.domain.shape import array, at, integer, members, quoted, text
from shared.domain.source import read_source
from shared.domain.strict import Json

Action: TypeAlias = Literal[
    "session.open",
    "session.read",
    "session.close",
    "command.submit",
    "invoke",
    "invocation.read",
    "branch.assign",
    "claim",
    "answer",
    "cancel",
    "effect.write",
    "manifest.supply",
    "contract.apply",
    "operate",
]
"""What may be asked for (API.md, "Credentials and policy")."""

ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
MAX_POLICY_BYTES: Final = 1_048_576
MAX_RULES: Final = 1_000
MAX_PATTERNS: Final = 256
"""Patterns of one list."""
MAX_PATTERNS_IN_ALL: Final = 20_000
"""Bounds what one decision may cost, whatever a document holds."""
MAX_PATTERN: Final = 256
"""Characters of one pattern."""
DEFAULT_TTL_MS: Final = 60_000
MAX_TTL_MS: Final = 86_400_000

_ROOT: Final = "policy"
_EFFECTS: Final = ("allow", "deny")
_LISTS: Final = ("profiles", "sessions", "contracts", "interactions", "peers", "sinks")


class Patterns:
    """A list of patterns, sorted by how cheaply each is matched."""

    __slots__ = ("_everything", "_exact", "_heads", "_parted", "_tails")

    def __init__(self, patterns: Iterable[str]) -> None:
        exact: set[str] = set()
        heads: list[str] = []
        tails: list[str] = []
        parted: list[list[str]] = []
        self._everything = False
        for pattern in patterns:
            parts = pattern.split("*")
            if len(parts) == 1:
                exact.add(pattern)
            elif not any(parts):
                self._everything = True
            elif not any(parts[1:]):
                heads.append(parts[0])
            elif not any(parts[:-1]):
                tails.append(parts[-1])
            else:
                parted.append(parts)
        self._exact = frozenset(exact)
        self._heads = tuple(heads)
        self._tails = tuple(tails)
        self._parted = tuple((parts[0], tuple(filter(None, parts[1:-1])), parts[-1]) for parts in parted)

    def cover(self, name: str) -> bool:
        """Whether any of the patterns matches the whole of ``name``."""
        return (
            self._everything
            or name in self._exact
            or name.startswith(self._heads)
            or name.endswith(self._tails)
            or any(_matches(name, *parts) for parts in self._parted)
        )


def _matches(name: str, head: str, middle: tuple[str, ...], tail: str) -> bool:
    """Each inner part where it is found first: what a later place could match, the first one leaves room
    for.
    """
    end = len(name) - len(tail)
    if len(head) > end or not name.startswith(head) or not name.endswith(tail):
        return False
    place = len(head)
    for part in middle:
        found = name.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule. A list that is None was not written; ``ttl_ms`` is how long its verdict holds."""

    principals: Patterns
    actions: frozenset[str]
    allow: bool
    ttl_ms: int
    profiles: Patterns | None
    sessions: Patterns | None
    contracts: Patterns | None
    interactions: Patterns | None
    peers: Patterns | None
    sinks: Patterns | None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyDocument:
    """A compiled document. ``text`` is its RFC 8785 form, which is what the store keeps."""

    text: bytes
    rules: tuple[Rule, ...]


def read_policy(source: bytes) -> PolicyDocument:
    """The policy in a YAML or JSON document.

    Raises InvalidInput with the place (a JSON Pointer, or a line of YAML) and the rule it breaks.
    """
    return compile_policy(read_source(source, root=_ROOT, max_bytes=MAX_POLICY_BYTES))


def compile_policy(value: Json) -> PolicyDocument:
    """The policy in a plain JSON value. Raises InvalidInput with the place and the rule it breaks."""
    found = members(value, _ROOT, ("rules",))
    place = at(_ROOT, "rules")
    room = _Room()
    rules = tuple(
        _rule(rule, at(place, index), room)
        for index, rule in enumerate(array(found["rules"], place, 0, MAX_RULES))
    )
    written = canonical(value, _ROOT)
    if len(written) > MAX_POLICY_BYTES:
        raise InvalidInput(_ROOT, f"must not exceed {MAX_POLICY_BYTES} bytes", code=InputFault.TOO_LARGE)
    return PolicyDocument(written, rules)


class _Room:
    """How many more patterns the document may have."""

    def __init__(self) -> None:
        self._left = MAX_PATTERNS_IN_ALL

    def take(self, count: int, path: str) -> None:
        self._left -= count
        if self._left < 0:
            raise InvalidInput(path, f"is beyond the {MAX_PATTERNS_IN_ALL} patterns a policy may have in all")


def _rule(value: object, path: str, room: _Room) -> Rule:
    found = members(value, path, ("principals", "actions", "effect"), (*_LISTS, "ttlMs"))

    def optional(name: str) -> Patterns | None:
        return _patterns(found[name], at(path, name), room) if name in found else None

    effect = found["effect"]
    if effect not in _EFFECTS:
        raise InvalidInput(at(path, "effect"), f"must be one of {', '.join(_EFFECTS)}")
    return Rule(
        principals=_patterns(found["principals"], at(path, "principals"), room),
        actions=_actions(found["actions"], at(path, "actions"), room),
        allow=effect == "allow",
        ttl_ms=integer(found, "ttlMs", path, (1, MAX_TTL_MS), DEFAULT_TTL_MS),
        profiles=optional("profiles"),
        sessions=optional("sessions"),
        contracts=optional("contracts"),
        interactions=optional("interactions"),
        peers=optional("peers"),
        sinks=optional("sinks"),
    )


def _patterns(value: object, path: str, room: _Room) -> Patterns:
    return Patterns(_listed(value, path, room))


def _actions(value: object, path: str, room: _Room) -> frozenset[str]:
    """Patterns over the actions, spelled out. One that names none is a slip that must not pass in silence."""
    named: set[str] = set()
    for index, pattern in enumerate(_listed(value, path, room)):
        hits = [action for action in ACTIONS if Patterns((pattern,)).cover(action)]
        if not hits:
            rule = f"{quoted(pattern)} names no action; there are {', '.join(ACTIONS)}"
            raise InvalidInput(at(path, index), rule)
        named.update(hits)
    return frozenset(named)


def _listed(value: object, path: str, room: _Room) -> list[str]:
    listed = array(value, path, 1, MAX_PATTERNS)
    room.take(len(listed), path)
    if all(isinstance(item, str) and 0 < len(item) <= MAX_PATTERN and item.isprintable() for item in listed):
        return listed  # type: ignore[return-value]  # as was just looked at
    # Somewhere it is wrong: only now is it worth naming every place.
    return [text(item, at(path, index), MAX_PATTERN) for index, item in enumerate(listed)]
