"""A permission ends: what is written on its strength is written before that, or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import redis

from shared.store.registry import revoke_token
from tests.admission.house import COUNTER, NOTES, Client, House
from tests.admission.looking import assert_refused, everything
from tests.admission.ruling import allow, deny, rule
from tests.support.polling import wait_until

TTL_MS = 40


async def delayed(door: House, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is decided for a commit reach the store only when a permission of ``TTL_MS`` has run out."""
    store = (await door.handle()).store
    clock, commit = door.runtime.clock, getattr(store, verb)

    async def late(*args: Any) -> Any:
        ended = clock.lower_ms() + TTL_MS
        await wait_until(lambda: clock.lower_ms() > ended)
        return await commit(*args)

    monkeypatch.setattr(store, verb, late)


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09")
@pytest.mark.parametrize("verb", ["admit", "admit_many"])
async def test_a_permission_that_ran_out_before_the_commit_admits_nothing(
    door: House, alice: Client, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    await alice.open("s1")
    path = "/v1/sessions/s1/commands" + (":batch" if verb == "admit_many" else "")
    command = {"command_id": "c1", "name": "note.write", "input": {}}
    body = {"commands": [command]} if verb == "admit_many" else command
    await rule(door, allow("alice", ttlMs=TTL_MS))
    assert (await alice.page("s1")).status_code == 200
    before = everything(raw)
    with monkeypatch.context() as patched:
        await delayed(door, verb, patched)
        assert_refused(await alice.http.post(path, json=body), 503, "window", kind="unavailable")
    assert everything(raw) == before
    await rule(door, allow("alice"))
    assert (await alice.http.post(path, json=body)).is_success


@pytest.mark.requirement("RT-AUTH-09")
async def test_the_shortest_permission_of_a_batch_bounds_it_all(
    door: House, alice: Client, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await alice.open("s1", COUNTER)
    await rule(
        door,
        allow("alice", "command.submit", interactions=["add"], ttlMs=86_400_000),
        allow("alice", ttlMs=TTL_MS),
    )
    assert (await alice.page("s1")).status_code == 200
    before = everything(raw)
    await delayed(door, "admit_many", monkeypatch)
    names = [("c1", "counter.add", {"amount": 1}), ("c2", "no.such", {})]
    members = [{"command_id": i, "name": n, "input": v} for i, n, v in names]
    answer = await alice.http.post("/v1/sessions/s1/commands:batch", json={"commands": members})
    assert_refused(answer, 503, "window", kind="unavailable")
    assert everything(raw) == before


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09")
async def test_a_permission_that_ran_out_opens_no_session(
    door: House, alice: Client, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rule(door, allow("alice", ttlMs=TTL_MS))
    assert (await alice.page("s1")).status_code == 404
    before = everything(raw)
    with monkeypatch.context() as patched:
        await delayed(door, "open_session", patched)
        assert_refused(await alice.open("s1"), 503, "window", kind="unavailable")
    assert everything(raw) == before
    await rule(door, allow("alice"))
    assert (await alice.open("s1")).status_code == 201


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09")
@pytest.mark.parametrize("verb", ["put_cursor", "close_session"])
async def test_a_permission_that_ran_out_neither_moves_a_cursor_nor_closes(
    door: House, alice: Client, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    await alice.open("s1")
    await alice.submit("s1", "c1")

    async def ask() -> httpx.Response:
        if verb == "close_session":
            return await alice.close("s1")
        return await alice.http.put("/v1/sessions/s1/cursors/web", json={"cursor": 1})

    await rule(door, allow("alice", ttlMs=TTL_MS))
    assert (await alice.page("s1")).status_code == 200
    before = everything(raw)
    with monkeypatch.context() as patched:
        await delayed(door, verb, patched)
        assert_refused(await ask(), 503, "window", kind="unavailable")
    assert everything(raw) == before
    await rule(door, allow("alice"))
    assert (await ask()).is_success


Race = Callable[[House, Client], Awaitable[Any]]


async def _revoked(door: House, alice: Client) -> None:
    await revoke_token(door.admin, "acme", alice.token.split(".")[3])


async def _denied(door: House, alice: Client) -> None:
    await rule(door, deny("alice"), allow("*"))


@pytest.mark.requirement("RT-AUTH-08", "DASP-CORE-001a")
@pytest.mark.parametrize(("taken_away", "status"), [(_revoked, 401), (_denied, 404)])
@pytest.mark.parametrize(
    "verb", ["admit", "admit_many", "lookup", "open_session", "put_cursor", "close_session"]
)
async def test_what_is_taken_away_between_decision_and_commit_commits_nothing(
    door: House,
    alice: Client,
    raw: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    taken_away: Race,
    status: int,
    verb: str,
) -> None:
    """The moment after the last look of the door, before the store's own."""
    await alice.open("s1")
    await alice.submit("s1", "c1")
    store = (await door.handle()).store
    commit = getattr(store, verb)
    seen: list[dict[bytes, Any]] = []

    async def overtaken(*args: Any) -> Any:
        if not seen:
            await taken_away(door, alice)
            seen.append(everything(raw))
        return await commit(*args)

    monkeypatch.setattr(store, verb, overtaken)
    member = {"command_id": "c2", "name": "note.write", "input": {}}
    url = "/v1/sessions/s1"
    asks: dict[str, Callable[[], Awaitable[httpx.Response]]] = {
        "admit": lambda: alice.submit("s1", "c2"),
        "admit_many": lambda: alice.http.post(url + "/commands:batch", json={"commands": [member]}),
        # Its own command, by a name the profile has not: only the record could answer it.
        "lookup": lambda: alice.submit("s1", "c1", name="no.such"),
        "open_session": lambda: alice.open("s2"),
        "put_cursor": lambda: alice.http.put(url + "/cursors/web", json={"cursor": 1}),
        "close_session": lambda: alice.close("s1"),
    }
    refused = await asks[verb]()
    expected = 403 if (verb, status) == ("open_session", 404) else status
    assert_refused(refused, expected, kind="denied")
    assert seen
    assert everything(raw) == seen[0]


@pytest.mark.requirement("DASP-CORE-003d")
async def test_who_is_revoked_learns_nothing_from_its_own_retries(door: House, alice: Client) -> None:
    """Equal, changed and unknown commands are one answer, also in a session that may still be read."""
    await alice.open("s1")
    await alice.submit("s1", "c1")
    for left, status in ((["session.read"], 403), (["session.close"], 404)):
        await rule(door, allow("alice", *left))
        answers = [
            await alice.submit("s1", "c1"),
            await alice.submit("s1", "c1", {"changed": 1}),
            await alice.submit("s1", "c1", name="no.such"),
            await alice.submit("s1", "new"),
        ]
        assert {(a.status_code, a.content) for a in answers} == {(status, answers[0].content)}
        assert "idempotent-replayed" not in answers[0].headers
        assert "location" not in answers[0].headers


@pytest.mark.requirement("DASP-CORE-001a")
async def test_permission_is_judged_before_the_profile(door: House, alice: Client, raw: redis.Redis) -> None:
    """What the profile says of an input is not told to who may not submit."""
    await alice.open("k1", COUNTER)
    await rule(door, allow("alice", "session.read"))
    before = everything(raw)
    wrong = await alice.submit("k1", "c1", {"amount": "much"}, name="counter.add")
    assert_refused(wrong, 403, kind="denied")
    assert everything(raw) == before
    await rule(door, allow("alice"))
    assert_refused(await alice.submit("k1", "c1", {"amount": "much"}, name="counter.add"), 400, "/input")


async def test_who_is_overtaken_in_opening_learns_only_what_it_may(
    door: House, alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no session; the slower one meets the other's in the commit, of any profile."""
    await rule(door, allow("alice"), allow("bob", profiles=[NOTES["id"]], sessions=["*"]))
    for session_id, profile, status in (("n1", NOTES, 200), ("k1", COUNTER, 404)):
        await alice.open(session_id, profile)
        reads = (await door.handle()).reads
        read = reads.session
        looked: list[int] = []

        async def absent(*args: Any, read: Any = read, looked: list[int] = looked) -> Any:
            looked.append(1)
            return None if len(looked) == 1 else await read(*args)

        with monkeypatch.context() as patched:
            patched.setattr(reads, "session", absent)
            answer = await bob.open(session_id, NOTES)
        assert (answer.status_code, len(looked)) == (status, 2)
