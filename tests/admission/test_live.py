"""Event streams: replay and then live without a seam, resumption, heartbeats, an end that leaves nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import redis

from admission_svc import live
from admission_svc.auth import Visit
from admission_svc.sessions import Replay, Sessions
from shared.store.embedded import EmbeddedStore
from shared.store.keys import Keys
from shared.store.registry import revoke_token
from shared.store.wake import session_topic
from tests.admission.house import Client, House, house
from tests.admission.looking import assert_refused, everything, plain, read_reply, streaming
from tests.support.polling import wait_until
from tests.support.proxy import FaultProxy

STREAM = {"accept": "text/event-stream"}
UPDATES = "/v1/sessions/s1/updates"
NEVER_S = 10_000.0


@pytest.fixture
async def ready(alice: Client) -> Client:
    """A caller with a session that holds three updates."""
    assert (await alice.open("s1")).status_code == 201
    for i in range(1, 4):
        assert (await alice.submit("s1", f"c{i}")).status_code == 201
    return alice


@pytest.fixture
def only_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream looks by itself: what arrives, arrives because a commit said so."""
    monkeypatch.setattr(live, "RECHECK_S", NEVER_S)
    monkeypatch.setattr(live, "HEARTBEAT_S", NEVER_S)


def under_way(door: House) -> int:
    return len(door.listening.state.tasks)


async def authority8(door: House) -> str:
    return (await (await door.handle()).snapshots.get()).revisions.authority[:8]


async def test_an_update_is_one_frame_with_its_id(door: House, ready: Client) -> None:
    async with streaming(ready, "s1") as feed:
        assert feed.response.status_code == 200
        assert feed.response.headers["content-type"] == "text/event-stream"
        assert feed.response.headers["cache-control"] == "no-store"
        frames = await feed.updates(3)
    page = (await ready.page("s1")).json()
    prefix = await authority8(door)
    assert [frame.id for frame in frames] == [f"{prefix}-{i}" for i in (1, 2, 3)]
    assert [json.loads(frame.data) for frame in frames] == page["events"]


@pytest.mark.requirement("DASP-CORE-011e")
async def test_a_stream_replays_and_then_follows(ready: Client, only_hints: None) -> None:
    async with streaming(ready, "s1", after=1) as feed:
        assert [frame.sequence for frame in await feed.updates(2)] == [2, 3]
        for i in (4, 5):
            await ready.submit("s1", f"c{i}")
            assert [frame.sequence for frame in await feed.updates(1)] == [i]


@pytest.mark.requirement("DASP-CORE-011e", "DASP-CORE-011f")
async def test_a_commit_between_the_last_replay_and_the_wait_is_not_lost(
    door: House, ready: Client, only_hints: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seam itself: every reading that found nothing is followed by a commit before anything waits."""
    replay, due = Sessions.replay, [4, 5, 6, 7, 8]

    async def replay_then_commit(
        self: Sessions, visit: Visit, session_id: str, after: int, limit: int
    ) -> Replay:
        found = await replay(self, visit, session_id, after, limit)
        if not found.events and due:
            assert (await ready.submit("s1", f"c{due.pop(0)}")).status_code == 201
        return found

    monkeypatch.setattr(Sessions, "replay", replay_then_commit)
    async with streaming(ready, "s1") as feed:
        assert [frame.sequence for frame in await feed.updates(8)] == list(range(1, 9))


@pytest.mark.case(66, 67)
@pytest.mark.requirement("DASP-CORE-011f")
async def test_streams_beside_many_writers_miss_nothing_and_repeat_nothing(
    ready: Client, only_hints: None
) -> None:
    """Streams that begin at every stage of a burst of commits all end with the same unbroken history."""
    writers, each = 10, 8
    total = 3 + writers * each

    async def follow() -> list[int]:
        async with streaming(ready, "s1") as feed:
            return [frame.sequence for frame in await feed.updates(total)]

    followers = [asyncio.create_task(follow())]

    async def write(writer: int) -> None:
        for i in range(each):
            assert (await ready.submit("s1", f"w{writer}-{i}")).status_code == 201
            if writer == 0:
                followers.append(asyncio.create_task(follow()))

    await asyncio.gather(*(write(i) for i in range(writers)))
    for seen in await asyncio.gather(*followers):
        assert seen == list(range(1, total + 1))


@pytest.mark.requirement("DASP-CORE-009b")
async def test_what_is_pushed_is_committed_and_a_hint_alone_pushes_nothing(
    door: House, ready: Client, raw: redis.Redis, only_hints: None
) -> None:
    """A hint without a commit reads and tells nothing; an update that arrives is in the log already."""
    async with streaming(ready, "s1", after=3) as feed:
        await wait_until(lambda: door.runtime.wake.subscribed("acme"))
        for _ in range(20):
            raw.publish(Keys("acme").wake.decode(), session_topic("s1"))
        for i in range(4, 10):
            await ready.submit("s1", f"c{i}")
            (frame,) = await feed.updates(1)
            assert frame.sequence == i
            # The log of a session is numbered like its updates.
            assert raw.xlen(Keys("acme").updates("s1")) >= i


@pytest.mark.case(79)
@pytest.mark.requirement("DASP-CORE-012h")
async def test_two_streams_from_one_cursor_both_get_everything(ready: Client, only_hints: None) -> None:
    async with streaming(ready, "s1", after=1) as one, streaming(ready, "s1", after=1) as other:
        for i in range(4, 8):
            await ready.submit("s1", f"c{i}")
        first, second = await one.updates(6), await other.updates(6)
    assert [frame.sequence for frame in first] == [2, 3, 4, 5, 6, 7]
    assert first == second


@pytest.mark.parametrize("form", ["plain", "full"])
async def test_last_event_id_resumes_and_wins_over_after_and_client(
    door: House, ready: Client, form: str
) -> None:
    await ready.http.put("/v1/sessions/s1/cursors/x", json={"cursor": 3})
    last = "1" if form == "plain" else f"{await authority8(door)}-1"
    for query in ({}, {"after": 0}, {"after": 3}, {"client": "x"}):
        async with streaming(ready, "s1", {"last-event-id": last}, **query) as feed:
            assert [frame.sequence for frame in await feed.updates(2)] == [2, 3]


async def test_last_event_id_is_of_streams_only(ready: Client) -> None:
    response = await ready.http.get(UPDATES, headers={"last-event-id": "2"})
    assert response.json()["after"] == 0


@pytest.mark.case(74)
async def test_an_empty_last_event_id_is_an_absent_one(door: House, ready: Client) -> None:
    async with streaming(ready, "s1", {"last-event-id": ""}, after=2) as feed:
        assert [frame.sequence for frame in await feed.updates(1)] == [3]
    auth = f"authorization: Bearer {ready.token}".encode()
    for value in (b"", b" ", b"\t "):
        lines = (auth, b"accept: text/event-stream", b"last-event-id:" + value)
        status, _, body = read_reply(await door.raw_http(plain("GET", UPDATES + "?after=$", *lines)))
        assert status == 400
        assert json.loads(body)["description"].startswith("after:"), "the cursor that counts is the query's"
        status, headers, _ = read_reply(await door.raw_http(plain("HEAD", UPDATES, *lines)))
        assert (status, headers["content-type"]) == (200, "text/event-stream")


@pytest.mark.case(73)
@pytest.mark.parametrize(
    "value",
    [
        b"a\x00b",
        b"1\x00",
        b"\x00",
        b"1\r2",
        b"1\n2",
        b"1" * 9_216,
        "é".encode(),
        b"\xe9",
        b"$",
        b"-1",
        b"1-",
        b"-",
        b"18446744073709551616",
        b"9007199254740992",
        b"01",
        b"1.0",
        b"0-0",
        b"1-1",
        b"_GET_stream:1",
        b"ABCDEF01-1",
        b"abcdef0-1",
        b"*",
        b"1, 2",
    ],
    ids=[str(i) for i in range(23)],
)
async def test_a_malformed_last_event_id_is_400(
    door: House, ready: Client, raw: redis.Redis, value: bytes
) -> None:
    before = everything(raw)
    auth = f"authorization: Bearer {ready.token}".encode()
    request = plain("GET", UPDATES, auth, b"accept: text/event-stream", b"last-event-id: " + value)
    status, headers, body = read_reply(await door.raw_http(request))
    assert (status, headers["content-type"]) == (400, "application/json")
    assert json.loads(body)["kind"] == "invalid-input"
    assert everything(raw) == before


async def test_a_line_break_in_a_last_event_id_smuggles_nothing_in(door: House, ready: Client) -> None:
    """What follows the break is a header of its own, not part of the cursor."""
    auth = f"authorization: Bearer {ready.token}".encode()
    request = plain("GET", UPDATES, auth, b"accept: text/event-stream", b"last-event-id: 9\r\nx: 1")
    status, _, body = read_reply(await door.raw_http(request))
    assert (status, json.loads(body)["description"]) == (
        400,
        "after: must not be beyond the head of the session",
    )


async def test_a_last_event_id_beyond_the_head_is_400(door: House, ready: Client) -> None:
    for last in ("4", f"{await authority8(door)}-4", "9007199254740991"):
        response = await ready.http.get(UPDATES, headers={**STREAM, "last-event-id": last})
        assert_refused(response, 400, "must not be beyond the head of the session")


@pytest.mark.case(71)
async def test_a_cursor_of_another_tenant_opens_nothing(door: House, ready: Client) -> None:
    await door.tenant("zeta")
    stranger = await door.client("alice", tenant="zeta")
    last = {**STREAM, "last-event-id": f"{await authority8(door)}-1"}
    foreign = await stranger.http.get(UPDATES, headers=last)
    assert_refused(foreign, 410, kind="expired")
    plain_cursor = await stranger.http.get(UPDATES, headers={**STREAM, "last-event-id": "1"})
    assert_refused(plain_cursor, 404, kind="denied")
    # With a session of the same name it is still another authority's history.
    await stranger.open("s1")
    await stranger.submit("s1", "z1")
    assert (await stranger.http.get(UPDATES, headers=last)).content == foreign.content


async def test_a_stream_of_somebody_elses_session_is_not_found(ready: Client, bob: Client) -> None:
    there = await bob.http.get(UPDATES, headers=STREAM)
    missing = await bob.http.get("/v1/sessions/missing/updates", headers=STREAM)
    assert_refused(there, 404, kind="denied")
    assert there.content == missing.content


async def test_a_silent_stream_says_that_it_lives(ready: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.05)
    async with streaming(ready, "s1", after=3) as feed:
        for _ in range(4):
            frame = await feed.frame()
            assert frame is not None
            assert (frame.comment, frame.id, frame.data) == (True, "", "")
        await ready.submit("s1", "c4")
        assert (await feed.updates(1))[0].sequence == 4
        frame = await feed.frame()
        assert frame is not None
        assert frame.comment


def test_a_heartbeat_comes_every_fifteen_seconds() -> None:
    assert live.HEARTBEAT_S == 15.0


@pytest.mark.case(77)
async def test_a_client_that_leaves_ends_its_stream_at_once(
    door: House, ready: Client, only_hints: None
) -> None:
    """Without a heartbeat or an update to fail on: the leaving itself is noticed."""
    async with streaming(ready, "s1", after=3) as feed:
        assert (await feed.frame()) is not None
        assert under_way(door) == 1
    await wait_until(lambda: under_way(door) == 0)


@pytest.mark.case(76)
async def test_streams_hold_no_connection_to_the_store_and_leave_none(
    door: House, ready: Client, raw: redis.Redis
) -> None:
    """Two hundred streams left during replay, fifty of them open at a time."""

    def connected() -> int:
        found: dict[str, Any] = raw.info("clients")
        return int(found["connected_clients"])

    for i in range(4, 104):
        await ready.submit("s1", f"c{i}")
    async with streaming(ready, "s1") as feed:
        await feed.updates(103)
        await wait_until(lambda: door.runtime.wake.subscribed("acme"))
        baseline = connected()

        async def leave_early(all_open: asyncio.Barrier) -> None:
            async with streaming(ready, "s1") as other:
                await other.updates(1)
                await all_open.wait()

        async def come_and_go() -> None:
            all_open = asyncio.Barrier(51)
            leaving = [asyncio.create_task(leave_early(all_open)) for _ in range(50)]
            await wait_until(lambda: all_open.n_waiting == 50, timeout=30)
            assert connected() <= baseline
            await all_open.wait()
            await asyncio.gather(*leaving)

        for _ in range(4):
            await come_and_go()
        await wait_until(lambda: under_way(door) == 1)
        assert connected() <= baseline
        await ready.submit("s1", "last")
        assert (await feed.updates(1))[0].sequence == 104


async def test_a_session_that_is_closed_ends_its_streams(
    door: House, ready: Client, only_hints: None
) -> None:
    """Its facts are told as long as they exist, then the stream ends without a word of why."""
    async with streaming(ready, "s1", after=3) as feed:
        assert (await ready.close("s1")).status_code == 202
        for i in (1, 2, 3):
            await door.work(f"c{i}", session_id="s1")
        assert [frame.sequence for frame in await feed.updates(3)] == [4, 5, 6]
        await door.purge("s1", "c1", "c2", "c3")
        assert all(frame.comment for frame in await feed.rest())
    assert_refused(await ready.http.get(UPDATES, headers=STREAM), 404, kind="denied")


@pytest.mark.requirement("DASPX-09")
async def test_a_revoked_token_gets_no_further_update(door: House, ready: Client, only_hints: None) -> None:
    """What is committed after the revocation is not told, and neither is why the stream ends."""
    other = await door.client("alice")
    async with streaming(ready, "s1", after=3) as feed:
        await wait_until(lambda: door.runtime.wake.subscribed("acme"))
        await revoke_token(door.admin, "acme", ready.token.split(".")[3])
        assert (await other.submit("s1", "c4")).status_code == 201
        assert all(frame.comment for frame in await feed.rest())
    assert_refused(await ready.http.get(UPDATES, headers=STREAM), 401, kind="denied")


async def test_a_drain_ends_streams_and_takes_no_new_wait(door: House, ready: Client) -> None:
    async with streaming(ready, "s1", after=3) as feed:
        assert (await feed.frame()) is not None
        door.door.drain()
        assert all(frame.comment for frame in await feed.rest())
    await wait_until(lambda: under_way(door) == 0)


async def test_a_store_that_goes_away_is_told_with_the_cursor_to_resume_at(
    own_store: EmbeddedStore,
) -> None:
    async with FaultProxy(own_store.url) as proxy, house(proxy.url) as door:
        alice = await door.client("alice")
        await alice.open("s1")
        await alice.submit("s1", "c1")
        async with streaming(alice, "s1") as feed:
            assert (await feed.updates(1))[0].sequence == 1
            proxy.refuse()
            told = [frame for frame in await feed.rest() if not frame.comment]
        assert [frame.event for frame in told] == ["resync"]
        assert json.loads(told[0].data) == {"session_id": "s1", "reason": "interrupted", "head": 1}
        assert told[0].id == ""
        assert_refused(await alice.http.get(UPDATES, headers=STREAM), 503, kind="unavailable")
        proxy.pass_on()

        async def resumed() -> bool:
            return (await alice.page("s1", after=1)).status_code == 200

        await wait_until(resumed)
