"""``/openapi.json``: the route table described from the message types that are read and written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import msgspec

from admission_svc.messages import Problem
from admission_svc.routes import Handler
from shared.domain.events import MEDIA_TYPE

_PARAMETER: Final = re.compile(r"{(\w+)}")
_JSON: Final = "application/json"
_ID: Final = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_PROBLEMS: Final = {
    400: "malformed or unsafe input",
    401: "no, or no valid token",
    403: "not allowed",
    404: "missing or hidden",
    409: "the same identity with other content",
    410: "gone for good",
    413: "too large",
    415: "not JSON in UTF-8",
    422: "not offered here",
    503: "not now; repeat unchanged",
}

Answer: TypeAlias = type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None
"""The body of an answer: one shape, one of several, or none of ours."""

Parameter = tuple[str, str, dict[str, Any], str]
"""Where (query or header), name, schema, description."""

WAIT: Final[Parameter] = (
    "header",
    "Prefer",
    {"type": "string"},
    "wait=N: hold the answer, 30 seconds at most",
)
KEY: Final[Parameter] = ("header", "Idempotency-Key", {"type": "string"}, "the command id, bare or quoted")
AFTER: Final[Parameter] = ("query", "after", {"type": "integer", "minimum": 0}, "the cursor applied last")
LIMIT: Final[Parameter] = (
    "query",
    "limit",
    {"type": "integer", "minimum": 1, "maximum": 100},
    "the most updates to give",
)
CLIENT: Final[Parameter] = ("query", "client", _ID, "resume at the cursor held for this client")
LAST_EVENT_ID: Final[Parameter] = (
    "header",
    "Last-Event-ID",
    {"type": "string"},
    "where a stream resumes; wins over after and client",
)


@dataclass(frozen=True)
class Operation:
    """One row of the route table."""

    method: str
    path: str
    handler: Handler
    summary: str
    answers: dict[int, Answer]
    body: type[msgspec.Struct] | None = None
    parameters: Sequence[Parameter] = ()
    problems: Sequence[int] = ()
    token: bool = True
    stream: bool = False
    plain: str = field(default="")


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a route table."""
    rows = list(operations)
    types = {kind for row in rows for answer in (row.body, *row.answers.values()) for kind in _kinds(answer)}
    types.discard(Problem)
    ordered = [Problem, *sorted(types, key=lambda kind: kind.__name__)]
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = _described(row)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lockgate admission",
            "version": version("lockgate"),
            "description": "Sessions whose commands are admitted once, worked, settled and replayed.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(row: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": row.summary,
        "operationId": row.handler.__name__,
        "parameters": [*_path_parameters(row.path), *(_parameter(p) for p in row.parameters)],
        "responses": _responses(row),
        "security": [{"token": []}] if row.token else [],
    }
    if row.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(row.body)}}}
    return described


def _responses(row: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in row.answers.items():
        content: dict[str, Any] = {}
        if row.plain:
            content[row.plain] = {"schema": {"type": "string"}}
        elif kind is not None:
            content[_JSON] = {"schema": _schema(kind)}
        if row.stream:
            note = f"one event per update, its data in {MEDIA_TYPE}"
            content["text/event-stream"] = {"schema": {"type": "string", "description": note}}
        found[str(status)] = {"description": row.summary, **({"content": content} if content else {})}
    for status in (401, *row.problems) if row.token else row.problems:
        if str(status) in found:
            continue
        found[str(status)] = {
            "description": _PROBLEMS[status],
            "content": {_JSON: {"schema": _reference(Problem)}},
        }
    return dict(sorted(found.items()))


def _kinds(answer: Answer) -> tuple[type[msgspec.Struct], ...]:
    if answer is None:
        return ()
    return answer if isinstance(answer, tuple) else (answer,)


def _schema(answer: Answer) -> dict[str, Any]:
    references = [_reference(kind) for kind in _kinds(answer)]
    return references[0] if len(references) == 1 else {"oneOf": references}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"in": "path", "name": name, "required": True, "schema": _ID} for name in _PARAMETER.findall(path)
    ]


def _parameter(parameter: Parameter) -> dict[str, Any]:
    where, name, schema, description = parameter
    return {"in": where, "name": name, "required": False, "schema": schema, "description": description}
