"""Every route, tried with somebody else's names: the same bytes as for names that exist nowhere, and nothing
of theirs moved. A route without a recipe fails here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest
import redis
from starlette.routing import Route

from admission_svc.app import Door
from settlement_svc.health import health_app
from shared.config import AdmissionSettings
from shared.store.runtime import Runtime
from tests.isolation import recipes
from tests.isolation.listening import Listening
from tests.isolation.recipes import RECIPES, SETTLEMENT, Attempt, Names
from tests.isolation.stage import OWNER, Answer, Stage, Stranger, contents, named, stage

_LATER = [("PUT", "/v1/sessions/{session_id}"), ("PUT", "/v1/policy")]
ROUTES = [*sorted(RECIPES.keys() - {*_LATER}), *_LATER]
"""What opens sessions comes after what looks for them, and what changes permissions at the end."""
PORTS: dict[str, Any] = {"port": 8080, "metrics_port": 8080}
"""One port for all, so that the metrics are a route as well."""


def assert_complete(routes: set[tuple[str, str]], table: dict[tuple[str, str], Any], where: str) -> None:
    missing, left = sorted(routes - table.keys()), sorted(table.keys() - routes)
    told = [f"{method} {path}" for method, path in missing]
    assert not missing, (
        f"{where} has routes that nobody tries as a stranger: {', '.join(told)}. "
        f"Write a recipe for each in tests/isolation/recipes.py:\n{recipes.__doc__}"
    )
    assert not left, f"recipes without a route of {where}: {left}"


def test_every_route_of_the_door_has_a_recipe() -> None:
    settings = AdmissionSettings(redis_url="redis://127.0.0.1:1", port=8080, metrics_port=8080)
    door = Door(Runtime(settings.redis_url), settings)
    routes = {(operation.method, operation.path) for operation in door.operations}
    assert_complete(routes, RECIPES, "the door")


def test_every_route_of_a_settlement_process_has_a_recipe() -> None:
    async def unready() -> str | None:
        return None

    app = health_app(unready, with_metrics=True)
    routes = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert_complete(routes, SETTLEMENT, "a settlement process")


def test_a_route_without_a_recipe_is_told_with_how_to_add_one() -> None:
    with pytest.raises(AssertionError, match=r"POST /v1/new.*tests/isolation/recipes\.py") as told:
        assert_complete({("POST", "/v1/new"), *RECIPES}, RECIPES, "the door")
    assert "yields" in str(told.value)
    with pytest.raises(AssertionError, match="without a route"):
        assert_complete(set(), RECIPES, "the door")


Tries = tuple[Attempt, ...]


def attempts(route: tuple[str, str], *strangers: Stranger) -> Iterator[Tries]:
    """What a route's recipe tries as each of the strangers, and the same with HEAD where it reads."""
    for tries in zip(*(RECIPES[route](one.tries, one.own) for one in strangers), strict=True):
        yield tries
        if tries[0].method == "GET":
            yield tuple(head(attempt) for attempt in tries)


def head(attempt: Attempt) -> Attempt:
    headers = {name: value for name, value in attempt.headers.items() if name != "accept"}
    return Attempt("HEAD", attempt.path, None, headers, moving=attempt.moving)


def assert_told_alike(scene: Stage, tried: Attempt, told: Answer, expected: Answer) -> None:
    if tried.path != "/openapi.json":
        scene.assert_silent(told)
    if tried.moving:
        assert told.status == expected.status, tried
    else:
        assert told == expected, tried


@pytest.mark.case(1, 2, 71)
@pytest.mark.requirement("DASPX-04", "DASP-CORE-003d")
@pytest.mark.parametrize("twins", [("acme-2", "acme-3"), ("a", "b"), ("beta", "gama")], ids="-".join)
async def test_another_tenant_is_told_what_it_would_be_told_of_nothing(
    redis_url: str, raw: redis.Redis, twins: tuple[str, str]
) -> None:
    """Also a tenant whose name begins as the owner's does, or whose name the owner's begins with."""
    async with stage(redis_url, raw, twins, **PORTS) as scene:
        before = scene.belongings()
        with Listening(raw) as heard:
            for route, (stranger, twin) in product(ROUTES, scene.pairs.values()):
                for tried, reference in attempts(route, stranger, twin):
                    told, expected = await stranger.ask(tried), await twin.ask(reference)
                    assert_told_alike(scene, tried, told, expected)
                    assert scene.belongings() == before, tried
            channels = {channel for channel, _ in heard.messages()}
        assert channels == {f"lg:{{{tenant}}}:wake".encode() for tenant in twins}
        left = b"".join(value or b"" for value in contents(raw, f"lg:{{{twins[0]}}}:*").values())
        assert b"canary" not in left


@pytest.mark.requirement("DASPX-04", "DASP-CORE-003d", "DASP-CORE-001a")
async def test_another_principal_is_told_what_it_would_be_told_of_nothing(
    redis_url: str, raw: redis.Redis
) -> None:
    """Ids that are one per tenant are the exception: they are told as ids used up long ago are."""
    async with stage(redis_url, raw, **PORTS) as scene:
        before = kept(scene)
        for route, (fellow, nobody, spent) in product(ROUTES, scene.fellows.values()):
            for tried, unused, used in attempts(route, fellow, nobody, spent):
                told = await fellow.ask(tried)
                expected = await (spent.ask(used) if tried.tenant_wide else nobody.ask(unused))
                assert_told_alike(scene, tried, told, expected)
                assert kept(scene) == before, tried


def kept(scene: Stage) -> dict[bytes, Any]:
    """What is not bob's: all keys but those of his own session, and of the tenant's own its facts and no
    counters.
    """
    theirs = {key: value for key, value in scene.belongings().items() if b"s-bobs" not in key}
    meta: Any = scene.raw.hgetall(f"lg:{{{OWNER}}}:meta")
    theirs[f"lg:{{{OWNER}}}:meta".encode()] = {
        name: value for name, value in meta.items() if name not in (b"last_ms", b"usage")
    }
    return theirs


async def test_methods_that_a_path_has_not_are_refused_alike(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url, raw) as scene:
        stranger, twin = scene.pairs["caller"]
        before = scene.belongings()
        for path in sorted({path for _, path in ROUTES if "{" in path}):
            for method in ("PATCH", "OPTIONS", "POST", "PUT", "DELETE", "TRACE"):
                if (method, path) in RECIPES:
                    continue
                mine, other = (Attempt(method, filled(path, one.tries)) for one in (stranger, twin))
                told = await stranger.ask(mine)
                assert told.status == 405, mine
                assert told == await twin.ask(other)
        for path in ("/v1/sessions/{session_id}/", "/v1/operations/{session_id}", "/{session_id}", "/v1"):
            mine, other = (Attempt("GET", filled(path, one.tries)) for one in (stranger, twin))
            told = await stranger.ask(mine)
            assert told.status == 404, mine
            assert told == await twin.ask(other)
        assert scene.belongings() == before


def filled(path: str, names: Names) -> str:
    values = {"session_id": names.session, "command_id": names.command, "client": names.client}
    return re.sub(r"{(\w+)}", lambda found: values[found[1]], path)


@pytest.mark.parametrize("route", sorted(SETTLEMENT), ids=" ".join)
async def test_a_settlement_process_tells_nothing_that_depends_on_who_asks(route: tuple[str, str]) -> None:
    async def unready() -> str | None:
        return None

    app = health_app(unready, with_metrics=True)
    theirs, nobody = named("theirs", "0" * 8 + "-4", 4, "1"), named("nobody", "1" * 8 + "-4", 4, "1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://peer") as anyone:
        client: Any = type("Anyone", (), {"http": anyone})()
        first, second = (Stranger(client, names, "s-own") for names in (theirs, nobody))
        for mine, other in zip(
            SETTLEMENT[route](theirs, "s-own"), SETTLEMENT[route](nobody, "s-own"), strict=True
        ):
            token = f"lg1.acme.{'0' * 8}.{'0' * 16}.{'s' * 43}"
            told = await first.ask(mine, token)
            assert told.status == 200
            again = await second.ask(other)
            assert mine.moving or told == again
            assert b"theirs" not in told.body
