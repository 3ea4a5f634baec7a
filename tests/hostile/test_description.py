"""Everything that the description allows, and much that it forbids, sent to a real door by a tool that knows
nothing of it but its description.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.admission.house import NOTES, House
from tests.hostile.door import Served, full_session, serve
from tests.support.processes import Processes

EXAMPLES = 10
SLOWEST_S = 5.0
GROWTH = 48 * 1_048_576
CHECKS: list[Any] = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """What a process has used of its processors: time that a busy machine does not add to."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def lead_somewhere(case: Case[Any]) -> None:
    """Put what is there in the place of what was made up, so that answers of every kind come back."""
    if "session_id" in (case.path_parameters or {}) and case.method != "DELETE":
        case.path_parameters["session_id"] = "s1"
    body = case.body
    if isinstance(body, dict):
        if "name" in body:
            body["name"] = "note.write"
        if "input" in body:
            body["input"] = {}
        if "profile" in body:
            body["profile"] = dict(NOTES)


class Run:
    """Runs over every operation. The statuses that came back show that they reached something."""

    def __init__(self, door: Served, token: str) -> None:
        self._door = door
        self._schema = schemathesis.openapi.from_url(f"{door.base}/openapi.json")
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["authorization"] = f"Bearer {token}"
        self.statuses: dict[str, set[int]] = {}

    def close(self) -> None:
        self._session.close()

    def operations(self) -> Iterator[Any]:
        """Every operation of the description; none may be unreadable."""
        for found in self._schema.get_all_operations():
            assert isinstance(found, Ok), found.err()
            yield found.ok()

    def over(self, mode: GenerationMode) -> None:
        """Send the examples of every operation; AssertionError with the request at the first bad answer."""
        for operation in self.operations():
            raw = operation.definition.raw
            if mode is GenerationMode.POSITIVE or raw.get("parameters") or "requestBody" in raw:
                self._try(operation, mode)

    def _try(self, operation: Any, mode: GenerationMode) -> None:
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
        def one(case: Case[Any], known: bool) -> None:
            if known and mode is GenerationMode.POSITIVE:
                lead_somewhere(case)
            self._send(operation.label, case, mode)

        one()

    def _send(self, label: str, case: Case[Any], mode: GenerationMode) -> None:
        before = cpu_s(self._door.process.pid)
        response = case.call(session=self._session, timeout=20)
        took = cpu_s(self._door.process.pid) - before
        curl = case.as_curl_command()
        self.statuses.setdefault(label, set()).add(response.status_code)
        assert response.status_code < 500 or response.status_code == 503, curl
        assert took < SLOWEST_S, (took, curl)
        checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS
        case.validate_response(response, checks=checks)


@pytest.mark.timeout(300)
# Other threads of the process draw random numbers meanwhile; the generators' own are seeded.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
async def test_every_answer_is_one_that_the_description_gives(
    redis_url: str, processes: Processes, arranged: House
) -> None:
    """Never a 5xx but the declared 503, never long, never more memory with every further request."""
    load_all_checks()
    await full_session(arranged, "s1", 2, 100)
    token = await arranged.token("alice", "caller", "operator")
    door = await serve(processes, redis_url)
    run = await asyncio.to_thread(Run, door, token)
    try:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            await asyncio.to_thread(run.over, mode)
        warm = door.memory
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            await asyncio.to_thread(run.over, mode)
        assert door.memory - warm < GROWTH
    finally:
        run.close()
    assert len(run.statuses) >= 12
    assert {status for found in run.statuses.values() for status in found} >= {200, 201, 400, 404, 409}, (
        run.statuses
    )
