"""Whether a principal may do something: the one decision that every door and every loop asks for.

Pure: who asks supplies the instant, the store supplies revision and document. Roles are judged elsewhere and
come first: a policy narrows or widens what the principals it names may do, never what a role can.

How rules are read. The first rule that covers a question decides; where none does it is denied, except for
*operate* and *contract.apply*, for which the operator role that is needed anyway suffices, so that nobody
locks themselves out with the first document. A list covers only what it names: a rule with ``interactions``
says nothing about a question without one. Three lists mean more:

- ``actions``: *command.submit* inside sessions, and *invoke* elsewhere, also stand for the work they admit
  (branch.assign, claim, answer). Taking either from somebody takes back what is open.
- ``sessions``: an allow rule without it covers a principal's own sessions, and one that is yet to be opened;
  a deny rule without it covers all.
- ``peers``: an allow rule with it covers questions without a peer too; it narrows where the work may go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from shared.domain.errors import InvalidInput, Unavailable
from shared.domain.ids import safe_integer
from shared.domain.policy_document import DEFAULT_TTL_MS, Action, PolicyDocument, Rule, read_policy
from shared.domain.strict import shown

__all__ = (
    "MAX_ATTEMPT",
    "WORK",
    "Action",
    "Authorization",
    "AuthorizationInput",
    "Policy",
    "PolicyDocument",
    "PolicyUnreadable",
    "read_input",
    "read_policy",
)

MAX_ATTEMPT: Final = 16
WORK: Final = frozenset({"branch.assign", "claim", "answer"})
"""What is done with admitted work, asked for its original invoker."""
_ROLE_SUFFICES: Final = frozenset({"operate", "contract.apply"})
_REMEMBERED: Final = 4_096


class AuthorizationInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question (RT-AUTH-01). "" stands for what does not apply.

    ``principal`` is the original invoker where work is asked about, else whoever asks. ``owner`` opened the
    session; "" also where it is not opened yet. ``profile`` and ``contract`` are ids. ``attempt`` is an
    integer from 1 to 16; anything else raises InvalidInput (RT-AUTH-02).
    """

    principal: str
    action: Action
    session_id: str = ""
    owner: str = ""
    profile: str = ""
    contract: str = ""
    interaction: str = ""
    peer: str = ""
    branch: str = ""
    sink: str = ""
    attempt: int = 1

    def __post_init__(self) -> None:
        if self.attempt != 1 or type(self.attempt) is not int:
            safe_integer(self.attempt, "attempt", 1, MAX_ATTEMPT)


def read_input(value: Mapping[str, object]) -> AuthorizationInput:
    """A question from plain values. Raises InvalidInput for unknown members and for what breaks a rule
    (RT-AUTH-01, RT-AUTH-02).
    """
    try:
        return msgspec.convert(dict(value), AuthorizationInput)
    except msgspec.ValidationError as bad:
        raise InvalidInput("authorization", shown(str(bad), 200)) from None


class Authorization(msgspec.Struct, frozen=True):
    """A verdict. It holds until ``expires_ms`` (store ms) under the policy ``revision``, and no longer: a
    transition that commits at or after that instant is not authorized by it (RT-AUTH-06, RT-AUTH-09).
    """

    allowed: bool
    revision: str
    expires_ms: int


class PolicyUnreadable(Unavailable):
    """Nobody knows what the stored document allows (RT-AUTH-05). It may have been replaced since: look again
    before telling it.
    """

    def __init__(self) -> None:
        super().__init__("the tenant's policy cannot be read; an operator must apply it again")


class Policy:
    """A tenant's policy as of one revision. ``document`` is its RFC 8785 form, None where none was applied.

    Verdicts are remembered, boundedly: the same question costs one lookup.
    """

    __slots__ = ("_readable", "_rules", "_verdicts", "document", "revision")

    def __init__(self, revision: str, document: PolicyDocument | None = None) -> None:
        self.revision: Final = revision
        self.document: Final = None if document is None else document.text
        self._rules = None if document is None else document.rules
        self._verdicts: dict[tuple[str, ...], tuple[bool, int]] = {}
        self._readable = True

    @classmethod
    def unreadable(cls, revision: str) -> Policy:
        """A policy whose stored document cannot be read: nobody knows what it allows (RT-AUTH-05)."""
        policy = cls(revision, PolicyDocument(b"", ()))
        policy._readable = False
        return policy

    @property
    def applies(self) -> bool:
        """Whether a document decides; without one the roles' defaults hold."""
        return self._rules is not None

    def granted(self, now_ms: int) -> Authorization:
        """The verdict for what a role's default allows where no document was applied."""
        return Authorization(True, self.revision, now_ms + DEFAULT_TTL_MS)

    def decide(self, asked: AuthorizationInput, now_ms: int) -> Authorization:
        """The verdict on a question at the store's time ``now_ms``.

        Without a document a principal uses its own sessions and admitted work goes on. Raises
        PolicyUnreadable where nobody knows what is allowed.
        """
        if self._rules is None:
            own = asked.owner in ("", asked.principal) or asked.action in WORK
            return Authorization(own, self.revision, now_ms + DEFAULT_TTL_MS)
        if not self._readable:
            raise PolicyUnreadable
        key = (
            asked.principal,
            asked.action,
            asked.session_id,
            asked.owner,
            asked.profile,
            asked.contract,
            asked.interaction,
            asked.peer,
            asked.sink,
        )
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= _REMEMBERED:
                self._verdicts.clear()
            verdict = self._verdicts[key] = _judged(self._rules, asked)
        return Authorization(verdict[0], self.revision, now_ms + verdict[1])

    def offers(self, principal: str, profile: str, contract: str) -> bool:
        """Whether a principal may open some session of a profile, whatever ids it may choose from."""
        if self._rules is None:
            return True
        if not self._readable:
            raise PolicyUnreadable
        asked = AuthorizationInput(principal, "session.open", profile=profile, contract=contract)
        for rule in self._rules:
            if asked.action in rule.actions and _covers(rule, asked, any_session=True):
                if rule.allow:
                    return True
                if rule.sessions is None:
                    return False
        return False


def _judged(rules: tuple[Rule, ...], asked: AuthorizationInput) -> tuple[bool, int]:
    """Allowed or not, and for how long (ms)."""
    actions = {asked.action}
    if asked.action in WORK:
        actions.add("command.submit" if asked.session_id else "invoke")
    for rule in rules:
        if not actions.isdisjoint(rule.actions) and _covers(rule, asked):
            return rule.allow, rule.ttl_ms
    return asked.action in _ROLE_SUFFICES, DEFAULT_TTL_MS


def _covers(rule: Rule, asked: AuthorizationInput, *, any_session: bool = False) -> bool:
    if not rule.principals.cover(asked.principal):
        return False
    if rule.sessions is not None:
        if not any_session and not rule.sessions.cover(asked.session_id):
            return False
    elif rule.allow and asked.owner not in ("", asked.principal):
        return False
    if rule.peers is not None and not (rule.allow and not asked.peer) and not rule.peers.cover(asked.peer):
        return False
    return (
        (rule.profiles is None or rule.profiles.cover(asked.profile))
        and (rule.contracts is None or rule.contracts.cover(asked.contract))
        and (rule.interactions is None or rule.interactions.cover(asked.interaction))
        and (rule.sinks is None or rule.sinks.cover(asked.sink))
    )
