"""How a stranger tries each route: the requests in which it can name what belongs to somebody else.

A route without a recipe fails the suite. To add one, write a generator decorated with its method and path
exactly as the route table spells them. It is given the names to try (``t``: of somebody else's things, or of
things that exist nowhere; both of equal length) and the caller's own session, and yields an :class:`Attempt`
for every place of the request that takes a name, id, cursor, key or revision: once where the caller has
nothing of that name (a path of ``t``), and once inside what is the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from tests.admission.house import COUNTER, NOTES


class Names(msgspec.Struct, frozen=True):
    """Everything of one owner that a request can name. ``sequence`` is its session's head."""

    session: str
    command: str
    pending: str
    client: str
    actor: str
    principal: str
    peer: str
    event_id: str
    sequence: int
    revision: str


class Attempt(msgspec.Struct, frozen=True):
    """One request. ``tenant_wide``: it names an id that is one per tenant, so that another principal of the
    same tenant is told what it would be told of an id used up long ago. ``moving``: no two answers are equal.
    """

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = {}
    tenant_wide: bool = False
    moving: bool = False


Recipe: TypeAlias = Callable[[Names, str], Iterator[Attempt]]
RECIPES: Final[dict[tuple[str, str], Recipe]] = {}
SETTLEMENT: Final[dict[tuple[str, str], Recipe]] = {}
"""The routes of ``settlement_svc``."""

_SESSION: Final = "/v1/sessions/{session_id}"
_COMMANDS: Final = _SESSION + "/commands"
_STREAM: Final = {"accept": "text/event-stream"}
_WAIT: Final = {"prefer": "wait=1"}


def recipe(
    method: str, path: str, table: dict[tuple[str, str], Recipe] = RECIPES
) -> Callable[[Recipe], Recipe]:
    """Add a recipe for one route."""

    def add(made: Recipe) -> Recipe:
        assert (method, path) not in table, f"{method} {path} has a recipe already"
        table[method, path] = made
        return made

    return add


def _command(command_id: str | None, name: str = "note.write") -> dict[str, Any]:
    return {"name": name, "input": {"n": 1}, **({} if command_id is None else {"command_id": command_id})}


@recipe("PUT", _SESSION)
def open_session(t: Names, own: str) -> Iterator[Attempt]:
    for profile in (COUNTER, NOTES):
        body = {"actor_id": t.actor, "profile": profile}
        yield Attempt("PUT", f"/v1/sessions/{t.session}", body, tenant_wide=True)
        yield Attempt("PUT", f"/v1/sessions/{own}", body)


@recipe("GET", _SESSION)
def view_session(t: Names, own: str) -> Iterator[Attempt]:
    yield Attempt("GET", f"/v1/sessions/{t.session}")


@recipe("DELETE", _SESSION)
def close_session(t: Names, own: str) -> Iterator[Attempt]:
    yield Attempt("DELETE", f"/v1/sessions/{t.session}")


@recipe("POST", _COMMANDS)
def submit(t: Names, own: str) -> Iterator[Attempt]:
    there, here = f"/v1/sessions/{t.session}/commands", f"/v1/sessions/{own}/commands"
    for name in ("note.write", "counter.add"):
        for command_id in (t.command, t.pending, "never-sent"):
            yield Attempt("POST", there, _command(command_id, name))
            yield Attempt("POST", there, _command(command_id, name), _WAIT)
    yield Attempt("POST", there, _command(None), {"idempotency-key": t.command})
    yield Attempt("POST", here, _command(t.command), tenant_wide=True)
    yield Attempt("POST", here, _command(None), {"idempotency-key": t.command}, tenant_wide=True)
    yield Attempt("POST", here, _command(None), {"idempotency-key": f'"{t.pending}"'}, tenant_wide=True)
    yield Attempt("POST", here, _command("another"), {"idempotency-key": t.command})
    yield Attempt("POST", here, _command(t.command, "counter.add"), tenant_wide=True)


@recipe("POST", _COMMANDS + ":batch")
def submit_batch(t: Names, own: str) -> Iterator[Attempt]:
    both = {"commands": [_command(t.command), _command(t.pending), _command(t.command, "counter.add")]}
    yield Attempt("POST", f"/v1/sessions/{t.session}/commands:batch", both)
    yield Attempt("POST", f"/v1/sessions/{own}/commands:batch", both, tenant_wide=True)


@recipe("GET", _COMMANDS + "/{command_id}")
def outcome(t: Names, own: str) -> Iterator[Attempt]:
    for command_id in (t.command, t.pending, "never-sent"):
        for session_id in (t.session, own):
            yield Attempt("GET", f"/v1/sessions/{session_id}/commands/{command_id}")
            yield Attempt("GET", f"/v1/sessions/{session_id}/commands/{command_id}", headers=_WAIT)


@recipe("GET", _SESSION + "/updates")
def updates(t: Names, own: str) -> Iterator[Attempt]:
    there, here = f"/v1/sessions/{t.session}/updates", f"/v1/sessions/{own}/updates"
    for query in ("", "?after=0", f"?after={t.sequence}", "?after=999", f"?client={t.client}"):
        yield Attempt("GET", there + query)
        yield Attempt("GET", there + query, headers=_WAIT)
        yield Attempt("GET", there + query, headers=_STREAM)
    for event_id in (t.event_id, str(t.sequence)):
        yield Attempt("GET", there, headers={**_STREAM, "last-event-id": event_id})
        yield Attempt("GET", here, headers={**_STREAM, "last-event-id": event_id})
        yield Attempt("GET", here, headers={"last-event-id": event_id})
    yield Attempt("GET", f"{here}?client={t.client}")
    yield Attempt("GET", f"{here}?after={t.sequence}")


@recipe("PUT", _SESSION + "/cursors/{client}")
def put_cursor(t: Names, own: str) -> Iterator[Attempt]:
    for cursor in (0, 1, t.sequence):
        for session_id in (t.session, own):
            yield Attempt("PUT", f"/v1/sessions/{session_id}/cursors/{t.client}", {"cursor": cursor})


@recipe("GET", _SESSION + "/cursors/{client}")
def held_cursor(t: Names, own: str) -> Iterator[Attempt]:
    for session_id in (t.session, own):
        yield Attempt("GET", f"/v1/sessions/{session_id}/cursors/{t.client}")


@recipe("PUT", "/v1/policy")
def put_policy(t: Names, own: str) -> Iterator[Attempt]:
    rule = {
        "principals": [t.principal, "alice"],
        "actions": ["session.read", "command.submit"],
        "sessions": [t.session, own],
        "peers": [t.peer],
        "effect": "allow",
    }
    for revision in (t.revision, "999"):
        yield Attempt("PUT", "/v1/policy", {"rules": [rule]}, {"if-match": f'"{revision}"'})
    yield Attempt("PUT", "/v1/policy", {"rules": [rule]})
    # What such a policy allows, it allows in the tenant it was made for.
    yield Attempt("GET", f"/v1/sessions/{t.session}")


@recipe("GET", "/v1/policy")
def get_policy(t: Names, own: str) -> Iterator[Attempt]:
    yield Attempt("GET", "/v1/policy")
    yield Attempt("GET", "/v1/policy", headers={"if-none-match": f'"{t.revision}"'})
    yield Attempt("GET", f"/v1/policy?tenant={t.principal}")


def _nothing_to_name(path: str, t: Names) -> Iterator[Attempt]:
    yield Attempt("GET", path)
    yield Attempt("GET", f"{path}?session_id={t.session}")
    yield Attempt("GET", path, headers={"last-event-id": t.event_id, "idempotency-key": t.command})


@recipe("GET", "/v1/authority")
def authority(t: Names, own: str) -> Iterator[Attempt]:
    yield from _nothing_to_name("/v1/authority", t)


@recipe("GET", "/openapi.json")
def description(t: Names, own: str) -> Iterator[Attempt]:
    yield from _nothing_to_name("/openapi.json", t)


@recipe("GET", "/healthz")
@recipe("GET", "/healthz", SETTLEMENT)
def alive(t: Names, own: str) -> Iterator[Attempt]:
    yield from _nothing_to_name("/healthz", t)


@recipe("GET", "/readyz")
@recipe("GET", "/readyz", SETTLEMENT)
def ready(t: Names, own: str) -> Iterator[Attempt]:
    yield from _nothing_to_name("/readyz", t)


@recipe("GET", "/metrics")
@recipe("GET", "/metrics", SETTLEMENT)
def metrics(t: Names, own: str) -> Iterator[Attempt]:
    """Its counters move with every request; that they bear nobody's name is proved in test_channels."""
    yield Attempt("GET", "/metrics", moving=True)
