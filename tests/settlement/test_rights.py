"""What is asked of the policy about admitted work, and until when the answer bounds what rests on it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from settlement_svc.rights import question, rights_of
from shared.domain.errors import InvalidInput
from shared.domain.policy import AuthorizationInput, Policy
from shared.domain.policy_document import compile_policy
from tests.settlement.host import PEER, Host, contract
from tests.settlement.policies import ALLOWED, apply, denied, ending, learn, stored
from tests.settlement.scripted import ScriptedHandler
from tests.settlement.test_revocation import Endless, working
from tests.support.polling import wait_until

TTL_MS = 150


@pytest.mark.requirement("RT-AUTH-01", "RT-AUTH-02", "RT-CTX-03", "RT-CTX-04")
async def test_a_question_names_the_invoker_and_what_is_to_be_done(redis_url: str) -> None:
    terms = contract()
    async with Host.create(redis_url, terms) as host:
        await host.open()
        admission = (await stored(host, await host.submit("c1"))).admission
    asked = question(admission, terms, "claim", 0, "other", 3)
    expected = AuthorizationInput(
        principal="alice",
        action="claim",
        session_id="s1",
        owner="alice",
        profile="urn:x:work",
        contract="test.work",
        interaction="do",
        peer="other",
        branch=PEER,
        attempt=3,
    )
    assert asked == expected
    guest = msgspec.structs.replace(admission, principal="carol", session_owner="alice")
    assert question(guest, terms, "answer", 0, PEER, 1).owner == "alice"
    invoked = msgspec.structs.replace(admission, session_id="")
    asked = question(invoked, terms, "answer", 0, PEER, 1)
    assert (asked.session_id, asked.owner, asked.profile) == ("", "", "")
    for attempt in (0, 17):
        with pytest.raises(InvalidInput):
            question(admission, terms, "claim", 0, PEER, attempt)


@pytest.mark.requirement("RT-AUTH-01", "RT-AUTH-09")
async def test_rights_are_those_of_the_policy(redis_url: str) -> None:
    terms = contract()
    async with Host.create(redis_url, terms) as host:
        await host.open()
        admission = (await stored(host, await host.submit("c1"))).admission
    free = rights_of(Policy("1"), admission, terms, 1_000)("claim", 0, PEER, 1)
    assert (free.allowed, free.expires_ms) == (True, 61_000)
    document: dict[str, Any] = {"rules": [denied(peers=["other"]), {**ALLOWED, "ttlMs": 5}]}
    rights = rights_of(Policy("7", compile_policy(document)), admission, terms, 1_000)
    assert not rights("claim", 0, "other", 1).allowed
    right = rights("claim", 0, PEER, 1)
    assert (right.allowed, right.revision, right.expires_ms) == (True, "7", 1_005)


class Bounds:
    """The upper bounds of the steps that one process sends, each with the bound of its own clock."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[tuple[int, int]]] = {}
        run = host.handle.store.run
        clock = host.runtime.clock

        async def noted(name: str, keys: Any, args: Any, *more: Any) -> Any:
            verb = args[0] if name in ("lease", "session") else name
            position = 4 if name == "replace" else 3
            if name in ("lease", "session", "replace"):
                self.seen.setdefault(verb, []).append((args[position], clock.lower_ms()))
            return await run(name, keys, args, *more)

        monkeypatch.setattr(host.handle.store, "run", noted)

    def all_short(self, verb: str) -> bool:
        """Whether every such step was bounded by a right that ends within ``TTL_MS``."""
        return all(bound <= now + TTL_MS for bound, now in self.seen[verb])


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09")
async def test_every_step_is_bounded_by_its_right(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim, renewal, fold and turn; a short right of one lease bounds no other's renewal."""
    terms = contract(effects="unsafe", lease={"leaseMs": 60_000, "renewMs": 50})
    endless = Endless()
    async with (
        Host.create(redis_url, terms) as host,
        ScriptedHandler(endless) as handler,
        working(host, handler.url) as worker,
    ):
        for session in ("s1", "s2"):
            await host.open(session)
        short = {**ALLOWED, "sessions": ["s1"], "ttlMs": TTL_MS}
        await apply(host, short)
        await learn(host)
        bounds = Bounds(host, monkeypatch)
        await host.submit("c1")
        await host.submit("d1", session_id="s2")
        carrying = []
        for name in ("s1", "s2"):
            carrying.append(asyncio.create_task(worker.carrier.carry(await worker.next())))
            await wait_until(lambda: len(handler.calls) == len(carrying))
            assert bounds.all_short("claim") == (name == "s1")
        await wait_until(lambda: len(bounds.seen.get("renew", [])) >= 4)
        lengths = [bound - now for bound, now in bounds.seen["renew"]]
        assert min(lengths) <= TTL_MS
        assert max(lengths) > 10 * TTL_MS
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


@pytest.mark.requirement("RT-AUTH-06", "RT-AUTH-09")
async def test_a_fold_and_the_turn_after_it_are_bounded(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host.create(redis_url, contract()) as host:
        await host.open()
        await apply(host, {**ALLOWED, "ttlMs": TTL_MS})
        await learn(host)
        first, second = await host.submit("c1"), await host.submit("c2")
        await host.store_answer(await host.grant(first))
        bounds = Bounds(host, monkeypatch)
        await host.settler.settle(first)
        assert await ending(host, first) == ("success", "completed", "")
        assert (await stored(host, second)).branches[0].outbox is not None
        assert bounds.all_short("replace")
        assert bounds.all_short("turn")


@pytest.mark.requirement("RT-OWN-04", "RT-AUTH-08")
async def test_no_lease_is_given_up_for_a_policy_that_has_passed(redis_url: str) -> None:
    """A worker that holds one lease knows a policy that refuses it; the present one does not."""
    terms = contract(effects="unsafe", lease={"leaseMs": 60_000, "renewMs": 59_000})
    endless = Endless()
    async with (
        Host.create(redis_url, terms) as host,
        ScriptedHandler(endless) as handler,
        working(host, handler.url) as worker,
    ):
        await host.open()
        operation = await host.submit("c1")
        carrying = asyncio.create_task(worker.carrier.carry(await worker.next()))
        await wait_until(lambda: handler.calls)
        until = (await stored(host, operation)).branches[0].until_ms
        await apply(host, denied())
        await learn(host)
        await apply(host)
        await worker.leases._renew((60_000, 59_000))
        assert (await stored(host, operation)).branches[0].until_ms > until
        assert not endless.left.is_set()
        await apply(host, denied())
        await worker.leases._renew((60_000, 59_000))
        await carrying
        assert await ending(host, operation) == ("revoked", "uncertain", "revoked")
