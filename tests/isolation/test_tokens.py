"""Tokens of one tenant presented as another's, whole or in parts: refused on every route with the same bytes
as tokens that never were, and of a tenant's name nothing can be learned but by its own tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import product

import pytest
import redis

from tests.isolation.recipes import RECIPES, Attempt
from tests.isolation.stage import OWNER, Answer, Stage, contents, stage

Parts = tuple[str, str, str, str]
"""Tenant, authority8, token id, secret."""


def parts(token: str) -> Parts:
    _, tenant, authority8, token_id, secret = token.split(".")
    return tenant, authority8, token_id, secret


def joined(token: Parts) -> str:
    return ".".join(("lg1", *token))


def made_up(tenant: str, authority8: str = "") -> Parts:
    """A token that never was."""
    return tenant, authority8 or secrets.token_hex(4), secrets.token_hex(8), secrets.token_urlsafe(32)


Spliced = Callable[[Parts, Parts], tuple[Parts, Parts]]
SPLICES: dict[str, Spliced] = {
    # Mine and theirs → what is tried, and the same of what never was.
    "their id under my tenant": lambda m, t: ((m[0], m[1], t[2], t[3]), made_up(m[0], m[1])),
    "their id and my secret": lambda m, t: ((m[0], m[1], t[2], m[3]), made_up(m[0], m[1])),
    "my id and their secret": lambda m, t: ((m[0], m[1], m[2], t[3]), made_up(m[0], m[1])),
    "my secret under their id": lambda m, t: ((t[0], t[1], t[2], m[3]), made_up(t[0], t[1])),
    "my token under their names": lambda m, t: ((t[0], t[1], m[2], m[3]), made_up(t[0], t[1])),
    "my tenant under their authority": lambda m, t: ((m[0], t[1], m[2], m[3]), made_up(m[0])),
    "their token under my tenant": lambda m, t: ((m[0], t[1], t[2], t[3]), made_up(m[0])),
    "my token under their tenant": lambda m, t: ((t[0], m[1], m[2], m[3]), made_up("nobody")),
    "their id under my authority": lambda m, t: ((t[0], m[1], t[2], t[3]), made_up("nobody")),
    "a guess at their tenant": lambda _, t: (made_up(t[0]), made_up("nobody")),
    "a guess at my tenant": lambda m, _: (made_up(m[0]), made_up("nobody")),
    "a name that begins as theirs": lambda m, t: ((t[0][:2], t[1], t[2], t[3]), made_up("nobody")),
    "a name that goes on from theirs": lambda m, t: ((t[0] + "-2", t[1], t[2], t[3]), made_up("nobody")),
}


async def told(scene: Stage, attempt: Attempt, token: Parts) -> Answer:
    stranger, _ = scene.pairs["caller"]
    return await stranger.ask(attempt, joined(token))


@pytest.mark.case(4)
@pytest.mark.requirement("DASPX-04", "DASP-CORE-001a", "DASP-CORE-003d")
@pytest.mark.parametrize("splice", SPLICES.values(), ids=SPLICES.keys())
async def test_a_spliced_token_is_one_that_never_was(
    redis_url: str, raw: redis.Redis, splice: Spliced
) -> None:
    """On every route that needs one, with the owner's names in the request."""
    async with stage(redis_url, raw) as scene:
        stranger, _ = scene.pairs["caller"]
        before = contents(raw, "*")
        tried, reference = splice(parts(stranger.client.token), parts(scene.alice.token))
        open_to_all = 0
        for route in sorted(RECIPES.keys() - {("GET", "/metrics")}):
            attempt = next(iter(RECIPES[route](scene.theirs, stranger.own)))
            mine, nobody = await told(scene, attempt, tried), await told(scene, attempt, reference)
            assert mine == nobody, attempt
            if mine.status == 200:
                open_to_all += 1
                continue
            assert mine.status in (401, 503), mine
            scene.assert_silent(mine)
        assert open_to_all == 3
        assert contents(raw, "*") == before


@pytest.mark.parametrize("role", ["caller", "operator"])
async def test_what_a_token_may_elsewhere_it_may_not_here(
    redis_url: str, raw: redis.Redis, role: str
) -> None:
    """A secret that the desk remembers from its own tenant is not remembered for another's name."""
    async with stage(redis_url, raw) as scene:
        stranger, _ = scene.pairs[role]
        mine = parts(stranger.client.token)
        own = Attempt("GET", "/v1/authority")
        assert (await told(scene, own, mine)).status == 200
        theirs = parts(scene.alice.token)
        for tenant, authority8 in product((OWNER,), (mine[1], theirs[1])):
            answer = await told(scene, own, (tenant, authority8, mine[2], mine[3]))
            assert answer.status in (401, 503)
            assert authority8 not in answer.body.decode()
        assert (await told(scene, own, mine)).status == 200
