"""The same command again: after a lost reply, a refusal, a restart of the door or of nothing at all."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.store.inspection import Boundary
from shared.store.registry import remove_peer
from tests.admission.house import COUNTER, Client, House, house
from tests.admission.looking import everything
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy
from tests.support.world import TENANT


async def accepted(client: Client, session_id: str, command_id: str, value: Any = None) -> dict[str, Any]:
    answer = await client.submit(session_id, command_id, value)
    assert answer.status_code == 201, answer.text
    receipt: dict[str, Any] = answer.json()
    return receipt


@pytest.mark.requirement("DASP-CORE-004d", "DASP-CORE-005b", "RT-ADM-32")
@pytest.mark.case(11, 23, 24)
async def test_an_equal_retry_is_a_success_with_the_original_sequence(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    """Before it is worked, while it is worked and after it was settled; found by its id alone."""
    await alice.open("s1")
    await accepted(alice, "s1", "c0")
    first = await accepted(alice, "s1", "c1", {"n": 1})
    before = everything(raw)
    again = await alice.submit("s1", "c1", {"n": 1})
    assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    assert again.json() == {**first, "disposition": "duplicate"}
    assert again.headers["location"] == "/v1/sessions/s1/commands/c1"
    assert everything(raw) == before
    await door.work("c1", {"done": True}, session_id="s1")
    settled = await alice.submit("s1", "c1", {"n": 1})
    assert settled.json() == again.json()
    assert [f["data"]["kind"] for f in (await alice.page("s1")).json()["events"]].count(
        "command.accepted"
    ) == 2


@pytest.mark.case(22)
@pytest.mark.requirement("DASP-CORE-006a")
async def test_admitting_again_before_and_after_the_end_answers_the_same_each_time(
    door: House, alice: Client
) -> None:
    await alice.open("s1", COUNTER)
    body = {"amount": 3}
    await alice.submit("s1", "c1", body, name="counter.add")
    before = [(await alice.submit("s1", "c1", body, name="counter.add")).content for _ in range(2)]
    await door.work("c1", {"value": 3}, session_id="s1", state={"value": 3})
    outcome = (await alice.outcome("s1", "c1")).content
    after = [(await alice.submit("s1", "c1", body, name="counter.add")).content for _ in range(2)]
    assert len({*before, *after}) == 1
    assert (await alice.outcome("s1", "c1")).content == outcome


@pytest.mark.requirement("DASP-CORE-002h")
async def test_what_travels_around_a_command_is_not_part_of_it(alice: Client) -> None:
    await alice.open("s1")
    await accepted(alice, "s1", "c1", {"n": 1})
    around: list[dict[str, str]] = [
        {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
        {"idempotency-key": "c1"},
        {"idempotency-key": '"c1"'},
        {"x-request-id": "another", "user-agent": "another"},
        {"prefer": "wait=0"},
    ]
    for headers in around:
        answer = await alice.submit("s1", "c1", {"n": 1}, headers=headers)
        assert (answer.status_code, answer.json()["disposition"]) == (200, "duplicate"), headers


@pytest.mark.case(17)
@pytest.mark.requirement("DASP-CORE-003e", "DASP-CORE-001c")
async def test_a_refused_command_keeps_no_id(alice: Client, raw: redis.Redis) -> None:
    await alice.open("s1", COUNTER)
    before = everything(raw)
    bad = await alice.submit("s1", "c1", {"amount": 1_000_001}, name="counter.add")
    assert (bad.status_code, bad.json()["kind"]) == (400, "invalid-input")
    assert "/input/amount" in bad.json()["description"]
    unknown = await alice.submit("s1", "c1", {"amount": 1}, name="counter.subtract")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (422, "unsupported_command")
    assert everything(raw) == before
    good = await alice.submit("s1", "c1", {"amount": 1}, name="counter.add")
    assert (good.status_code, good.json()["admission_sequence"]) == (201, 1)


@pytest.mark.requirement("DASP-CORE-011b", "DASP-CORE-009c", "DASP-CORE-012a")
async def test_another_door_answers_from_what_the_first_one_saved(redis_url: str) -> None:
    async with house(redis_url) as first:
        alice = await first.client("alice")
        await alice.open("s1", COUNTER)
        await alice.submit("s1", "c1", {"amount": 3}, name="counter.add")
        await first.work(
            "c1", {"value": 3}, session_id="s1", updates={"counter.changed": {"value": 3}}, state={"value": 3}
        )
        token = alice.token
        page = (await alice.page("s1", after=0)).content
        outcome = (await alice.outcome("s1", "c1")).content
        assert (await alice.page("s1", after=0)).content == page
    async with house(redis_url, tenants=()) as second:
        again = second.client_with(token)
        retry = await again.submit("s1", "c1", {"amount": 3}, name="counter.add")
        assert (retry.status_code, retry.json()["admission_sequence"]) == (200, 1)
        assert (await again.outcome("s1", "c1")).content == outcome
        assert (await again.page("s1", after=0)).content == page


@pytest.mark.requirement("DASP-CORE-006c", "DASP-CORE-008a")
async def test_an_outcome_is_the_terminal_update_and_nothing_before_it(door: House, alice: Client) -> None:
    await alice.open("s1", COUNTER)
    await alice.submit("s1", "c1", {"amount": 3}, name="counter.add")
    pending = (await alice.outcome("s1", "c1")).json()
    assert (pending["state"], pending["sequence"], pending["outcome"]) == ("pending", None, None)
    await door.work("c1", {"value": 3}, session_id="s1", state={"value": 3})
    read = (await alice.outcome("s1", "c1")).json()
    last = (await alice.page("s1", after=0)).json()["events"][-1]["data"]
    assert (last["kind"], last["sequence"]) == ("command.outcome", read["sequence"])
    assert last["payload"] == read["outcome"]


@pytest.mark.requirement("DASP-CORE-008c", "DASP-CORE-008d")
async def test_the_host_claims_no_effect_beyond_its_boundary(door: House, alice: Client) -> None:
    """Effects outside are never said to have stopped or to happen exactly once: the capability is off, and an
    unsafe command that was lost is called uncertain with nothing said of its effect.
    """
    told = (await alice.http.get("/v1/authority")).json()
    assert told["capabilities"] == {
        "resultFencing": True,
        "effectFencing": False,
        "workflow": False,
        "memory": False,
    }
    described = (await alice.http.get("/openapi.json")).text.lower()
    assert "exactly once" not in described
    assert "exactly-once" not in described


class Refusing:
    """Reasons that may change: for each, new work is refused and an equal retry answered."""

    @staticmethod
    async def no_peer(door: House) -> None:
        for peer in ("alfa", "bravo"):
            await remove_peer(door.admin, TENANT, peer)

    @staticmethod
    async def suspect_clock(door: House) -> None:
        clock = door.runtime.clock
        clock.observe(clock.lower_ms() + 3_600_000, clock.monotonic_ms(), clock.monotonic_ms())
        suspect = clock.suspect
        assert suspect

    @staticmethod
    async def out_of_memory(door: House) -> None:
        await door.admin.call("CONFIG", "SET", "maxmemory", 1)


@pytest.mark.parametrize("reason", ["no_peer", "suspect_clock", "out_of_memory"])
async def test_a_retry_is_answered_whatever_else_refuses(
    door: House, alice: Client, raw: redis.Redis, reason: str
) -> None:
    await alice.open("s1")
    first = await accepted(alice, "s1", "c1", {"n": 1})
    try:
        await getattr(Refusing, reason)(door)
        new = await alice.submit("s1", "c2", {"n": 1})
        assert new.status_code == 503, new.text
        assert int(new.headers["retry-after"]) >= 1
        again = await alice.submit("s1", "c1", {"n": 1})
        assert (again.status_code, again.json()["admission_sequence"]) == (200, first["admission_sequence"])
        changed = await alice.submit("s1", "c1", {"n": 2})
        assert changed.status_code == 409
    finally:
        raw.config_set("maxmemory", 0)


@pytest.mark.unrestricted("its subject are settings that the door reads")
@pytest.mark.requirement("DASP-CORE-012e")
async def test_durability_below_the_operators_word_refuses_new_work_only(redis_url: str) -> None:
    async with house(redis_url) as trusting:
        alice = await trusting.client("alice")
        await alice.open("s1")
        await accepted(alice, "s1", "c1")
        token = alice.token
    async with house(redis_url, declared=Boundary.POWER_LOSS, tenants=()) as declared:
        raised = declared.client_with(token)
        await declared.admin.call("CONFIG", "SET", "appendfsync", "everysec")
        try:
            await declared.runtime.refresh()
            assert (await raised.submit("s1", "c1")).status_code == 200
            refused = await raised.submit("s1", "c2")
            assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable")
            assert "below the declared" in refused.json()["description"]
            told = (await raised.http.get("/v1/authority")).json()["durability"]
            assert told["boundary"] == "volatile"
        finally:
            await declared.admin.call("CONFIG", "SET", "appendfsync", "always")


@pytest.mark.case(16)
@pytest.mark.requirement("DASP-CORE-005a")
async def test_an_unreachable_store_is_503_and_is_forgotten_when_it_is_back(redis_url: str) -> None:
    async with FaultProxy(redis_url) as proxy, house(redis_url) as near:
        token = (alice := await near.client("alice")).token
        await alice.open("s1")
        async with house(proxy.url, tenants=()) as far:
            client = far.client_with(token)
            await accepted(client, "s1", "c1")
            proxy.refuse()
            proxy.cut()
            down = await client.submit("s1", "c2")
            assert (down.status_code, down.json()["kind"]) == (503, "unavailable")
            assert int(down.headers["retry-after"]) >= 1
            proxy.pass_on()

            async def admitted() -> bool:
                return (await client.submit("s1", "c2")).status_code in (200, 201)

            assert await wait_until(admitted)
            assert (await client.submit("s1", "c2")).json()["admission_sequence"] == 2
