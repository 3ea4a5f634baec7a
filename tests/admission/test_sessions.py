"""Opening and viewing sessions."""

from __future__ import annotations

import asyncio

import pytest
import redis

from shared.store.registry import create_token
from tests.admission.house import COUNTER, NOTES, Client, House
from tests.admission.looking import assert_refused, everything
from tests.support.world import TENANT


@pytest.mark.requirement("DASPX-11", "DASP-CORE-011a")
async def test_open_is_201_once_then_200_and_adds_nothing(alice: Client, raw: redis.Redis) -> None:
    first = await alice.open("s1")
    opened = everything(raw)
    again = await alice.open("s1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert everything(raw) == opened
    expected = {"session_id": "s1", "actor_id": "a1", "profile": NOTES, "cursor": 0}
    assert first.json() == again.json() == expected
    await alice.submit("s1", "c1")
    assert (await alice.open("s1")).json() == {**expected, "cursor": 1}
    assert (await alice.page("s1")).json()["head"] == 1


@pytest.mark.requirement("DASPX-11", "DASP-CORE-011a")
async def test_another_tuple_conflicts_and_changes_nothing(alice: Client, raw: redis.Redis) -> None:
    await alice.open("s1")
    before = everything(raw)
    other_version = {**NOTES, "version": "2"}
    for actor, profile in (("a2", NOTES), ("a1", COUNTER), ("a1", other_version)):
        refused = await alice.open("s1", profile, actor)
        assert_refused(refused, 409, "another actor or profile", kind="conflict")
    assert everything(raw) == before
    assert (await alice.open("s1")).status_code == 200


@pytest.mark.requirement("DASPX-04")
async def test_somebody_elses_session_is_not_there_whatever_is_asserted(
    door: House, alice: Client, bob: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    closed = await door.client("closer")
    await closed.open("s2")
    await closed.close("s2")
    await door.purge("s2")
    before = everything(raw)
    answers = [await bob.open("s1"), await bob.open("s1", COUNTER), await bob.open("s2")]
    for answer in answers:
        assert answer.status_code == 404
    assert len({answer.content for answer in answers}) == 1
    assert everything(raw) == before


@pytest.mark.requirement("RT-HTTP-12")
@pytest.mark.parametrize("profile", [{**NOTES, "version": "9"}, {"id": "urn:example:none", "version": "1"}])
async def test_a_profile_that_is_not_registered_opens_nothing(
    alice: Client, raw: redis.Redis, profile: dict[str, str]
) -> None:
    before = everything(raw)
    assert_refused(await alice.open("s1", profile), 422, "profile", kind="unsupported")
    assert everything(raw) == before


@pytest.mark.requirement("RT-HTTP-07")
async def test_who_is_no_caller_opens_nothing(door: House, raw: redis.Redis) -> None:
    operator = await door.client("olga", "operator")
    worker = await door.client("worker", "peer:alfa")
    before = everything(raw)
    for client in (operator, worker):
        assert_refused(await client.open("s1"), 403, "roles", kind="denied")
    assert everything(raw) == before


async def test_a_session_is_of_its_principal_whichever_token_opened_it(door: House, alice: Client) -> None:
    await alice.open("s1")
    second = await create_token(door.admin, TENANT, "alice", ["caller"])
    assert (await door.client_with(second.text()).open("s1")).status_code == 200


@pytest.mark.requirement("DASP-CORE-011a")
async def test_racing_openings_of_one_id_agree(door: House, alice: Client, bob: Client) -> None:
    """Equal ones make one session, another actor's conflicts, and another principal never learns of it."""
    for round_ in range(10):
        session_id = f"s{round_}"
        equal = [alice.open(session_id) for _ in range(6)]
        other = [alice.open(session_id, NOTES, "a2") for _ in range(2)]
        hidden = [bob.open(session_id) for _ in range(2)]
        answers = await asyncio.gather(*equal, *other, *hidden)
        codes = [answer.status_code for answer in answers]
        assert codes.count(201) == 1, codes
        view = (await (bob if 201 in codes[8:] else alice).http.get(f"/v1/sessions/{session_id}")).json()
        winner = (codes[:6], codes[6:8], codes[8:])
        if 201 in codes[8:]:
            assert set(winner[0]) == set(winner[1]) == {404}
        elif view["actor_id"] == "a1":
            assert set(winner[0]) == {200, 201}
            assert (set(winner[1]), set(winner[2])) == ({409}, {404})
        else:
            assert set(winner[1]) <= {200, 201}
            assert (set(winner[0]), set(winner[2])) == ({409}, {404})


async def test_a_view_tells_tuple_cursor_and_state(door: House, alice: Client) -> None:
    await alice.open("s1", COUNTER)
    await alice.open("s2")
    path = "/v1/sessions/"
    tuple_ = {"actor_id": "a1", "profile": COUNTER}
    begun = (await alice.http.get(path + "s1")).json()
    assert begun == {"session_id": "s1", **tuple_, "cursor": 0, "state": {"value": 0}}
    await alice.submit("s1", "c1", {"amount": 3}, name="counter.add")
    queued = (await alice.http.get(path + "s1")).json()
    assert (queued["cursor"], queued["state"]) == (1, {"value": 0})
    await door.work(
        "c1", {"value": 3}, session_id="s1", updates={"counter.changed": {"value": 3}}, state={"value": 3}
    )
    settled = (await alice.http.get(path + "s1")).json()
    assert (settled["cursor"], settled["state"]) == (3, {"value": 3})
    # Concurrent commands have no common state: their view stays an empty object.
    assert (await alice.http.get(path + "s2")).json()["state"] == {}


async def test_an_operator_views_what_it_may_not_use(door: House, alice: Client) -> None:
    await alice.open("s1")
    operator = await door.client("olga", "operator")
    assert (await operator.http.get("/v1/sessions/s1")).json()["session_id"] == "s1"
    assert_refused(await operator.submit("s1", "c1"), 403, "roles", kind="denied")
    assert (await operator.http.get("/v1/sessions/s2")).status_code == 404


async def test_a_head_request_is_a_get_without_its_body(alice: Client) -> None:
    await alice.open("s1")
    whole = await alice.http.get("/v1/sessions/s1")
    head = await alice.http.head("/v1/sessions/s1")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    accepts = {"accept": "text/event-stream"}
    stream = await alice.http.head("/v1/sessions/s1/updates", headers=accepts)
    assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream")
