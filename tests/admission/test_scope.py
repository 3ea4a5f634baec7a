"""One id, many worlds: tenants, principals and sessions that share nothing but the spelling of an id."""

from __future__ import annotations

import httpx
import pytest
import redis

from tests.admission.house import Client, House
from tests.admission.looking import everything


async def sequence_of(client: Client, session_id: str, command_id: str) -> int:
    answer = await client.submit(session_id, command_id)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["admission_sequence"])


@pytest.mark.case(1, 2)
async def test_a_command_id_of_another_tenant_is_a_new_command_and_discloses_nothing(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await door.tenant("other")
    there = await door.client("alice", tenant="other")
    for client in (alice, there):
        await client.open("s1")
    assert await sequence_of(alice, "s1", "1") == 1
    before = await alice.outcome("s1", "1")
    assert await sequence_of(there, "s1", "1") == 1
    assert (await there.submit("s1", "1", {"changed": True})).status_code == 409
    assert (await alice.outcome("s1", "1")).content == before.content
    operations = raw.keys("lg:{*}:op:*")
    assert isinstance(operations, list)
    assert len(set(operations)) == 2


@pytest.mark.case(3)
async def test_ids_and_separators_never_meet_in_one_key(alice: Client, raw: redis.Redis) -> None:
    """Sessions ``a`` and ``a:b`` with commands ``b:c`` and ``c``: joined by a colon they would be one."""
    for session_id in ("a", "a:b"):
        await alice.open(session_id)
    assert await sequence_of(alice, "a", "b:c") == 1
    assert await sequence_of(alice, "a:b", "c") == 1
    found = raw.keys("lg:{acme}:op:*")
    assert isinstance(found, list)
    assert len(found) == 2


@pytest.mark.case(4)
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer x", "Basic YTpi", "Bearer lg1.acme..."])
async def test_without_a_tenant_nothing_is_ever_written(
    door: House, alice: Client, raw: redis.Redis, header: str | None
) -> None:
    await alice.open("s1")
    before = everything(raw)
    headers = {} if header is None else {"authorization": header}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{door.port}", headers=headers) as nobody:
        body = {"command_id": "c1", "name": "note.write", "input": {}}
        answers = [
            await nobody.post("/v1/sessions/s1/commands", json=body),
            await nobody.put(
                "/v1/sessions/s2", json={"actor_id": "a", "profile": {"id": "urn:x", "version": "1"}}
            ),
            await nobody.delete("/v1/sessions/s1"),
        ]
    assert [(a.status_code, a.json()["kind"]) for a in answers] == [(401, "denied")] * 3
    assert everything(raw) == before


@pytest.mark.requirement("DASP-CORE-001a", "DASP-CORE-003d")
async def test_another_principal_learns_nothing_from_a_retry_and_leaves_no_record(
    alice: Client, bob: Client, raw: redis.Redis
) -> None:
    """An equal retry, a changed one and a first one, into a session that is not bob's: all as if it were
    missing.
    """
    await alice.open("s1")
    await alice.submit("s1", "c1", {"n": 1})
    before = everything(raw)
    missing = await bob.submit("nowhere", "c1", {"n": 1})
    tries = [
        await bob.submit("s1", "c1", {"n": 1}),
        await bob.submit("s1", "c1", {"n": 2}),
        await bob.submit("s1", "c2", {"n": 1}),
    ]
    assert missing.status_code == 404
    for answer in tries:
        assert (answer.status_code, answer.content) == (404, missing.content)
        assert answer.headers.get("location") is None
    assert everything(raw) == before


@pytest.mark.requirement("DASPX-04")
async def test_hidden_missing_and_unknown_look_the_same_on_every_read(alice: Client, bob: Client) -> None:
    await alice.open("s1")
    await alice.submit("s1", "c1")
    paths = ["", "/commands/c1", "/updates?after=0", "/cursors/me"]
    for path in paths:
        hidden = await bob.http.get(f"/v1/sessions/s1{path}")
        absent = await bob.http.get(f"/v1/sessions/s9{path}")
        assert (hidden.status_code, hidden.content) == (404, absent.content), path
    never = await alice.outcome("s1", "never-sent")
    assert (never.status_code, never.json()) == (404, {"kind": "denied", "description": "not found"})


@pytest.mark.case(6)
@pytest.mark.requirement("DASP-CORE-003b")
async def test_one_changed_leaf_deep_inside_conflicts_and_changes_nothing(
    alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    deep = {"a": [{"b": {"c": [1, 2, {"leaf": "x"}]}}]}
    await alice.submit("s1", "c1", deep)
    before = everything(raw)
    changed = {"a": [{"b": {"c": [1, 2, {"leaf": "y"}]}}]}
    answer = await alice.submit("s1", "c1", changed)
    assert answer.status_code == 409
    assert answer.json()["disposition"] == "rejected"
    assert answer.json()["error"]["code"] == "conflict"
    assert answer.json()["admission_sequence"] is None
    assert "leaf" not in answer.text
    assert everything(raw) == before


@pytest.mark.requirement("RT-STORE-10")
async def test_no_route_takes_a_record(alice: Client, raw: redis.Redis) -> None:
    """What only scripts write has no member in any body, and a member that no body has is refused."""
    described = (await alice.http.get("/openapi.json")).json()
    records = {
        "fence",
        "epoch",
        "lease",
        "holder",
        "gate",
        "decision",
        "phase",
        "rev",
        "deadline",
        "admittedAtMs",
    }
    taken = {
        member
        for name in ("SessionOpen", "CommandSubmit", "BatchSubmit", "CursorPut")
        for member in described["components"]["schemas"][name]["properties"]
    }
    assert not taken & records
    await alice.open("s1")
    before = everything(raw)
    for member in sorted(records):
        body = {"command_id": "c1", "name": "note.write", "input": {}, member: 1}
        answer = await alice.http.post("/v1/sessions/s1/commands", json=body)
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid-input")
        assert member in answer.json()["description"]
    assert everything(raw) == before
