"""Every route of a door asked with given tokens, by its own description, and what a store holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import httpx
import redis

from tests.faults.client import ACTOR
from tests.faults.contracts import CONCURRENT

SSE: Final = {"accept": "text/event-stream"}
_PLACES: Final = {"session_id": "s1", "command_id": "c1", "client": "k1"}
_COMMAND: Final = {
    "command_id": "c9",
    "name": "fault.keyed",
    "input": {"id": "c9", "amount": 1, "refuse": False},
}
_SESSION: Final = {"actor_id": ACTOR, "profile": {"id": CONCURRENT.id, "version": CONCURRENT.version}}
_BODIES: Final[dict[tuple[str, str], Any]] = {
    ("put", "/v1/sessions/{session_id}"): _SESSION,
    ("post", "/v1/sessions/{session_id}/commands"): _COMMAND,
    ("post", "/v1/sessions/{session_id}/commands:batch"): {"commands": [_COMMAND]},
    ("put", "/v1/sessions/{session_id}/cursors/{client}"): {"cursor": 1},
    ("put", "/v1/policy"): {"rules": []},
}


class Ask:
    """One request of every route that needs a token."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=20)
        self._requests: list[tuple[str, str, Any, dict[str, str]]] = []

    async def every(self, authorization: str | None) -> list[httpx.Response]:
        """Each route's answer to a header, None for no header; a stream is only read where it is refused."""
        if not self._requests:
            description = (await self._http.get("/openapi.json")).json()
            self._requests = list(_requests(description))
        held = {} if authorization is None else {"authorization": authorization}
        answers = []
        for method, path, body, headers in self._requests:
            request = self._http.build_request(method, path, json=body, headers={**held, **headers})
            answer = await self._http.send(request, stream=True)
            if not answer.headers["content-type"].startswith("text/event-stream"):
                await answer.aread()
            await answer.aclose()
            answers.append(answer)
        return answers

    async def get(self, path: str, token: str, **headers: str) -> httpx.Response:
        """One GET."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self._http.get(path, headers={"authorization": f"Bearer {token}", **named})

    async def put(self, path: str, token: str, body: Any) -> httpx.Response:
        """One PUT."""
        return await self._http.put(path, headers={"authorization": f"Bearer {token}"}, json=body)

    async def ready(self) -> httpx.Response:
        """The readiness of the process."""
        return await self._http.get("/readyz")

    async def close(self) -> None:
        await self._http.aclose()


def _requests(description: dict[str, Any]) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """What to ask, from the description: a route that is added needs a body here if it takes one."""
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if not operation.get("security", description.get("security")):
                continue
            place = path.format(**_PLACES)
            body = _BODIES[method, path] if "requestBody" in operation else None
            yield method, place, body, {}
            if path.endswith("/updates"):
                yield method, place, body, SSE


def assert_unavailable(answers: Sequence[httpx.Response]) -> None:
    """Everybody is told to come back, and nothing else."""
    assert len(answers) > 10
    for answer in answers:
        where = f"{answer.request.method} {answer.request.url.path}: {answer.text}"
        assert answer.status_code == 503, where
        assert int(answer.headers["retry-after"]) >= 1, where
        assert answer.json()["kind"] == "unavailable", where


def everything(raw: redis.Redis) -> dict[bytes, Any]:
    """All that is stored, but for the beats of settling processes, which are no tenant's."""
    names: Any = raw.keys("*")
    return {name: raw.dump(name) for name in names if name != b"lg:settlers"}
