"""Commands and answers under a profile, and that whatever passes fits a saved fact."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.domain.bundle import DEFAULT_RESULT_BYTES, MAX_RESULT_BYTES
from shared.domain.canonical import MAX_FACT_BYTES, MAX_MESSAGE_BYTES
from shared.domain.contract import MAX_STATE_BYTES, Contract, Profile
from shared.domain.errors import InvalidInput, Unsupported
from shared.domain.ids import MAX_SAFE
from shared.domain.profile import (
    MAX_FACT_PAYLOAD_BYTES,
    MAX_REFUSAL_BYTES,
    MAX_UPDATE_BYTES,
    MAX_UPDATES,
    check_command,
    read_answer,
)
from shared.domain.records import Answer, CommandError, Outcome, accepted_payload, decode_answer, encode
from tests.domain.bundles import MISSING, bundle, read, with_session
from tests.domain.helpers import document


def session(**section: Any) -> tuple[Contract, Profile]:
    contract = read(with_session(**section))
    assert contract.session is not None
    return contract, contract.session


def answered(body: Any, contract: Contract, **options: Any) -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_answer(raw, contract.interactions["work"], contract.session, **options)


def refused(body: Any, contract: Contract) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        answered(body, contract)
    assert len(str(caught.value)) < 1500
    return caught.value


# Commands


def test_a_command_is_its_interaction_and_its_canonical_input() -> None:
    contract, _ = session()
    doc = document('{"input":{"b":3.0,"a":"\\u0061"}}')
    assert isinstance(doc.value, dict)
    interaction, written = check_command(contract, "demo.work", doc, doc.value["input"])
    assert interaction is contract.interactions["work"]
    assert written == b'{"a":"a","b":3}'


def test_an_unknown_command_is_not_supported() -> None:
    contract, _ = session()
    doc = document('{"input":{}}')
    assert isinstance(doc.value, dict)
    for name in ("work", "demo.other", "", "Demo.work", "__class__"):
        with pytest.raises(Unsupported):
            check_command(contract, name, doc, doc.value["input"])


@pytest.mark.requirement("DASPX-06")
@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ("[]", "/input"),
        ('{"n":"x"}', "/input/n"),
        ("{}", "/input"),
        ('{"n":1,"x":[' + ",".join("1" * 1025) + "]}", "/input/x"),
        ('{"n":1,"x":' + "[" * 16 + "]" * 16 + "}", "/input/x/0"),
    ],
)
def test_an_input_that_breaks_the_profile_is_refused_where_it_does(payload: str, place: str) -> None:
    made = with_session()
    made["interactions"]["work"]["input"] = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
    }
    contract = read(made)
    doc = document('{"input":' + payload + "}")
    assert isinstance(doc.value, dict)
    with pytest.raises(InvalidInput) as caught:
        check_command(contract, "demo.work", doc, doc.value["input"])
    assert caught.value.path.startswith(place)


@pytest.mark.requirement("DASP-CORE-002g")
def test_what_is_admitted_is_what_was_sent() -> None:
    made = with_session()
    made["interactions"]["work"]["input"] = {
        "type": "object",
        "properties": {"a": {"type": "string", "default": "x"}, "b": {"type": "string"}},
    }
    contract = read(made)
    for payload in ('{"b":" x "}', '{"b":"A\u030a"}', '{"a":"x","b":"x"}', "{}"):
        doc = document('{"input":' + payload + "}")
        assert isinstance(doc.value, dict)
        assert check_command(contract, "demo.work", doc, doc.value["input"])[1] == payload.encode()


# Answers


def test_an_answer_holds_canonical_bytes_and_survives_being_stored() -> None:
    contract, _ = session()
    answer = answered(
        b'{"state":{"n":4.0},"updates":[{"data":{"z":1,"a":[]},"name":"demo.done"}],"result":{"b":1,"a":"\\u00e9"}}',
        contract,
        state_revision="7",
    )
    assert decode_answer(encode(answer)) == answer
    stored = json.loads(encode(answer))
    assert stored == {
        "result": {"a": "é", "b": 1},
        "updates": [{"name": "demo.done", "data": {"a": [], "z": 1}}],
        "state": {"n": 4},
        "state_revision": "7",
    }
    assert b'"result":{"a":"\xc3\xa9","b":1}' in encode(answer)


def test_updates_and_state_are_optional() -> None:
    contract, _ = session()
    answer = answered({"result": {}}, contract, state_revision="7")
    assert answer.updates == ()
    assert json.loads(encode(answer)) == {"result": {}}


def test_equal_answers_have_equal_bytes() -> None:
    contract, _ = session()
    one = answered(b'{"result":{"a":1,"b":2},"updates":[]}', contract)
    other = answered(b' {"result" : {"b":2.0,"a":1e0} } ', contract)
    assert encode(one) == encode(other)


def test_a_refusal_is_an_answer() -> None:
    contract, _ = session()
    answer = answered({"refused": {"code": "overflow", "message": "über ✗"}}, contract)
    assert answer.refused is not None
    assert (answer.refused.code, answer.refused.message) == ("overflow", "über ✗")
    assert json.loads(encode(answer)) == {"refused": {"code": "overflow", "message": "über ✗"}}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", "answer"),
        (b"null", "answer"),
        (b"[]", "answer"),
        (b'"ok"', "answer"),
        (b"{}", "answer"),
        (b"<html>", "answer"),
        (b'{"result":{},"result":{}}', "answer"),
        (b'{"result":{"s":"\\ud800"}}', "/result/s"),
        (b'{"result":{"s":"\xff"}}', "answer"),
        (b'{"result":{"n":0.5}}', "/result/n"),
        (b'{"result":{"n":9007199254740992}}', "/result/n"),
        (b'{"result":null}', "/result"),
        (b'{"result":[]}', "/result"),
        (b'{"result":1}', "/result"),
        (b'{"updates":[]}', "answer"),
        (b'{"result":{},"extra":1}', "/extra"),
        (b'{"result":{},"refused":{"code":"a","message":""}}', "/result"),
        (b'{"refused":{"code":"a","message":""},"updates":[]}', "/updates"),
        (b'{"refused":null}', "/refused"),
        (b'{"refused":{"code":"a"}}', "/refused"),
        (b'{"refused":{"code":"a","message":"","retry":true}}', "/refused/retry"),
        (b'{"refused":{"code":"Not A Name","message":""}}', "/refused/code"),
        (b'{"refused":{"code":1,"message":""}}', "/refused/code"),
        (b'{"refused":{"code":"a","message":1}}', "/refused/message"),
        (b'{"result":{},"updates":{}}', "/updates"),
        (b'{"result":{},"updates":null}', "/updates"),
        (b'{"result":{},"updates":[1]}', "/updates/0"),
        (b'{"result":{},"updates":[{"name":"demo.done"}]}', "/updates/0"),
        (b'{"result":{},"updates":[{"name":"demo.done","data":{},"x":1}]}', "/updates/0/x"),
        (b'{"result":{},"updates":[{"name":"demo.other","data":{}}]}', "/updates/0/name"),
        (b'{"result":{},"updates":[{"name":["demo.done"],"data":{}}]}', "/updates/0/name"),
        (
            b'{"result":{},"updates":[{"name":"demo.done","data":{}},{"name":"demo.done","data":[]}]}',
            "/updates/1/data",
        ),
        (b'{"result":{},"updates":[{"name":"demo.done","data":{"a":"x"}}]}', "/updates/0/data/a"),
        (b'{"result":{},"state":{"n":"x"}}', "/state/n"),
        (b'{"result":{},"state":null}', "/state"),
        (b'{"result":{},"state":[]}', "/state"),
        (b'{"result":{"k":"x"}}', "/result/k"),
    ],
)
def test_any_other_answer_is_no_result(body: bytes, place: str) -> None:
    made = with_session(updates={"demo.done": {"type": "object", "properties": {"a": {"type": "integer"}}}})
    made["interactions"]["work"]["result"] = {"properties": {"k": {"type": "integer"}}}
    assert refused(body, read(made)).path == place


def test_payload_limits_hold_for_every_part_of_an_answer() -> None:
    contract, _ = session()
    deep: Any = {"n": 1}
    for _ in range(16):
        deep = {"k": deep, "n": 1}
    for body, place in (
        ({"result": deep}, "/result"),
        ({"result": {}, "updates": [{"name": "demo.done", "data": deep}]}, "/updates/0/data"),
        ({"result": {}, "state": deep}, "/state"),
    ):
        error = refused(body, contract)
        assert error.path.startswith(place)
        assert error.too_large


def test_state_is_for_profiles_that_have_one() -> None:
    contract, _ = session(execution="concurrent", state=MISSING, initial=MISSING)
    assert answered({"result": {}, "updates": []}, contract).updates == ()
    assert refused({"result": {}, "state": {}}, contract).path == "/state"


def test_an_invocation_answers_with_any_json_and_nothing_else() -> None:
    made = bundle()
    made["interactions"]["work"]["result"] = True
    contract = read(made)
    for body in (b'{"result":0.5}', b'{"result":[1e21,null]}', b'{"result":null}'):
        assert b'"result":' in encode(answered(body, contract))
    for member in ("updates", "state"):
        assert refused({"result": 1, member: []}, contract).path == f"/{member}"


def _sized(size: int) -> dict[str, Any]:
    """An object of ``size`` canonical bytes."""
    return {"s": "x" * (size - len('{"s":""}'))}


@pytest.mark.requirement("DASPX-06")
def test_sizes_are_counted_in_canonical_bytes_exactly() -> None:
    contract, _ = session(state={}, initial={})
    assert answered({"result": _sized(DEFAULT_RESULT_BYTES)}, contract)
    assert refused({"result": _sized(DEFAULT_RESULT_BYTES + 1)}, contract).path == "/result"
    update = {"name": "demo.done", "data": _sized(MAX_UPDATE_BYTES)}
    assert answered({"result": {}, "updates": [update]}, contract)
    update["data"] = _sized(MAX_UPDATE_BYTES + 1)
    error = refused({"result": {}, "updates": [update]}, contract)
    assert (error.path, error.too_large) == ("/updates/0/data", True)
    parts = {f"s{i}": "x" * 60_000 for i in range(4)}
    spare = MAX_STATE_BYTES - len(json.dumps({**parts, "y": ""}, separators=(",", ":")))
    assert answered({"result": {}, "state": {**parts, "y": "x" * spare}}, contract)
    assert refused({"result": {}, "state": {**parts, "y": "x" * (spare + 1)}}, contract).path == "/state"
    escaped = {"s": "\x00" * (DEFAULT_RESULT_BYTES // 6)}
    assert refused({"result": escaped}, contract).path == "/result"


def test_a_contract_may_allow_more_or_less() -> None:
    made = with_session()
    made["interactions"]["work"]["maxResultBytes"] = 10
    contract = read(made)
    assert answered(b'{"result": {"s":  "xx"} }', contract)
    assert refused(b'{"result":{"s":"xxx"}}', contract).too_large


def test_the_number_of_updates_and_the_size_of_an_answer_are_bounded() -> None:
    contract, _ = session()
    assert MAX_UPDATES == 64
    update = {"name": "demo.done", "data": {}}
    assert len(answered({"result": {}, "updates": [update] * MAX_UPDATES}, contract).updates) == MAX_UPDATES
    assert refused({"result": {}, "updates": [update] * (MAX_UPDATES + 1)}, contract).path == "/updates"
    padded = b'{"result":{}' + b" " * (MAX_MESSAGE_BYTES - 13) + b"}"
    assert answered(padded, contract)
    assert refused(padded + b" ", contract).too_large


def test_a_refusal_message_is_bounded_as_it_is_written() -> None:
    contract, _ = session()
    longest = "x" * (MAX_REFUSAL_BYTES - 2)
    assert answered({"refused": {"code": "a", "message": longest}}, contract)
    for message in (longest + "x", "\x00" * (MAX_REFUSAL_BYTES // 6 + 1), "é" * (MAX_REFUSAL_BYTES // 2)):
        assert refused({"refused": {"code": "a", "message": message}}, contract).path == "/refused/message"


# Facts


def _event(kind: str, payload: bytes) -> bytes:
    """An update as a compact CloudEvent with the longest of everything, also of what we never write."""
    envelope = {
        "specversion": "1.0",
        "id": "s" * 128 + "-" + str(MAX_SAFE) + "-" + "f" * 64,
        "source": f"urn:lockgate:{'t' * 63}:{'f' * 32}",
        "type": "dasp.v1.update",
        "datacontenttype": "application/json",
        "dataschema": "urn:" + "d" * 252,
        "subject": "s" * 128,
        "time": "2999-12-31T23:59:59.999999+00:00",
        "requestid": "r" * 128,
        "traceparent": "0" * 55,
        "data": {
            "session_id": "s" * 128,
            "sequence": MAX_SAFE,
            "kind": kind,
            "command_id": "c" * 128,
            "payload": "PAYLOAD",
        },
    }
    return json.dumps(envelope, separators=(",", ":")).encode().replace(b'"PAYLOAD"', payload)


@pytest.mark.requirement("DASPX-06")
def test_every_fact_that_can_be_saved_fits() -> None:
    made = with_session(updates={"u" * 128: {}}, state={}, initial={})
    made["interactions"]["work"]["maxResultBytes"] = MAX_RESULT_BYTES
    made["session"]["commands"] = {"n" * 128: "work"}
    contract = read(made)
    answer = answered(
        {
            "result": _sized(MAX_RESULT_BYTES),
            "updates": [{"name": "u" * 128, "data": _sized(MAX_UPDATE_BYTES)}],
        },
        contract,
    )
    refusal = answered(
        {"refused": {"code": "e" * 128, "message": "x" * (MAX_REFUSAL_BYTES - 2)}}, contract
    ).refused
    assert refusal is not None
    error = CommandError(refusal.code, refusal.message, retryable=False)
    outcomes = [
        encode(Outcome("completed", answer.result or None, None)),
        encode(Outcome("uncertain", answer.result or None, error)),
    ]
    update = encode(answer.updates[0])
    facts = [("command.accepted", accepted_payload("n" * 128)), ("application", update)]
    facts += [("command.outcome", outcome) for outcome in outcomes]
    for kind, payload in facts:
        assert len(payload) <= MAX_FACT_PAYLOAD_BYTES
        event = _event(kind, payload)
        assert isinstance(json.loads(event)["data"]["payload"], dict)
        assert len(event) <= MAX_FACT_BYTES


def test_the_largest_view_fits_a_message() -> None:
    assert len(_event("view", b"x" * MAX_STATE_BYTES)) <= MAX_MESSAGE_BYTES
