"""Somebody with things worth guessing, and strangers who try.

Tenant ``acme`` has a caller ``alice`` whose session, commands, cursors and facts all hold :data:`CANARY`.
Two tenants that are equal in everything stand beside it: one tries alice's names, its twin tries names that
exist nowhere, and whatever the first is told or left with, the second has to be too. A fellow is another
principal of ``acme`` itself.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import msgspec
import redis

from tests.admission.house import COUNTER, NOTES, Client, House, house
from tests.isolation.recipes import Attempt, Names

OWNER: Final = "acme"
CANARY: Final = "canary"
OWN: Final = "s-own"
_TIMES: Final = re.compile(rb'("time":"|AtMs":)[^",}]+')


class Answer(msgspec.Struct, frozen=True):
    """A response without what no two have in common: its date, and the names of whoever asked."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Stranger(msgspec.Struct, frozen=True):
    """One caller, the names it tries, and what else tells it from its counterpart."""

    client: Client
    tries: Names
    own: str
    hides: tuple[tuple[bytes, bytes], ...] = ()

    async def ask(self, attempt: Attempt, token: str | None = None) -> Answer:
        """Make one attempt; nobody is ever let into a stream."""
        headers = {**attempt.headers, **({} if token is None else {"authorization": f"Bearer {token}"})}
        request = self.client.http.build_request(
            attempt.method, attempt.path, json=attempt.body, headers=headers
        )
        response = await self.client.http.send(request, stream=True)
        try:
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            assert not streams, f"{attempt} was let into a stream"
            body = await response.aread()
        finally:
            await response.aclose()
        return self._answer(response, body)

    def _answer(self, response: httpx.Response, body: bytes) -> Answer:
        told = response.headers.raw
        lines = tuple((n.lower(), self._hidden(v)) for n, v in told if n.lower() != b"date")
        return Answer(response.status_code, lines, self._hidden(body))

    def _hidden(self, text: bytes) -> bytes:
        names = self.tries
        for place, name in enumerate(
            (names.session, names.command, names.pending, names.client, names.actor)
        ):
            text = text.replace(name.encode(), b"<name %d>" % place)
        for word, shown in self.hides:
            text = text.replace(word, shown)
        return _TIMES.sub(rb"\1<time>", text)


class Stage(msgspec.Struct, frozen=True):
    """All of them behind one door. ``secrets`` are words that nobody but alice may ever be told."""

    door: House
    raw: redis.Redis
    alice: Client
    theirs: Names
    secrets: tuple[bytes, ...]
    pairs: dict[str, tuple[Stranger, Stranger]]
    """By what they are: two callers of equal tenants, the first with alice's names."""
    fellows: dict[str, tuple[Stranger, Stranger, Stranger]]
    """One caller with alice's names, with names that exist nowhere, and with names used up long ago."""

    def belongings(self) -> dict[bytes, Any]:
        """Everything the owner's tenant holds, by key."""
        return contents(self.raw, f"lg:{{{OWNER}}}:*")

    def assert_silent(self, answer: Answer) -> None:
        """Nothing of alice's is in an answer."""
        told = answer.body + b"\n".join(name + value for name, value in answer.headers)
        for word in self.secrets:
            assert word not in told, (word, answer)


def contents(raw: redis.Redis, pattern: str) -> dict[bytes, Any]:
    """Keys and what they hold, as bytes."""
    client: Any = raw
    return {key: client.dump(key) for key in client.scan_iter(pattern, count=1_000)}


def named(word: str, event_id: str, sequence: int, revision: str) -> Names:
    """Names of six letters each."""
    assert len(word) == 6
    return Names(
        session=f"s-{word}",
        command=f"c-{word}",
        pending=f"p-{word}",
        client=f"k-{word}",
        actor=f"a-{word}",
        principal=f"n-{word}",
        peer="alfa",
        event_id=event_id,
        sequence=sequence,
        revision=revision,
    )


@asynccontextmanager
async def stage(
    redis_url: str, raw: redis.Redis, twins: tuple[str, str] = ("beta", "gama"), **settings: Any
) -> AsyncIterator[Stage]:
    """Set everything up; ``twins`` are names of equal length."""
    async with house(redis_url, **settings) as door:
        authority = await _authority(door, OWNER)
        alice = await door.client("alice")
        sequence = await furnish(door, alice)
        theirs = named("theirs", f"{authority[:8]}-{sequence}", sequence, "1")
        nobody = named("nobody", f"{secrets.token_hex(4)}-{sequence}", sequence, "1")
        pairs = await _pairs(door, twins, theirs, nobody)
        fellows = await _fellows(door, theirs, authority)
        secret = (CANARY.encode(), alice.token.split(".")[3].encode(), alice.token.split(".")[4].encode())
        yield Stage(door, raw, alice, theirs, secret, pairs, fellows)


async def furnish(door: House, alice: Client) -> int:
    """Fill alice's session: a settled command with an update and a state, a pending one, a held cursor. Gives
    its head.
    """
    names = named("theirs", "", 0, "")
    assert (await alice.open(names.session, COUNTER, names.actor)).status_code == 201
    for command in (names.command, names.pending):
        sent = await alice.submit(names.session, command, {"amount": 77_001}, name="counter.add")
        assert sent.status_code == 201, sent.text
    canary = {"value": 1, "of": CANARY}
    await door.work(
        names.command, canary, session_id=names.session, updates={"counter.changed": canary}, state=canary
    )
    held = await alice.http.put(f"/v1/sessions/{names.session}/cursors/{names.client}", json={"cursor": 2})
    assert held.status_code == 200
    page = (await alice.page(names.session)).json()
    assert CANARY in json.dumps(page["events"])
    return int(page["head"])


async def _authority(door: House, tenant: str) -> str:
    return (await (await door.handle(tenant)).snapshots.get()).revisions.authority


async def _own_session(client: Client, session_id: str) -> None:
    assert (await client.open(session_id, NOTES)).status_code == 201
    assert (await client.submit(session_id, f"own-{session_id}")).status_code == 201


ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "caller": ("caller",),
    "operator": ("operator",),
    "both": ("caller", "operator"),
    "peer": ("peer:alfa",),
    "local host": ("local-host",),
}


async def _pairs(
    door: House, twins: tuple[str, str], theirs: Names, nobody: Names
) -> dict[str, tuple[Stranger, Stranger]]:
    found: dict[str, list[Stranger]] = {role: [] for role in ROLES}
    for tenant, names in zip(twins, (theirs, nobody), strict=True):
        await door.tenant(tenant)
        authority = await _authority(door, tenant)
        hides = (
            (f"urn:lockgate:{tenant}:".encode(), b"urn:lockgate:<tenant>:"),
            (f'"tenant":"{tenant}"'.encode(), b'"tenant":"<tenant>"'),
            (authority.encode(), b"<authority>"),
            (authority[:8].encode(), b"<authority8>"),
        )
        await _own_session(await door.client("alice", tenant=tenant), OWN)
        for role, roles in ROLES.items():
            client = await door.client("alice", *roles, tenant=tenant)
            found[role].append(Stranger(client, names, OWN, hides))
    return {role: (tries[0], tries[1]) for role, tries in found.items()}


async def _fellows(
    door: House, theirs: Names, authority: str
) -> dict[str, tuple[Stranger, Stranger, Stranger]]:
    """Bob, whose own old session was closed for good, and bearers of other roles of the same tenant."""
    bob = await door.client("bob")
    own = "s-bobs"
    await _own_session(bob, own)
    nobody = named("nobody", f"{authority[:8]}-{theirs.sequence}", theirs.sequence, "1")
    spent = named("spents", nobody.event_id, theirs.sequence, "1")
    assert (await bob.open(spent.session, NOTES)).status_code == 201
    for command in (spent.command, spent.pending):
        assert (await bob.submit(spent.session, command)).status_code == 201
        await door.work(command, session_id=spent.session)
    assert (await bob.close(spent.session)).status_code == 202
    await door.purge(spent.session, spent.command, spent.pending)
    found = {}
    for role in ("caller", "peer", "local host"):
        client = await door.client("bob", *ROLES[role])
        first, second, third = (Stranger(client, names, own) for names in (theirs, nobody, spent))
        found[role] = (first, second, third)
    return found
