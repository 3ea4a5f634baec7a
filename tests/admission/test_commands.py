"""Receipts: what is admitted, declined, and by whom when many ask at once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import redis

from shared.store.registry import PeerRecord, create_token, register_peer, remove_peer, revoke_token
from tests.admission.house import COUNTER, Client, House, house
from tests.admission.looking import assert_refused, everything
from tests.support.world import TENANT


async def test_an_admission_is_201_with_its_sequence_and_where_its_outcome_will_be(alice: Client) -> None:
    await alice.open("s1")
    for sequence in (1, 2):
        answer = await alice.submit("s1", f"c{sequence}")
        assert answer.status_code == 201
        assert answer.json() == {
            "session_id": "s1",
            "command_id": f"c{sequence}",
            "disposition": "accepted",
            "admission_sequence": sequence,
            "error": None,
        }
        assert answer.headers["location"] == f"/v1/sessions/s1/commands/c{sequence}"
        assert "idempotent-replayed" not in answer.headers
        assert (await alice.http.get(answer.headers["location"])).json()["state"] == "pending"


@pytest.mark.requirement("DASP-CORE-003b")
async def test_another_session_name_or_input_under_an_admitted_id_is_declined(
    alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1")
    await alice.open("s2")
    await alice.submit("s1", "c1", {"n": 1})
    before = everything(raw)
    changed = [
        await alice.submit("s1", "c1", {"n": 2}),
        await alice.submit("s1", "c1", {"n": 1}, name="note.erase"),
        await alice.submit("s1", "c1", {"n": 1}, name="note.unknown"),
        await alice.submit("s2", "c1", {"n": 1}),
    ]
    for answer in changed:
        assert answer.status_code == 409
        receipt = answer.json()
        assert (receipt["disposition"], receipt["admission_sequence"]) == ("rejected", None)
        assert (receipt["error"]["code"], receipt["error"]["retryable"]) == ("conflict", False)
        assert "location" not in answer.headers
    assert everything(raw) == before


@pytest.mark.requirement("DASP-CORE-003e", "RT-HTTP-12")
async def test_an_unknown_command_is_declined_and_its_id_stays_free(alice: Client, raw: redis.Redis) -> None:
    await alice.open("s1", COUNTER)
    before = everything(raw)
    declined = await alice.submit("s1", "c1", {"amount": 1}, name="counter.divide")
    assert declined.status_code == 422
    assert declined.json()["error"]["code"] == "unsupported_command"
    assert everything(raw) == before
    assert (await alice.submit("s1", "c1", {"amount": 1}, name="counter.add")).status_code == 201


@pytest.mark.requirement("DASP-CORE-003a", "DASP-CORE-004d")
@pytest.mark.case(7)
async def test_two_hundred_equal_submissions_at_two_doors_are_one_admission(
    redis_url: str, raw: redis.Redis
) -> None:
    async with house(redis_url) as here, house(redis_url, tenants=()) as there:
        alice = await here.client("alice")
        await alice.open("s1")
        clients = [alice, there.client_with(alice.token)]
        answers = await asyncio.gather(*[clients[i % 2].submit("s1", "c1", {"n": 1}) for i in range(200)])
        assert Counter(answer.status_code for answer in answers) == {201: 1, 200: 199}
        assert {answer.json()["admission_sequence"] for answer in answers} == {1}
        assert (await alice.page("s1")).json()["head"] == 1
        assert [raw.xlen(f"lg:{{{TENANT}}}:outbox:{peer}") for peer in ("alfa", "bravo")] == [1, 0]


@pytest.mark.requirement("DASP-CORE-003c")
async def test_of_racing_intents_on_one_id_exactly_one_wins(redis_url: str) -> None:
    async with house(redis_url) as here, house(redis_url, tenants=()) as there:
        alice = await here.client("alice")
        clients = [alice, there.client_with(alice.token)]
        for session_id in ("s1", "s2"):
            await alice.open(session_id)
        for round_ in range(8):
            intents = [(f"s{1 + i % 2}", {"n": i // 2}) for i in range(12)]
            answers = await asyncio.gather(
                *[
                    clients[i % 2].submit(session_id, f"c{round_}", value)
                    for i, (session_id, value) in enumerate(intents)
                ]
            )
            assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 11}
            won = next(i for i, answer in enumerate(answers) if answer.status_code == 201)
            session_id, value = intents[won]
            again = await alice.submit(session_id, f"c{round_}", value)
            assert again.json()["admission_sequence"] == answers[won].json()["admission_sequence"]


async def test_a_serial_session_offers_one_command_at_a_time_in_admission_order(
    door: House, alice: Client, raw: redis.Redis
) -> None:
    await alice.open("s1", COUNTER)
    for i in range(3):
        await alice.submit("s1", f"c{i}", {"amount": 1}, name="counter.add")
    assert raw.xlen(f"lg:{{{TENANT}}}:outbox:counter") == 1
    assert raw.zcard(f"lg:{{{TENANT}}}:queue:s1") == 2


class TestSnapshotsMove:
    """What a door remembers of a tenant decides nothing that has moved since."""

    async def test_a_peer_registered_later_is_asked(self, door: House, alice: Client) -> None:
        await alice.open("s1")
        for peer in ("alfa", "bravo"):
            await remove_peer(door.admin, TENANT, peer)
        assert_refused(await alice.submit("s1", "c1"), 503, "peer", kind="unavailable")
        await register_peer(door.admin, TENANT, PeerRecord("bravo"))
        assert (await alice.submit("s1", "c1")).status_code == 201
        await door.work("c1", {}, session_id="s1")

    async def test_the_first_eligible_peer_in_ascii_order_gets_the_offer(
        self, door: House, alice: Client, raw: redis.Redis
    ) -> None:
        await alice.open("s1")
        await remove_peer(door.admin, TENANT, "alfa")
        await alice.submit("s1", "c1")
        await register_peer(door.admin, TENANT, PeerRecord("alfa"))
        await alice.submit("s1", "c2")
        assert [raw.xlen(f"lg:{{{TENANT}}}:outbox:{peer}") for peer in ("alfa", "bravo")] == [1, 1]

    async def test_another_tokens_revocation_holds_up_nobody(self, door: House, alice: Client) -> None:
        await alice.open("s1")
        for i in range(5):
            other = await create_token(door.admin, TENANT, "bob", ["caller"])
            await revoke_token(door.admin, TENANT, other.token_id)
            assert (await alice.submit("s1", f"c{i}")).status_code == 201


async def test_a_request_that_is_cancelled_leaves_its_command_admitted_or_absent(
    door: House, alice: Client
) -> None:
    """Whoever breaks off at any point finds a whole command or none, and the same request settles it."""
    await alice.open("s1")
    for i in range(30):
        task = asyncio.create_task(alice.submit("s1", f"c{i}", {"n": i}))
        for _ in range(i):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    answers = [await alice.submit("s1", f"c{i}", {"n": i}) for i in range(30)]
    assert {answer.status_code for answer in answers} <= {200, 201}
    page = (await alice.page("s1")).json()
    admitted = [event["data"]["command_id"] for event in page["events"]]
    assert sorted(admitted) == sorted(f"c{i}" for i in range(30))
