"""What the host says of itself: authority, liveness, readiness, metrics and its own description."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest
import redis
from jsonschema_rs import Draft202012Validator

from shared.domain.limits import TenantLimits
from shared.store.embedded import EmbeddedStore
from shared.store.inspection import Boundary
from tests.admission.house import COUNTER, NOTES, Client, House, house
from tests.admission.looking import assert_refused, everything
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy
from tests.support.raw import raw_client


def nobody(door: House) -> httpx.AsyncClient:
    """A client without a token."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{door.port}", timeout=20)


async def get(door: House, path: str) -> httpx.Response:
    async with nobody(door) as client:
        return await client.get(path)


@pytest.mark.unrestricted("a door that may not read settings does not know the boundary")
@pytest.mark.requirement("DASP-CORE-012d")
async def test_the_authority_says_who_it_is_and_what_it_keeps(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    before = everything(raw)
    body = (await alice.http.get("/v1/authority")).json()
    authority = (await (await door.handle()).snapshots.get()).revisions.authority
    assert (body["tenant"], body["authority"]) == ("acme", authority)
    assert body["source"] == f"urn:lockgate:acme:{authority}"
    assert body["core"] == "draft-01"
    durability = body["durability"]
    assert set(durability) == {"boundary", "appendfsync", "replicas", "covers", "doesNotCover"}
    assert (durability["boundary"], durability["appendfsync"]) == ("process-restart", "always")
    assert durability["covers"]
    assert durability["doesNotCover"]
    assert body["capabilities"] == {
        "resultFencing": True,
        "effectFencing": False,
        "workflow": False,
        "memory": False,
    }
    assert everything(raw) == before


@pytest.mark.requirement("DASPX-06")
async def test_the_authority_publishes_the_limits_that_hold(alice: Client) -> None:
    limits = (await alice.http.get("/v1/authority")).json()["limits"]
    assert limits == {
        "messageBytes": 1_048_576,
        "updateBytes": 65_536,
        "stringBytes": 65_536,
        "payloadNesting": 16,
        "payloadEntries": 1_024,
        "pageUpdates": 100,
        "batchCommands": 100,
        "waitSeconds": 30,
        "cursorsPerSession": 1_000,
        "tenant": msgspec.to_builtins(TenantLimits()),
    }


async def test_profiles_are_told_to_who_may_use_them(door: House, alice: Client) -> None:
    profiles = (await alice.http.get("/v1/authority")).json()["profiles"]
    offered = {offer["id"]: offer for offer in profiles}
    assert set(offered) == {COUNTER["id"], NOTES["id"]}
    counter = offered[COUNTER["id"]]
    assert (counter["version"], counter["execution"]) == ("1", "serial")
    assert counter["commands"] == ["counter.add"]
    assert counter["contractDigest"] == door.contracts["demo.counter"].digest
    for role in ("operator", "peer:alfa"):
        other = await door.client("other", role)
        assert (await other.http.get("/v1/authority")).json()["profiles"] == []


async def test_one_tenants_authority_tells_nothing_of_another(door: House, alice: Client) -> None:
    await door.tenant("zeta")
    zeta = await door.client("alice", tenant="zeta")
    theirs = (await zeta.http.get("/v1/authority")).json()
    ours = (await alice.http.get("/v1/authority")).text
    assert theirs["tenant"] == "zeta"
    assert theirs["authority"] not in ours


@pytest.mark.requirement("DASP-CORE-012e")
async def test_a_volatile_store_says_so(own_store: EmbeddedStore) -> None:
    with raw_client(own_store.url) as raw:
        raw.config_set("appendonly", "no")
    async with house(own_store.url) as door:
        body = (await (await door.client()).http.get("/v1/authority")).json()
        assert body["durability"]["boundary"] == "volatile"
        assert body["capabilities"]["memory"] is True


async def test_a_process_that_lives_says_so_whatever_the_store_does(own_store: EmbeddedStore) -> None:
    async with FaultProxy(own_store.url) as proxy, house(proxy.url) as door:
        assert (await get(door, "/healthz")).json() == {"status": "ok", "reason": None}
        proxy.refuse()
        response = await get(door, "/healthz")
        assert (response.status_code, response.json()["status"]) == (200, "ok")


async def test_a_process_that_may_serve_is_ready_and_stores_nothing_for_it(
    door: House, raw: redis.Redis
) -> None:
    before = everything(raw)
    response = await get(door, "/readyz")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    assert everything(raw) == before


@pytest.mark.case(98)
@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-lru", "volatile-ttl"])
async def test_a_store_that_evicts_is_not_ready_and_admits_nothing(
    own_store: EmbeddedStore, policy: str
) -> None:
    with raw_client(own_store.url) as raw:
        raw.config_set("maxmemory-policy", policy)
        async with house(own_store.url) as door:
            alice = await door.client("alice")
            response = await get(door, "/readyz")
            assert (response.status_code, response.json()["status"]) == (503, "unready")
            reason = response.json()["reason"]
            assert policy in reason
            assert "noeviction" in reason
            assert response.headers["retry-after"]
            before = everything(raw)
            assert_refused(await alice.open("s1"), 503, policy, kind="unavailable")
            assert everything(raw) == before
            raw.config_set("maxmemory-policy", "noeviction")

            async def ready() -> bool:
                return (await get(door, "/readyz")).status_code == 200

            await wait_until(ready)
            assert (await alice.open("s1")).status_code == 201


async def test_a_store_below_its_declared_durability_is_not_ready(own_store: EmbeddedStore) -> None:
    with raw_client(own_store.url) as raw:
        raw.config_set("appendonly", "no")
    async with house(own_store.url, declared=Boundary.POWER_LOSS) as door:
        response = await get(door, "/readyz")
        assert response.status_code == 503
        assert "below the declared power-loss" in response.json()["reason"]


async def test_without_its_store_a_door_is_not_ready_and_comes_back_by_itself(
    own_store: EmbeddedStore,
) -> None:
    async with FaultProxy(own_store.url) as proxy, house(proxy.url) as door:
        alice = await door.client("alice")
        assert (await alice.open("s1")).status_code == 201
        proxy.refuse()

        async def status(expected: int) -> bool:
            return (await get(door, "/readyz")).status_code == expected

        await wait_until(lambda: status(503), timeout=20)
        body = (await get(door, "/readyz")).json()
        assert body["status"] == "unready"
        assert body["reason"]
        proxy.pass_on()
        await wait_until(lambda: status(200), timeout=20)


async def test_a_door_that_ends_is_not_ready(door: House) -> None:
    assert (await get(door, "/readyz")).status_code == 200
    door.door.drain()
    response = await get(door, "/readyz")
    assert (response.status_code, response.json()["reason"]) == (503, "the process is ending")
    assert (await get(door, "/healthz")).status_code == 200


async def test_metrics_have_their_own_port_unless_they_share_this_one(redis_url: str) -> None:
    async with house(redis_url) as door:
        assert (await get(door, "/metrics")).status_code == 404
    async with house(redis_url, tenants=(), metrics_port=8080, port=8080) as door:
        response = await get(door, "/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")


async def test_metrics_count_by_route_and_never_by_id(redis_url: str) -> None:
    async with house(redis_url, metrics_port=8080, port=8080) as door:
        alice = await door.client("alice")
        counted = 'route="/v1/sessions/{session_id}",service="admission",status="404"'

        async def count() -> float:
            page = (await get(door, "/metrics")).text
            (value,) = re.findall(
                r'^lockgate_http_requests_total\{method="GET",' + re.escape(counted) + r"\} (\S+)$",
                page,
                re.MULTILINE,
            ) or ["0"]
            assert "zq-session" not in page
            assert alice.token not in page
            assert "zq-path" not in page
            return float(value)

        before = await count()
        for i in range(3):
            await alice.http.get(f"/v1/sessions/zq-session-{i}")
            await alice.http.get(f"/zq-path-{i}")
        assert await count() == before + 3


def schemas(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Every schema that a route names."""
    found: list[dict[str, Any]] = []
    for methods in document["paths"].values():
        for row in methods.values():
            found += [parameter["schema"] for parameter in row["parameters"]]
            bodies = [row.get("requestBody", {}), *row["responses"].values()]
            found += [kind["schema"] for body in bodies for kind in body.get("content", {}).values()]
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def schema_of(document: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    response = document["paths"][path][method]["responses"][str(status)]
    found: dict[str, Any] = response["content"]["application/json"]["schema"]
    return found


@pytest.fixture
async def described(door: House) -> dict[str, Any]:
    response = await get(door, "/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = response.json()
    return found


async def test_the_description_names_every_route(described: dict[str, Any]) -> None:
    assert described["openapi"].startswith("3.1.")
    assert {path: set(methods) for path, methods in described["paths"].items()} == {
        "/v1/sessions/{session_id}": {"get", "put", "delete"},
        "/v1/sessions/{session_id}/commands": {"post"},
        "/v1/sessions/{session_id}/commands:batch": {"post"},
        "/v1/sessions/{session_id}/commands/{command_id}": {"get"},
        "/v1/sessions/{session_id}/updates": {"get"},
        "/v1/sessions/{session_id}/cursors/{client}": {"get", "put"},
        "/v1/policy": {"get", "put"},
        "/v1/authority": {"get"},
        "/healthz": {"get"},
        "/readyz": {"get"},
        "/openapi.json": {"get"},
    }


async def test_the_description_is_whole(described: dict[str, Any]) -> None:
    """Schemas compile, references resolve, operations have names of their own, path values are described."""
    for schema in schemas(described):
        validator(described, schema)
    names = []
    for path, methods in described["paths"].items():
        for row in methods.values():
            names.append(row["operationId"])
            placed = {p["name"] for p in row["parameters"] if p["in"] == "path"}
            assert placed == set(re.findall(r"{(\w+)}", path))
            assert row["responses"]
            assert all(response["description"] for response in row["responses"].values())
    assert len(names) == len(set(names))


async def test_routes_with_a_token_say_so_and_the_others_need_none(
    door: House, described: dict[str, Any]
) -> None:
    async with nobody(door) as client:
        for path, methods in described["paths"].items():
            for method, row in methods.items():
                response = await client.request(method, re.sub(r"{\w+}", "x", path))
                assert (response.status_code == 401) == bool(row["security"]), (method, path)
                assert ("401" in row["responses"]) == bool(row["security"]), (method, path)


def check(described: dict[str, Any], response: httpx.Response, method: str, path: str, status: int) -> None:
    """The response has this status and the shape that the description gives for it."""
    assert response.status_code == status, response.text
    validator(described, schema_of(described, method, path, status)).validate(response.json())


async def test_answers_are_as_described(door: House, alice: Client, described: dict[str, Any]) -> None:
    """One answer of every kind against the schema that the description gives for it."""
    session, command = "/v1/sessions/{session_id}", {"command_id": "c1", "name": "note.write", "input": {}}
    commands = session + "/commands"

    send = alice.http.request
    check(described, await alice.open("s1"), "put", session, 201)
    check(described, await alice.open("s1"), "put", session, 200)
    check(described, await alice.open("s1", actor="other"), "put", session, 409)
    check(described, await alice.open("s2", {"id": "urn:x:none", "version": "1"}), "put", session, 422)
    check(described, await alice.raw("s1", b"{"), "post", commands, 400)
    check(described, await alice.raw("s1", b"{}", {"content-type": "text/plain"}), "post", commands, 415)
    check(described, await alice.raw("s1", b" " * 1_048_577), "post", commands, 413)
    check(described, await alice.submit("s1", "c1"), "post", commands, 201)
    check(described, await alice.submit("s1", "c1"), "post", commands, 200)
    check(described, await alice.submit("s1", "c1", {"a": 1}), "post", commands, 409)
    check(described, await alice.submit("s1", "c2", name="note.none"), "post", commands, 422)
    check(described, await alice.submit("none", "c2"), "post", commands, 404)
    batch = await send("POST", "/v1/sessions/s1/commands:batch", json={"commands": [command]})
    check(described, batch, "post", commands + ":batch", 200)
    check(described, await alice.outcome("s1", "c1"), "get", commands + "/{command_id}", 200)
    await door.work("c1", {"v": 1}, session_id="s1", updates={"note.written": {"v": 1}})
    check(described, await alice.outcome("s1", "c1"), "get", commands + "/{command_id}", 200)
    check(described, await alice.page("s1"), "get", session + "/updates", 200)
    check(described, await alice.page("s1", after=99), "get", session + "/updates", 400)
    check(described, await send("GET", "/v1/sessions/s1"), "get", session, 200)
    cursor = "/v1/sessions/s1/cursors/x"
    check(described, await send("PUT", cursor, json={"cursor": 1}), "put", session + "/cursors/{client}", 200)
    check(described, await send("GET", cursor), "get", session + "/cursors/{client}", 200)
    check(described, await send("GET", "/v1/authority"), "get", "/v1/authority", 200)
    check(described, await get(door, "/healthz"), "get", "/healthz", 200)
    check(described, await get(door, "/readyz"), "get", "/readyz", 200)
    check(described, await get(door, "/v1/authority"), "get", "/v1/authority", 401)
    waited = await alice.submit("s1", "c1", headers={"prefer": "wait=1"})
    check(described, waited, "post", commands, 200)
    check(described, await alice.close("s1"), "delete", session, 202)


@pytest.mark.requirement("DASP-CORE-012b")
async def test_a_full_store_answers_as_described_and_still_answers_retries(own_store: EmbeddedStore) -> None:
    commands = "/v1/sessions/{session_id}/commands"
    async with house(own_store.url) as door:
        described = (await get(door, "/openapi.json")).json()
        alice = await door.client("alice")
        await alice.open("s1")
        accepted = await alice.submit("s1", "c1")
        with raw_client(own_store.url) as raw:
            raw.config_set("maxmemory", "1")
        refused = await alice.submit("s1", "c2")
        check(described, refused, "post", commands, 503)
        assert refused.headers["retry-after"]
        assert (refused.json()["disposition"], refused.json()["error"]["retryable"]) == ("rejected", True)
        assert refused.json()["error"]["code"] == "limit_exceeded"
        again = await alice.submit("s1", "c1")
        assert (again.status_code, again.json()) == (200, {**accepted.json(), "disposition": "duplicate"})
        assert (await alice.page("s1")).json()["head"] == 1


async def test_bodies_that_are_refused_are_none_of_the_described(
    alice: Client, described: dict[str, Any]
) -> None:
    """The description is as closed as the door."""
    content = described["paths"]["/v1/sessions/{session_id}/commands"]["post"]["requestBody"]["content"]
    checker = validator(described, content["application/json"]["schema"])
    good = {"command_id": "c1", "name": "note.write", "input": {}}
    assert checker.is_valid(good)
    await alice.open("s1")
    for bad in (
        {**good, "more": 1},
        {**good, "name": "Bad"},
        {**good, "command_id": "a b"},
        {**good, "input": 1},
    ):
        assert not checker.is_valid(bad)
        response = await alice.http.post("/v1/sessions/s1/commands", json=bad)
        assert response.status_code == 400


async def test_a_door_with_too_many_requests_says_so(redis_url: str) -> None:
    async with house(redis_url, max_requests=1) as door:
        alice = await door.client("alice")
        await alice.open("s1")
        async with alice.http.stream(
            "GET", "/v1/sessions/s1/updates", headers={"accept": "text/event-stream"}
        ) as stream:
            assert stream.status_code == 200
            response = await alice.http.get("/v1/sessions/s1")
            assert_refused(response, 503, "too many requests", kind="unavailable")
            assert response.headers["retry-after"]

        async def served() -> bool:
            return (await alice.http.get("/v1/sessions/s1")).status_code == 200

        await wait_until(served)
