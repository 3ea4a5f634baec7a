"""Replies that get lost between the store and the door: found out by identity, never guessed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from admission_svc import commands
from tests.admission.house import Client, House, house
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy


class Far:
    """A door whose way to the store is the proxy's, beside one with a way of its own."""

    def __init__(self, proxy: FaultProxy, near: House, far: House, alice: Client, client: Client) -> None:
        self.proxy = proxy
        self.near = near
        self.far = far
        self.alice = alice
        self.client = client


@pytest.fixture
async def far(redis_url: str) -> AsyncIterator[Far]:
    async with FaultProxy(redis_url) as proxy, house(redis_url) as near:
        alice = await near.client("alice")
        await alice.open("s1")
        async with house(proxy.url, tenants=()) as behind:
            client = behind.client_with(alice.token)
            # What is remembered of token, session and contract is remembered now.
            assert (await client.submit("s1", "warm")).status_code == 201
            yield Far(proxy, near, behind, alice, client)


async def known_again(far: Far) -> bool:
    return (await far.client.outcome("s1", "warm")).status_code == 200


@pytest.mark.requirement("DASP-CORE-005b", "RT-STORE-16")
async def test_a_lost_reply_is_found_out_and_told_as_the_one_admission(far: Far) -> None:
    for i in range(5):
        # A lost connection has everything looked at anew; once that is over, an admission's reply is cut.
        await wait_until(partial(known_again, far))
        far.proxy.cut_after(0)
        answer = await far.client.submit("s1", f"c{i}", {"n": i})
        assert answer.status_code in (200, 201), answer.text
        assert answer.json()["admission_sequence"] == 2 + i
        again = await far.alice.submit("s1", f"c{i}", {"n": i})
        assert (again.status_code, again.json()["admission_sequence"]) == (200, 2 + i)
    assert (await far.alice.page("s1")).json()["head"] == 6


@pytest.mark.requirement("DASP-CORE-003b")
async def test_a_lost_refusal_is_found_out_too(far: Far) -> None:
    await far.alice.submit("s1", "c1", {"n": 1})
    far.proxy.cut_after(0)
    answer = await far.client.submit("s1", "c1", {"n": 2})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.requirement("DASP-CORE-005b", "RT-HTTP-13")
async def test_what_cannot_be_found_out_is_503_and_settled_by_the_same_request(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_RESOLVE_PAUSES_S", (0.0, 0.0))
    far.proxy.hold_replies()
    request = asyncio.create_task(far.client.submit("s1", "c1", {"n": 1}))

    async def admitted() -> bool:
        return (await far.alice.outcome("s1", "c1")).status_code == 200

    await wait_until(admitted)
    far.proxy.cut()
    await wait_until(lambda: not far.far.runtime.connection.connected)
    far.proxy.refuse()
    unknown = await request
    assert (unknown.status_code, unknown.json()["kind"]) == (503, "unavailable")
    assert "repeat it unchanged" in unknown.json()["description"]
    assert int(unknown.headers["retry-after"]) >= 1
    far.proxy.pass_on()

    async def answered() -> bool:
        return (await far.client.submit("s1", "c1", {"n": 1})).status_code == 200

    await wait_until(answered)
    assert (await far.client.submit("s1", "c1", {"n": 1})).json()["admission_sequence"] == 2


@pytest.mark.requirement("RT-TIME-02")
async def test_an_admission_that_comes_after_its_window_is_refused_and_leaves_the_id_free(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is over when the store sees it: nothing stored, the same request is admitted next."""
    clock = far.far.runtime.clock
    now = clock.lower_ms
    with monkeypatch.context() as late:
        late.setattr(clock, "lower_ms", lambda at=None: now(at) - 60_000)
        refused = await far.client.submit("s1", "c1")
    assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable")
    assert "window" in refused.json()["description"]
    assert int(refused.headers["retry-after"]) >= 1
    assert (await far.alice.page("s1")).json()["head"] == 1
    assert (await far.client.submit("s1", "c1")).status_code == 201


async def test_a_lost_opening_is_the_one_opening(far: Far) -> None:
    """Wherever the reply is lost, on reading or on creating, the session is made once."""
    for i in range(4):
        far.proxy.cut_after(i)
        session_id = f"n{i}"

        async def opened(session_id: str = session_id) -> bool:
            return (await far.client.open(session_id)).status_code in (200, 201)

        assert await wait_until(opened)
        assert (await far.alice.open(session_id)).status_code == 200
        far.proxy.pass_on()
