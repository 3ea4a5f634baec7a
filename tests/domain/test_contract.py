"""Contracts as wholes: digest, strictness, session sections."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from shared.domain.canonical import canonical
from shared.domain.contract import Execution, OnUncertain, parse_bundle
from shared.domain.errors import InvalidInput, Unsupported
from shared.domain.ids import IdKind, check
from tests.domain.bundles import LEAST, MISSING, OBJECT, SESSION, bundle, read, refused, with_session

_WORK = "/interactions/work"


@pytest.mark.requirement("RT-CAN-07")
def test_the_digest_is_that_of_the_content() -> None:
    made = with_session()
    contract = read(made)
    assert check(IdKind.DIGEST, contract.digest)
    assert contract.document == canonical(made)
    reordered = json.dumps(dict(reversed(made.items())), indent=2).encode()
    assert parse_bundle(reordered).digest == contract.digest
    assert parse_bundle(b"--- " + reordered).digest == contract.digest
    assert parse_bundle(contract.document).digest == contract.digest
    changed = copy.deepcopy(made)
    changed["interactions"]["work"]["timeoutMs"] = 30_000
    assert read(changed).digest != contract.digest


def test_what_its_own_canonical_form_could_not_say_again_is_refused() -> None:
    error = refused(bundle(input={"type": "object", "properties": {"n": {"maximum": 1e16}}}))
    assert error.path == _WORK + "/input/properties/n/maximum"
    fine = read(bundle(input={"type": "object", "properties": {"n": {"maximum": 1e21, "multipleOf": 0.1}}}))
    assert parse_bundle(fine.document).digest == fine.digest


def test_what_its_own_canonical_form_could_not_hold_is_refused() -> None:
    """Short spellings of long numbers: what is stored must be small enough to be read again."""
    numbers = "[" + ",".join(["1e15"] * 1000) + "]"
    state = '{"n":0,"x":[' + ",".join([numbers] * 40) + "]}"
    source = json.dumps(with_session(initial="HERE")).replace('"HERE"', state)
    assert len(source) < 262_144
    with pytest.raises(InvalidInput) as caught:
        parse_bundle(source.encode())
    assert caught.value.too_large


@pytest.mark.requirement("RT-WF-09")
def test_pipelines_are_not_offered() -> None:
    with pytest.raises(Unsupported):
        read({**bundle(), "pipelines": {}})


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"extra": 1}, "/extra"),
        ({"contract": "Demo"}, "/contract"),
        ({"contract": None}, "/contract"),
        ({"version": 1.5}, "/version"),
        ({"version": "1/2"}, "/version"),
        ({"interactions": {}}, "/interactions"),
        ({"interactions": []}, "/interactions"),
        ({"interactions": {"Work": LEAST}}, "/interactions/Work"),
        ({"interactions": {f"i{n}": LEAST for n in range(129)}}, "/interactions"),
        ({"session": {}}, "/session"),
    ],
)
def test_a_wrong_bundle_is_refused_where_it_is_wrong(change: dict[str, Any], place: str) -> None:
    assert refused({**bundle(), **change}).path == place


@pytest.mark.parametrize("value", [[], "x", 1, None, {}])
def test_a_bundle_is_an_object_with_its_members(value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_bundle(json.dumps(value).encode())
    assert caught.value.path == "bundle"


@pytest.mark.requirement("RT-CAN-02", "RT-CAN-05")
@pytest.mark.parametrize(
    "source",
    [
        b'{"contract":"a","contract":"a","version":"1","interactions":{}}',
        b"contract: a\nversion: '1'\ncontract: a\ninteractions: {}\n",
        b'{"contract":"\\ud800","version":"1","interactions":{}}',
        b"contract: \xff",
    ],
)
def test_a_bundle_is_read_as_strictly_as_a_body(source: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_bundle(source)


# Session sections


def test_a_session_section_is_a_profile() -> None:
    contract = read(with_session())
    profile = contract.session
    assert profile is not None
    assert (profile.id, profile.version) == ("urn:example:dasp:demo", "1")
    assert (profile.execution, profile.on_uncertain) == (Execution.SERIAL, OnUncertain.HALT)
    assert profile.serial
    assert profile.initial == b'{"n":0}'
    assert contract.command("demo.work") is contract.interactions["work"] is contract.interaction("work")
    with pytest.raises(Unsupported):
        contract.command("work")
    with pytest.raises(Unsupported):
        contract.interaction("demo.work")
    with pytest.raises(Unsupported):
        read(bundle()).command("demo.work")


def test_a_profile_may_be_as_large_as_this() -> None:
    made = with_session(
        profileVersion="v" * 64,
        commands={f"c{i}": "work" for i in range(256)},
        updates={f"u{i}": {} for i in range(256)},
    )
    made["interactions"] = {f"i{n}": LEAST for n in range(127)} | made["interactions"]
    profile = read(made).session
    assert profile is not None
    assert (len(profile.commands), len(profile.updates)) == (256, 256)


def test_a_profile_without_state_views_an_empty_object() -> None:
    for execution in ("serial", "concurrent"):
        profile = read(
            with_session(
                execution=execution, state=MISSING, initial=MISSING, onUncertain="continue", updates=MISSING
            )
        ).session
        assert profile is not None
        assert (profile.state, profile.initial, profile.on_uncertain) == (None, b"{}", OnUncertain.CONTINUE)
        assert profile.serial == (execution == "serial")
        assert dict(profile.updates) == {}


def _deep(levels: int) -> dict[str, Any]:
    return {"k": _deep(levels - 1)} if levels > 1 else {}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"extra": 1}, "/session/extra"),
        ({"id": MISSING}, "/session"),
        ({"id": "counter"}, "/session/id"),
        ({"profileVersion": 1}, "/session/profileVersion"),
        ({"profileVersion": ""}, "/session/profileVersion"),
        ({"profileVersion": "a\nb"}, "/session/profileVersion"),
        ({"profileVersion": "v" * 65}, "/session/profileVersion"),
        ({"updates": {f"u{i}": {} for i in range(257)}}, "/session/updates"),
        ({"execution": "parallel"}, "/session/execution"),
        ({"onUncertain": "ask"}, "/session/onUncertain"),
        ({"commands": {}}, "/session/commands"),
        ({"commands": {"demo.work": "other"}}, "/session/commands/demo.work"),
        ({"commands": {"demo.work": ["work"]}}, "/session/commands/demo.work"),
        ({"commands": {"Demo": "work"}}, "/session/commands/Demo"),
        ({"commands": {f"c{i}": "work" for i in range(257)}}, "/session/commands"),
        ({"updates": []}, "/session/updates"),
        ({"updates": {"Done": {}}}, "/session/updates/Done"),
        ({"updates": {"done": {"type": "what"}}}, "/session/updates/done/type"),
        ({"updates": {"done": {"type": "string"}}}, "/session/updates/done"),
        ({"updates": {"done": False}}, "/session/updates/done"),
        ({"state": {"type": ["string", "null"]}}, "/session/state"),
        ({"state": MISSING}, "/session/initial"),
        ({"initial": MISSING}, "/session/initial"),
        ({"initial": {"n": "x"}}, "/session/initial/n"),
        ({"initial": {}}, "/session/initial"),
        ({"initial": []}, "/session/initial"),
        ({"initial": {"n": 0, "x": 0.5}}, "/session/initial/x"),
        ({"initial": {"n": 0, "x": list(range(1025))}}, "/session/initial/x"),
        ({"initial": {"n": 0, **{f"s{i}": "x" * 60_000 for i in range(4)}, "y": "x" * 30_000}}, "bundle"),
        ({"execution": "concurrent"}, "/session/state"),
    ],
)
def test_a_wrong_session_section_is_refused_where_it_is_wrong(change: dict[str, Any], place: str) -> None:
    assert refused(with_session(**change)).path == place


def test_an_initial_state_is_a_session_payload() -> None:
    read(with_session(initial={"n": 0, "x": _deep(15)}))
    assert refused(with_session(initial={"n": 0, "x": _deep(16)})).path.startswith("/session/initial/x/k")
    profile = read(with_session(initial={"n": 3.0})).session
    assert profile is not None
    assert profile.initial == b'{"n":3}'


@pytest.mark.parametrize(
    "interaction",
    [
        {"delivery": "independent"},
        {"delivery": "explicit"},
        {"completion": {"mode": "all-terminal"}},
        {"completion": {"mode": "quorum", "threshold": {"count": 1}}},
        {"aggregate": {"projection": "collect"}},
        {"aggregate": {"output": {}}},
        {"cancels": {"interaction": "plain", "pointer": "/id"}},
    ],
)
def test_a_command_needs_one_branch_and_its_answer(interaction: dict[str, Any]) -> None:
    made = {**bundle(**interaction), "session": SESSION}
    made["interactions"]["plain"] = LEAST
    error = refused(made)
    assert error.path == "/session/commands/demo.work"
    assert '"work"' in error.rule


@pytest.mark.parametrize("side", ["input", "result"])
def test_a_command_takes_and_gives_objects(side: str) -> None:
    refusing: list[Any] = [{"type": "array"}, {"type": ["string", "null"]}, False]
    for schema in refusing:
        assert refused({**bundle(**{side: schema}), "session": SESSION}).path == f"/interactions/work/{side}"
    allowed: list[Any] = [
        {},
        True,
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": OBJECT}},
    ]
    for schema in allowed:
        read({**bundle(**{side: schema}), "session": SESSION})


def test_what_is_read_cannot_be_changed() -> None:
    contract = read(with_session())
    assert contract.session is not None
    work: Any = contract.interactions["work"]
    frozen: Any = contract
    with pytest.raises(AttributeError):
        frozen.id = "other"
    with pytest.raises(AttributeError):
        work.timeout_ms = 1
    for mapping in (frozen.interactions, frozen.session.commands, frozen.session.updates):
        with pytest.raises(TypeError):
            mapping["x"] = None
    assert len({contract, contract.interactions["work"]}) == 2
