"""Every route under a policy: what is allowed, what is denied, and what is hidden as if it were not there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest
import redis

from shared.domain.ids import command_operation_id
from shared.store.registry import create_token
from tests.admission.house import COUNTER, NOTES, Client, House
from tests.admission.looking import assert_refused, everything
from tests.admission.ruling import USE, allow, deny, rule

Ask = Callable[[Client, str], Awaitable[httpx.Response]]


def batch_of(*commands: tuple[str, str]) -> dict[str, Any]:
    return {"commands": [{"command_id": i, "name": name, "input": {}} for i, name in commands]}


async def batch(client: Client, session_id: str, *commands: tuple[str, str]) -> httpx.Response:
    body = batch_of(*(commands or (("b1", "note.write"),)))
    return await client.http.post(f"/v1/sessions/{session_id}/commands:batch", json=body)


async def stream(client: Client, session_id: str) -> httpx.Response:
    """Only the head of a stream: its body has no end."""
    headers = {"accept": "text/event-stream"}
    async with client.http.stream("GET", f"/v1/sessions/{session_id}/updates", headers=headers) as answer:
        if answer.status_code != 200:
            await answer.aread()
        return answer


async def close(client: Client, session_id: str) -> httpx.Response:
    return await client.close(session_id)


ROUTES: Mapping[str, tuple[str, Ask]] = {
    "open": ("session.open", lambda c, s: c.open(s)),
    "view": ("session.read", lambda c, s: c.http.get(f"/v1/sessions/{s}")),
    "outcome": ("session.read", lambda c, s: c.outcome(s, "c1")),
    "waiting outcome": ("session.read", lambda c, s: c.outcome(s, "c1", wait=1)),
    "page": ("session.read", lambda c, s: c.page(s)),
    "waiting page": ("session.read", lambda c, s: c.page(s, after=0, wait=1)),
    "stream": ("session.read", stream),
    "held cursor": ("session.read", lambda c, s: c.http.get(f"/v1/sessions/{s}/cursors/web")),
    "put cursor": (
        "session.read",
        lambda c, s: c.http.put(f"/v1/sessions/{s}/cursors/web", json={"cursor": 1}),
    ),
    "submit": ("command.submit", lambda c, s: c.submit(s, "c2")),
    "duplicate": ("command.submit", lambda c, s: c.submit(s, "c1")),
    "conflict": ("command.submit", lambda c, s: c.submit(s, "c1", {"other": 1})),
    "batch": ("command.submit", batch),
    "close": ("session.close", close),
}
EVERY = pytest.mark.parametrize("name", ROUTES)
CONFLICTS = {"conflict"}


async def seeded(alice: Client) -> None:
    """A session of alice with one command."""
    assert (await alice.open("s1")).status_code == 201
    assert (await alice.submit("s1", "c1")).status_code == 201


@EVERY
async def test_what_is_allowed_is_served(door: House, alice: Client, name: str) -> None:
    await seeded(alice)
    action, ask = ROUTES[name]
    await rule(door, allow("alice", action, "session.read"))
    answer = await ask(alice, "s1")
    assert answer.status_code == 409 if name in CONFLICTS else answer.is_success, answer.text


@EVERY
@pytest.mark.requirement("RT-AUTH-04", "DASP-CORE-001a")
async def test_what_is_denied_in_a_readable_session_is_403_and_leaves_no_trace(
    door: House, alice: Client, raw: redis.Redis, name: str
) -> None:
    await seeded(alice)
    action, ask = ROUTES[name]
    if action == "session.read":
        await rule(door, *(allow("alice", other) for other in USE if other != action))
    else:
        await rule(door, deny("alice", action), allow("alice"))
    before = everything(raw)
    refused, missing = await ask(alice, "s1"), await ask(alice, "s9")
    if action == "session.read":
        assert_refused(refused, 404, "not found", kind="denied")
    else:
        assert_refused(refused, 403, kind="denied")
    if action in ("session.read", "session.open"):
        assert (missing.status_code, missing.content) == (refused.status_code, refused.content)
    else:
        assert missing.status_code == 404
    assert everything(raw) == before


@EVERY
@pytest.mark.requirement("DASP-CORE-003d", "RT-AUTH-04")
async def test_a_session_that_may_not_be_read_answers_as_one_that_is_not_there(
    door: House, alice: Client, raw: redis.Redis, name: str
) -> None:
    """With every other permission in hand: an equal retry, a conflict and a closed session say the same."""
    await seeded(alice)
    _, ask = ROUTES[name]
    bob = await door.client("bob")
    await rule(door, allow("alice"), allow("bob", sessions=["s9", "s8"]))
    before = everything(raw)
    if name == "open":
        hidden = await ask(bob, "s1")
        assert_refused(hidden, 403, kind="denied")
        missing = await bob.open("s7")
    else:
        hidden, missing = await ask(bob, "s1"), await ask(bob, "s9")
        assert_refused(hidden, 404, "not found", kind="denied")
    assert (hidden.status_code, hidden.content) == (missing.status_code, missing.content)
    assert {k.lower() for k in hidden.headers} == {k.lower() for k in missing.headers}
    assert everything(raw) == before


@EVERY
@pytest.mark.requirement("RT-AUTH-05")
async def test_where_the_policy_cannot_be_read_nothing_is_served(
    door: House, alice: Client, raw: redis.Redis, name: str
) -> None:
    await seeded(alice)
    _, ask = ROUTES[name]
    revision = int(await rule(door, allow("alice")))
    raw.hset("lg:{acme}:policy", "document", b'{"rules":[{}]}')
    raw.hset("lg:{acme}:meta", "policy_rev", str(revision + 1))
    before = everything(raw)
    assert_refused(await ask(alice, "s1"), 503, "policy", kind="unavailable")
    assert everything(raw) == before
    await rule(door, allow("alice"))
    answer = await ask(alice, "s1")
    assert answer.status_code == 409 if name in CONFLICTS else answer.is_success, answer.text


@EVERY
@pytest.mark.requirement("RT-AUTH-08")
async def test_a_permission_taken_away_elsewhere_ends_with_the_next_request(
    door: House, alice: Client, name: str
) -> None:
    await seeded(alice)
    action, ask = ROUTES[name]
    await rule(door, allow("alice"))
    assert (await alice.page("s1")).status_code == 200
    await rule(door, *(allow("alice", other) for other in USE if other != action))
    assert (await ask(alice, "s1")).status_code == (404 if action == "session.read" else 403)


@EVERY
async def test_a_permission_given_elsewhere_counts_at_once(door: House, alice: Client, name: str) -> None:
    """A refusal is never told under a policy that has moved, even where nothing else asks the store."""
    await seeded(alice)
    action, ask = ROUTES[name]
    await rule(door, *(allow("alice", other) for other in USE if other != action))
    assert not (await ask(alice, "s1")).is_success
    await rule(door, allow("alice"))
    answer = await ask(alice, "s1")
    assert answer.status_code == 409 if name in CONFLICTS else answer.is_success, answer.text


@pytest.mark.parametrize("role", ["operator", "peer:alfa", "local-host"])
@EVERY
async def test_a_policy_widens_no_role(door: House, alice: Client, name: str, role: str) -> None:
    await seeded(alice)
    action, ask = ROUTES[name]
    other = await door.client("other", role)
    await rule(door, allow("alice"), allow("other", "*", sessions=["*"]))
    answer = await ask(other, "s1")
    if role == "operator" and action in ("session.read", "session.close"):
        assert answer.is_success, answer.text
    else:
        hidden = 403 if role == "operator" or name == "open" else 404
        assert answer.status_code == hidden, answer.text


async def test_an_operator_reads_what_a_policy_lets_it_read(door: House, alice: Client) -> None:
    await seeded(alice)
    olga = await door.client("olga", "operator")
    assert (await olga.page("s1")).status_code == 200
    await rule(door, allow("alice"))
    assert (await olga.page("s1")).status_code == 404
    await rule(door, allow("olga", "session.read", sessions=["s*"]))
    assert (await olga.page("s1")).status_code == 200


async def test_a_session_is_shared_by_a_rule_that_names_it(door: House, alice: Client) -> None:
    """Whose session it is stays with the work of somebody else in it."""
    bob = await door.client("bob")
    await rule(door, allow("alice"), allow("bob", sessions=["shared.*"]))
    await alice.open("shared.1")
    await alice.open("private")
    assert (await bob.submit("shared.1", "c1")).status_code == 201
    assert (await bob.submit("private", "c2")).status_code == 404
    assert (await alice.submit("shared.1", "c3")).status_code == 201
    assert (await bob.open("shared.1")).status_code == 200
    assert (await bob.page("shared.1")).json()["head"] == 2
    handle = await door.worker.tenant("acme")
    authority = (await handle.snapshots.get()).revisions.authority
    found = []
    for command_id in ("c1", "c3"):
        op = await handle.reads.operation(command_operation_id(authority, command_id), "shared.1")
        assert op is not None
        found.append((op.admission.principal, op.admission.session_owner))
    assert found == [("bob", "alice"), ("alice", "")]


async def test_rules_name_profiles_contracts_and_interactions(door: House, alice: Client) -> None:
    await rule(door, allow("alice", profiles=[NOTES["id"]]))
    assert (await alice.open("n1", NOTES)).status_code == 201
    assert (await alice.open("k1", COUNTER)).status_code == 403
    assert (await alice.submit("n1", "c1")).status_code == 201
    await rule(door, allow("alice", contracts=["demo.counter"]))
    assert (await alice.open("k1", COUNTER)).status_code == 201
    assert (await alice.page("k1")).status_code == 200
    assert (await alice.page("n1")).status_code == 404
    assert (await alice.submit("k1", "c2", {"amount": 1}, name="counter.add")).status_code == 201
    await rule(door, allow("alice", "session.read"), allow("alice", "command.submit", interactions=["write"]))
    assert (await alice.submit("n1", "c3")).status_code == 201
    assert (await alice.submit("k1", "c4", {"amount": 1}, name="counter.add")).status_code == 403
    assert (await alice.submit("n1", "c5", name="no.such")).status_code == 403, "no interaction is named"


async def test_profiles_are_told_to_who_may_open_them(door: House, alice: Client) -> None:
    async def told(client: Client) -> list[str]:
        return [p["id"] for p in (await client.http.get("/v1/authority")).json()["profiles"]]

    bob = await door.client("bob")
    await rule(
        door,
        allow("alice", "session.open", profiles=[NOTES["id"]], sessions=["a.*"]),
        allow("bob", "session.read"),
    )
    assert (await told(alice), await told(bob)) == ([NOTES["id"]], [])
    await rule(door, allow("*", "session.open", contracts=["demo.counter"]))
    assert (await told(alice), await told(bob)) == ([COUNTER["id"]], [COUNTER["id"]])


# Batches


async def test_members_of_a_batch_are_permitted_each_on_its_own(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    await rule(door, allow("alice", "session.read"), allow("alice", "command.submit", interactions=["write"]))
    answer = await batch(alice, "s1", ("c1", "note.write"), ("c2", "no.such"), ("c3", "note.erase"))
    assert answer.status_code == 200
    receipts = answer.json()["receipts"]
    assert [receipt["disposition"] for receipt in receipts] == ["accepted", "rejected", "accepted"]
    assert (receipts[1]["error"]["code"], receipts[1]["error"]["retryable"]) == ("denied", False)
    await rule(door, allow("alice", "session.read"))
    before = everything(raw)
    assert_refused(await batch(alice, "s1", ("c1", "note.write"), ("c4", "note.write")), 403, kind="denied")
    assert everything(raw) == before


async def test_a_member_of_a_batch_is_not_denied_by_a_policy_that_has_moved(
    door: House, alice: Client
) -> None:
    """The other member is refused without asking the store, so that nothing but the denial could notice."""
    await alice.open("s1")
    await rule(door, allow("alice", "session.read"), allow("alice", "command.submit", interactions=["write"]))
    body = {
        "commands": [
            {"command_id": "c1", "name": "no.such", "input": {}},
            {"command_id": "c2", "name": "note.write", "input": {"v": "x" * 70_000}},
        ]
    }
    path = "/v1/sessions/s1/commands:batch"
    first = (await alice.http.post(path, json=body)).json()["receipts"]
    assert [receipt["error"]["code"] for receipt in first] == ["denied", "limit_exceeded"]
    await rule(door, allow("alice"))
    second = (await alice.http.post(path, json=body)).json()["receipts"]
    assert [receipt["error"]["code"] for receipt in second] == ["unsupported_command", "limit_exceeded"]


# Snapshots


@pytest.mark.requirement("RT-AUTH-08")
async def test_many_requests_under_a_stale_snapshot_read_the_new_one_once(
    door: House, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await alice.open("s1")
    await rule(door, allow("alice"))
    assert (await alice.submit("s1", "first")).status_code == 201
    handle = await door.handle()
    readings = 0
    load = handle.snapshots._load

    async def counted() -> Any:
        nonlocal readings
        readings += 1
        return await load()

    monkeypatch.setattr(handle.snapshots, "_load", counted)
    await rule(door, deny("mallory"), allow("alice"))
    answers = await asyncio.gather(*(alice.submit("s1", f"c{n}") for n in range(100)))
    assert {answer.status_code for answer in answers} == {201}
    assert readings == 1


@pytest.mark.requirement("RT-AUTH-07")
async def test_the_revisions_that_authorized_are_recorded_with_the_command(
    door: House, alice: Client
) -> None:
    await alice.open("s1")
    handle = await door.worker.tenant("acme")
    authority = (await handle.snapshots.get()).revisions.authority
    found = []
    for n in range(3):
        revision = await rule(door, deny(f"mallory{n}"), allow("alice"))
        assert (await alice.submit("s1", f"c{n}")).status_code == 201
        op = await handle.reads.operation(command_operation_id(authority, f"c{n}"), "s1")
        assert op is not None
        assert op.admission.policy_revision == revision
        directory = await door.admin.call("HGET", handle.keys.meta, "dir_rev")
        assert op.admission.directory_revision == directory.decode()
        found.append(revision)
    assert len(set(found)) == 3


async def test_a_token_made_later_is_known_without_a_move_of_the_policy(door: House, alice: Client) -> None:
    revision = await rule(door, allow("*"))
    token = await create_token(door.admin, "acme", "carol", ["caller"])
    carol = door.client_with(token.text())
    assert (await carol.open("c1")).status_code == 201
    assert (await (await door.handle()).snapshots.get()).revisions.policy == revision
