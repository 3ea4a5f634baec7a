"""PUT and GET of a tenant's policy: by operators, whole or not at all, never over somebody else's change."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import redis

from shared.domain.policy_document import MAX_RULES
from shared.store.registry import adopt_tenant, create_token, revoke_token
from tests.admission.house import Client, House
from tests.admission.looking import assert_refused, everything
from tests.admission.ruling import allow, deny, rule

PATH = "/v1/policy"


@pytest.fixture
async def olga(door: House) -> Client:
    """An operator."""
    return await door.client("olga", "operator")


async def put(client: Client, *rules: Any, match: str | None = None) -> httpx.Response:
    headers = {} if match is None else {"if-match": match}
    return await client.http.put(PATH, json={"rules": rules}, headers=headers)


async def test_a_policy_is_put_shown_and_in_force_at_once(door: House, alice: Client, olga: Client) -> None:
    await alice.open("s1")
    none = await olga.http.get(PATH)
    revision = none.json()["revision"]
    assert none.json() == {"revision": revision, "document": None, "appliedAtMs": None, "appliedBy": None}
    assert none.headers["etag"] == f'"{revision}"'
    answer = await put(olga, allow("alice", "session.open"))
    after = str(int(revision) + 1)
    assert (answer.status_code, answer.json()) == (200, {"revision": after, "changed": True})
    assert answer.headers["etag"] == f'"{after}"'
    assert (await alice.page("s1")).status_code == 404
    again = await put(olga, allow("alice", "session.open"))
    assert (again.status_code, again.json()) == (200, {"revision": after, "changed": False})
    shown = (await olga.http.get(PATH)).json()
    assert (shown["revision"], shown["document"]) == (after, {"rules": [allow("alice", "session.open")]})
    assert (shown["appliedBy"], shown["appliedAtMs"] > 0) == ("olga", True)
    assert (await put(olga, allow("alice"))).json()["changed"]
    assert (await alice.page("s1")).status_code == 200


@pytest.mark.requirement("RT-AUTH-04")
@pytest.mark.parametrize("roles", [["caller"], ["peer:alfa"], ["local-host"], ["caller", "peer:alfa"]])
async def test_who_is_no_operator_neither_puts_nor_sees_it(
    door: House, raw: redis.Redis, roles: list[str]
) -> None:
    await rule(door, allow("*", "*"))
    other = await door.client("other", *roles)
    before = everything(raw)
    assert_refused(await put(other, allow("*", "*")), 403, kind="denied")
    assert_refused(await other.http.get(PATH), 403, kind="denied")
    refused = await other.http.put(PATH, content=b"not even JSON", headers={"content-type": "text/plain"})
    assert_refused(refused, 403, kind="denied")
    assert everything(raw) == before


async def test_nobody_is_locked_out_but_by_a_rule_that_says_so(
    door: House, olga: Client, raw: redis.Redis
) -> None:
    assert (await put(olga)).status_code == 200
    assert (await put(olga, allow("alice"))).status_code == 200
    assert (await put(olga, deny("olga", "operate"))).status_code == 200
    before = everything(raw)
    assert_refused(await put(olga), 403, kind="denied")
    assert_refused(await olga.http.get(PATH), 403, kind="denied")
    assert everything(raw) == before
    paul = await door.client("paul", "operator")
    assert (await put(paul)).status_code == 200
    assert (await put(olga, allow("alice"))).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, 'policy: lacks the member "rules"'),
        ({"rules": [], "more": 1}, "/more: is not known here"),
        (
            {"rules": [allow("alice"), {**allow("alice"), "effect": "maybe"}]},
            "/rules/1/effect: must be one of",
        ),
        ({"rules": [{**allow("alice"), "actions": ["session.opens"]}]}, "/rules/0/actions/0: "),
        ({"rules": [{**allow("alice"), "ttlMs": 0}]}, "/rules/0/ttlMs: must be an integer from 1"),
        ({"rules": [allow("alice")] * (MAX_RULES + 1)}, "/rules: must be an array of 0 to 1000 items"),
        ([], "policy: must be an object"),
    ],
)
async def test_a_wrong_document_is_refused_with_its_place_and_nothing_is_stored(
    door: House, olga: Client, raw: redis.Redis, body: Any, said: str
) -> None:
    await rule(door, allow("alice"))
    before = everything(raw)
    assert_refused(await olga.http.put(PATH, json=body), 400, said)
    assert everything(raw) == before


async def test_what_is_no_document_is_refused(olga: Client, raw: redis.Redis) -> None:
    before = everything(raw)
    typed = {"content-type": "application/json"}
    twice = b'{"rules":[],"rules":[]}'
    assert_refused(await olga.http.put(PATH, content=twice, headers=typed), 400, "twice")
    assert_refused(await olga.http.put(PATH, content=b"rules: []", headers=typed), 400, "is not JSON")
    yaml = {"content-type": "application/yaml"}
    assert_refused(await olga.http.put(PATH, content=b"rules: []", headers=yaml), 415)
    large = b'{"rules":[]' + b" " * 1_048_576 + b"}"
    assert_refused(await olga.http.put(PATH, content=large, headers=typed), 413)
    assert_refused(await olga.http.put(PATH + "?x=1", json={"rules": []}), 400, "query")
    assert_refused(await olga.http.get(PATH + "?x=1"), 400, "query")
    assert everything(raw) == before


@pytest.mark.parametrize("match", ["7", "*", 'W/"1"', '"x"', '""', '"1", "2"', '"12345678901234567"'])
async def test_an_expectation_is_one_revision(olga: Client, raw: redis.Redis, match: str) -> None:
    before = everything(raw)
    assert_refused(await put(olga, match=match), 400, "If-Match")
    assert everything(raw) == before


async def test_a_change_that_builds_on_another_revision_is_a_conflict(
    door: House, olga: Client, raw: redis.Redis
) -> None:
    revision = await rule(door, allow("alice"))
    older = str(int(revision) - 1)
    before = everything(raw)
    assert_refused(await put(olga, allow("bob"), match=f'"{older}"'), 409, kind="conflict")
    assert everything(raw) == before
    repeated = await put(olga, allow("alice"), match=f'"{older}"')
    assert (repeated.status_code, repeated.json()["changed"]) == (200, False), "a repeated change is done"
    assert everything(raw) == before
    assert (await put(olga, allow("bob"), match=f'"{revision}"')).json()["changed"]


async def test_an_expectation_is_held_against_the_present_policy_and_not_a_remembered_one(
    door: House, olga: Client
) -> None:
    assert (await olga.http.get(PATH)).status_code == 200
    revision = await rule(door, allow("alice"))
    assert (await put(olga, allow("bob"), match=f'"{revision}"')).json()["changed"]


async def test_of_racing_changes_that_build_on_one_revision_one_wins(door: House, olga: Client) -> None:
    revision = (await olga.http.get(PATH)).json()["revision"]
    answers = await asyncio.gather(*(put(olga, allow(f"p{n}"), match=f'"{revision}"') for n in range(12)))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] + [409] * 11
    shown = (await olga.http.get(PATH)).json()
    assert shown["revision"] == str(int(revision) + 1)
    winner = next(n for n, answer in enumerate(answers) if answer.status_code == 200)
    assert shown["document"] == {"rules": [allow(f"p{winner}")]}


async def test_racing_changes_that_expect_nothing_follow_each_other(door: House, olga: Client) -> None:
    revision = (await olga.http.get(PATH)).json()["revision"]
    answers = await asyncio.gather(*(put(olga, allow(f"p{n}")) for n in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert (await olga.http.get(PATH)).json()["revision"] == str(int(revision) + 3)


@pytest.mark.requirement("RT-AUTH-08")
@pytest.mark.parametrize("match", [False, True])
@pytest.mark.parametrize("same", [False, True])
async def test_an_operator_that_is_revoked_meanwhile_changes_and_learns_nothing(
    door: House, olga: Client, raw: redis.Redis, match: bool, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked elsewhere after the door's last look: the next revision is easily guessed."""
    revision = int(await rule(door, allow("alice")))
    assert (await olga.http.get(PATH)).status_code == 200
    handle = await door.handle()
    remembered = await handle.snapshots.get()
    await revoke_token(door.admin, "acme", olga.token.split(".")[3])
    assert await handle.snapshots.get() is remembered
    before = everything(raw)
    expected = f'"{revision + 1}"' if match else None
    refused = await put(olga, allow("alice") if same else allow("mallory"), match=expected)
    assert_refused(refused, 401, kind="denied")
    assert everything(raw) == before


async def test_a_permission_of_a_retired_authority_changes_nothing_of_the_new_one(
    door: House, olga: Client, raw: redis.Redis
) -> None:
    """Adopted after the door's last look; the numbers of two authorities' revisions say nothing together."""
    revision = (await olga.http.get(PATH)).json()["revision"]
    await adopt_tenant(door.admin, "acme")
    raw.hset("lg:{acme}:meta", "policy_rev", revision)
    before = everything(raw)
    assert_refused(await put(olga, allow("mallory")), 401, kind="denied")
    assert everything(raw) == before


@pytest.mark.requirement("DASP-CORE-012g")
async def test_a_lost_tenant_gets_no_policy(door: House, olga: Client, raw: redis.Redis) -> None:
    assert (await olga.http.get(PATH)).status_code == 200
    raw.delete("lg:{acme}:meta")
    before = everything(raw)
    assert (await put(olga, allow("alice"))).status_code == 503
    assert (await olga.http.get(PATH)).status_code == 503
    assert everything(raw) == before


async def test_a_policy_is_its_tenants_alone(door: House, alice: Client, olga: Client) -> None:
    await door.tenant("zeta")
    there = await door.client("alice", tenant="zeta")
    assert (await put(olga)).status_code == 200
    assert (await alice.open("s1")).status_code == 403
    assert (await there.open("s1")).status_code == 201
    shown = await (await door.client("olga", "operator", tenant="zeta")).http.get(PATH)
    assert shown.json()["document"] is None


async def test_a_policy_as_large_as_allowed_is_stored_and_decides(
    door: House, alice: Client, olga: Client
) -> None:
    wide = {**allow("nobody"), "sessions": [f"s{n}*x" for n in range(200)]}
    rules = [*[wide] * 60, allow("alice")]
    assert (await put(olga, *rules)).status_code == 200
    assert (await alice.open("s1")).status_code == 201
    shown = (await olga.http.get(PATH)).json()
    assert json.dumps(shown["document"], sort_keys=True) == json.dumps({"rules": rules}, sort_keys=True)


async def test_a_new_operators_token_works_where_the_policy_was_remembered(door: House, olga: Client) -> None:
    assert (await put(olga, allow("alice"))).status_code == 200
    token = await create_token(door.admin, "acme", "paul", ["operator"])
    assert (await door.client_with(token.text()).http.get(PATH)).status_code == 200
