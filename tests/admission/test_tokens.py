"""Bearer tokens: bad ones are 401, a lost tenant is 503, a revoked one is over with the next request."""

from __future__ import annotations

import secrets

import httpx
import pytest
import redis

from shared.store.embedded import EmbeddedStore
from shared.store.keys import TENANTS, Keys
from shared.store.registry import adopt_tenant, create_token, list_tokens, revoke_token
from tests.admission.house import NOTES, Client, House, house
from tests.admission.looking import assert_refused, everything, plain, read_reply
from tests.support.raw import raw_client

AUTHORITY = "/v1/authority"


def parts(token: str) -> list[str]:
    return token.split(".")


def changed(token: str, at: int, value: str) -> str:
    found = parts(token)
    found[at] = value
    return ".".join(found)


async def ask(door: House, token: str, path: str = AUTHORITY) -> httpx.Response:
    return await door.client_with(token).http.get(path)


async def everywhere(client: Client) -> list[httpx.Response]:
    """One request to every route that needs a token."""
    base, send = "/v1/sessions/s1", client.http.request
    command = {"command_id": "c1", "name": "note.write", "input": {}}
    return [
        await send("GET", AUTHORITY),
        await send("PUT", base, json={"actor_id": "a1", "profile": NOTES}),
        await send("GET", base),
        await send("DELETE", base),
        await send("POST", base + "/commands", json=command),
        await send("POST", base + "/commands:batch", json={"commands": [command]}),
        await send("GET", base + "/commands/c1"),
        await send("GET", base + "/commands/c1", headers={"prefer": "wait=30"}),
        await send("GET", base + "/updates"),
        await send("GET", base + "/updates", headers={"accept": "text/event-stream"}),
        await send("GET", base + "/updates", headers={"prefer": "wait=30"}),
        await send("GET", base + "/cursors/x"),
        await send("PUT", base + "/cursors/x", json={"cursor": 0}),
    ]


def assert_unauthenticated(response: httpx.Response) -> None:
    assert_refused(response, 401, kind="denied")
    assert response.headers["www-authenticate"].startswith("Bearer")


def assert_lost(response: httpx.Response) -> None:
    assert_refused(response, 503, kind="unavailable")
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.requirement("RT-HTTP-06")
async def test_every_route_refuses_a_token_that_is_none(door: House, alice: Client, raw: redis.Redis) -> None:
    await alice.open("s1")
    garbled = changed(alice.token, 4, secrets.token_urlsafe(32))
    before = everything(raw)
    for response in await everywhere(door.client_with(garbled)):
        assert_unauthenticated(response)
    assert everything(raw) == before


GARBLED = [
    b"",
    b"Bearer",
    b"Bearer ",
    b"Bearer x",
    b"Bearer lg1.acme",
    b"Bearer lg2.%b",
    b"Basic YTpi",
    b"Bearer %b x",
    b"Bearer %bx",
    b"Bearer %b.",
    b"Bearer lg1.%b",
    b"Token %b",
    b"Bearer,%b",
    b"Bearer %b,%b",
    b'Bearer "%b"',
    b"Bearer \xff\xfe",
    b"Bearer " + "é".encode(),
    b"Bearer " + b"a" * 9_000,
    b"Bearer lg1.-acme.00000000.0000000000000000." + b"a" * 43,
    b"Bearer lg1.ACME.00000000.0000000000000000." + b"a" * 43,
    b"Bearer lg1.*.00000000.0000000000000000." + b"a" * 43,
    b"Bearer lg1." + b"a" * 64 + b".00000000.0000000000000000." + b"a" * 43,
    b"Bearer lg1.{acme}:meta.00000000.0000000000000000." + b"a" * 43,
]


@pytest.mark.requirement("RT-HTTP-06")
@pytest.mark.parametrize("value", GARBLED, ids=[str(i) for i in range(len(GARBLED))])
async def test_a_garbled_header_is_401(door: House, alice: Client, raw: redis.Redis, value: bytes) -> None:
    before = everything(raw)
    line = b"authorization: " + value.replace(b"%b", alice.token.encode())
    status, headers, body = read_reply(await door.raw_http(plain("GET", AUTHORITY, line)))
    assert (status, headers["content-type"]) == (401, "application/json")
    assert b'"kind":"denied"' in body
    assert alice.token.encode() not in body
    assert everything(raw) == before


async def test_no_header_is_401(door: House) -> None:
    status, headers, _ = read_reply(await door.raw_http(plain("GET", AUTHORITY)))
    assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="lockgate"')


@pytest.mark.parametrize("at", [3, 4], ids=["token-id", "secret"])
async def test_a_wrong_part_is_401_and_says_no_more_than_any_other(
    door: House, alice: Client, at: int
) -> None:
    """Whether the id or the secret is wrong is not told: neither can be guessed for itself."""
    assert (await ask(door, alice.token)).status_code == 200
    other = secrets.token_hex(8) if at == 3 else secrets.token_urlsafe(32)
    response = await ask(door, changed(alice.token, at, other))
    assert_unauthenticated(response)
    assert response.json()["description"] == "the token is unknown or revoked"


async def test_only_a_hash_of_the_secret_is_stored(alice: Client, raw: redis.Redis) -> None:
    assert all(parts(alice.token)[4].encode() not in value for value in everything(raw).values())


async def test_a_token_of_one_tenant_is_none_in_another(door: House, alice: Client) -> None:
    """Its tenant and authority are looked at together: neither can be put in place of the other's."""
    await door.tenant("zeta")
    stranger = await door.client("alice", tenant="zeta")
    assert (await stranger.http.get(AUTHORITY)).json()["tenant"] == "zeta"
    moved = changed(alice.token, 1, "zeta")
    assert_lost(await ask(door, moved))
    both = changed(moved, 2, parts(stranger.token)[2])
    assert_unauthenticated(await ask(door, both))


async def test_a_token_that_expires_is_401_from_then_on(
    door: House, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's clock decides, here moved on in the door's view of it; also for one that was remembered."""
    token = await door.token("alice", expires_in_s=60)
    assert (await ask(door, token)).status_code == 200
    lower_ms = door.runtime.clock.lower_ms
    moved = 0

    def later(at: float | None = None) -> int:
        return lower_ms(at) + moved

    monkeypatch.setattr(door.runtime.clock, "lower_ms", later)
    moved = 55_000
    assert (await ask(door, token)).status_code == 200
    moved = 60_000
    response = await ask(door, token)
    assert_unauthenticated(response)
    assert response.json()["description"] == "the token has expired"


async def test_a_revoked_token_is_401_with_the_next_request_everywhere(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    """The door knows the token from every route; the revocation reaches it by the policy revision alone."""
    await alice.open("s1")
    await alice.submit("s1", "c1")
    for response in (await alice.http.get("/v1/sessions/s1"), await alice.page("s1")):
        assert response.status_code == 200
    revision = raw.hget(Keys("acme").meta.decode(), "policy_rev")
    await revoke_token(door.admin, "acme", parts(alice.token)[3])
    assert raw.hget(Keys("acme").meta.decode(), "policy_rev") != revision
    before = everything(raw)
    first = await alice.submit("s1", "c2")
    assert_unauthenticated(first)
    for response in await everywhere(alice):
        assert_unauthenticated(response)
    assert everything(raw) == before


@pytest.mark.parametrize("route", range(13))
async def test_each_route_finds_the_revocation_by_itself(door: House, alice: Client, route: int) -> None:
    """Each as the first request after the revocation, with the token still remembered."""
    await alice.open("s1")
    await alice.submit("s1", "c1")
    await door.work("c1", session_id="s1")
    await revoke_token(door.admin, "acme", parts(alice.token)[3])

    class Only(Exception):
        pass

    sent = 0
    original = alice.http.request

    async def one(method: str, path: str, **more: object) -> httpx.Response:
        nonlocal sent
        sent += 1
        if sent - 1 == route:
            assert_unauthenticated(await original(method, path, **more))  # type: ignore[arg-type]
            raise Only
        return httpx.Response(200)

    alice.http.request = one  # type: ignore[method-assign, assignment]
    with pytest.raises(Only):
        await everywhere(alice)


async def test_revoking_one_token_leaves_the_others(door: House, alice: Client) -> None:
    other = await door.client("alice")
    await revoke_token(door.admin, "acme", parts(alice.token)[3])
    assert (await other.http.get(AUTHORITY)).status_code == 200


async def test_a_token_made_later_is_known_at_once(door: House, alice: Client) -> None:
    assert (await alice.http.get(AUTHORITY)).status_code == 200
    late = await create_token(door.admin, "acme", "carol", ("caller",))
    assert (await ask(door, late.text())).status_code == 200


async def test_roles_decide_what_a_token_may_do(door: House, alice: Client) -> None:
    await alice.open("s1")
    await alice.submit("s1", "c1")
    operator = await door.client("olga", "operator")
    peer = await door.client("pam", "peer:alfa")
    both = await door.client("alice", "caller", "operator")
    assert (await operator.http.get("/v1/sessions/s1")).status_code == 200
    assert (await operator.outcome("s1", "c1")).status_code == 200
    assert_refused(await operator.submit("s1", "c2"), 403, kind="denied")
    assert_refused(await operator.open("s9"), 403, kind="denied")
    assert (await both.submit("s1", "c2")).status_code == 201
    assert_refused(await peer.open("s9"), 403, kind="denied")
    for response in (await peer.submit("s1", "c3"), await peer.page("s1"), await peer.close("s1")):
        assert_refused(response, 404, kind="denied")
    assert (await operator.close("s1")).status_code == 202


@pytest.mark.unrestricted("asks for a tenant that the user does not serve")
async def test_an_unknown_tenant_is_503(door: House, raw: redis.Redis) -> None:
    before = everything(raw)
    token = f"lg1.nobody.{secrets.token_hex(4)}.{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}"
    for response in await everywhere(door.client_with(token)):
        assert_lost(response)
    assert everything(raw) == before


@pytest.mark.requirement("DASP-CORE-012g")
async def test_after_a_flush_a_warm_door_says_503_and_makes_nothing(own_store: EmbeddedStore) -> None:
    async with house(own_store.url) as door:
        alice = await door.client("alice")
        await alice.open("s1")
        await alice.submit("s1", "c1")
        assert (await alice.http.get("/v1/sessions/s1")).status_code == 200
        with raw_client(own_store.url) as raw:
            raw.flushall()
            for response in await everywhere(alice):
                assert_lost(response)
            assert everything(raw) == {}


@pytest.mark.requirement("DASP-CORE-012g")
async def test_after_a_flush_a_fresh_door_says_503_and_makes_nothing(own_store: EmbeddedStore) -> None:
    async with house(own_store.url) as door:
        token = await door.token("alice")
    with raw_client(own_store.url) as raw:
        raw.flushall()
        async with house(own_store.url, tenants=()) as door:
            for response in await everywhere(door.client_with(token)):
                assert_lost(response)
        assert everything(raw) == {}


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.parametrize("gone", ["meta", "registration"])
async def test_half_a_tenant_is_a_lost_one(
    redis_url: str, alice: Client, raw: redis.Redis, gone: str
) -> None:
    await alice.open("s1")
    if gone == "meta":
        raw.delete(Keys("acme").meta)
    else:
        raw.hdel(TENANTS.decode(), "acme")
    async with house(redis_url, tenants=()) as fresh:
        assert_lost(await ask(fresh, alice.token, "/v1/sessions/s1"))
        assert_lost(await ask(fresh, alice.token))


@pytest.mark.case(70)
async def test_after_adoption_old_tokens_are_401_and_old_cursors_410(door: House) -> None:
    """The recreated history counts from one again: an old cursor must not swallow what is new."""
    alice = await door.client("alice")
    await alice.open("s1")
    for i in range(10):
        await alice.submit("s1", f"c{i}")
    old8 = parts(alice.token)[2]
    handle = await door.handle()
    await door.admin.call("DEL", handle.keys.meta)
    assert_lost(await alice.http.get("/v1/sessions/s1"))
    await adopt_tenant(door.admin, "acme")
    for response in await everywhere(alice):
        assert_unauthenticated(response)
    assert "retired authority" in (await alice.http.get(AUTHORITY)).json()["description"]
    assert await list_tokens(door.admin, "acme") == {}
    again = await door.client("alice")
    new8 = parts(again.token)[2]
    assert new8 != old8
    assert_refused(await again.http.get("/v1/sessions/s1"), 404, kind="denied")
    assert (await again.open("s1")).status_code == 201
    stream = {"accept": "text/event-stream"}
    updates = "/v1/sessions/s1/updates"
    for cursor in (0, 3, 10):
        last = {**stream, "last-event-id": f"{old8}-{cursor}"}
        assert_refused(await again.http.get(updates, headers=last), 410, kind="expired")
    page = (await again.page("s1")).json()
    assert (page["head"], page["events"]) == (0, [])
