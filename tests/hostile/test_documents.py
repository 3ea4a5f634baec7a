"""The readers behind every door, fed directly: a value, or one refusal in few and visible words, soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.domain import strict
from shared.domain.canonical import INVOCATION, SESSION, parse
from shared.domain.contract import Contract, parse_bundle
from shared.domain.errors import InvalidInput, Unsupported
from shared.domain.policy_document import read_policy
from shared.domain.profile import read_answer
from shared.domain.source import MAX_YAML_VALUES, read_source
from tests.admission.house import counter_bundle
from tests.hostile.feed import fed, harmful

SLOWEST_S = 5.0
CONTRACT = parse_bundle(counter_bundle())
COMMAND = (
    b'{"command_id":"c1","name":"note.write","input":{"a":[1,-0,{"\xc3\xa9":null}],"b":"\\ud83d\\ude00"}}'
)
ANSWER = (
    b'{"result":{"value":1},"updates":[{"name":"counter.changed","data":{"value":1}}],"state":{"value":1}}'
)
POLICY = b"""rules:
  - {principals: [alice, "svc.*"], actions: [session.open], sessions: ["alice.*"], effect: allow}
  - {principals: ["*"], actions: [invoke], contracts: [demo.review], peers: [alfa], effect: deny, ttlMs: 9}
"""
YAML = b'contract: demo\nversion: "1"\nlist:\n  - {a: 1, b: [x, "y", 1.5, null]}\n  - |\n    text\n'


def answer(body: bytes) -> object:
    """A handler's answer, as the sidecar reads it."""
    return read_answer(body, CONTRACT.interaction("add"), CONTRACT.session, state_revision="1")


def exact(body: bytes) -> object:
    """The reading that decides where the fast one does not."""
    return strict.read(body, SESSION.exact, SESSION.max_depth, "body")


READERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "session": (lambda body: parse(body, SESSION), COMMAND),
    "invocation": (lambda body: parse(body, INVOCATION), COMMAND),
    "exact": (exact, COMMAND),
    "source in json": (read_source, counter_bundle()),
    "source in yaml": (read_source, YAML),
    "bundle": (parse_bundle, counter_bundle()),
    "policy": (read_policy, POLICY),
    "answer": (answer, ANSWER),
}


def judged(read: Callable[[bytes], object], body: bytes) -> object | None:
    """What a reader makes of a body, None where it refuses it; no other end is allowed."""
    try:
        return read(body)
    except (InvalidInput, Unsupported) as refusal:
        said = str(refusal)
        assert len(said) < 1_500, said[:200]
        assert said.isprintable(), ascii(said)
        return None


@pytest.mark.requirement("RT-HTTP-09")
@pytest.mark.parametrize("name", READERS)
def test_a_reader_gives_a_value_or_a_refusal(name: str) -> None:
    read, good = READERS[name]
    assert judged(read, good) is not None

    @settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fed(good))
    def any_body(body: bytes) -> None:
        judged(read, body)

    any_body()


@pytest.mark.parametrize("name", READERS)
def test_no_reader_takes_long(name: str) -> None:
    """Counted in the time of the processor, which a busy machine does not add to."""
    read, _ = READERS[name]
    for kind, body in harmful().items():
        started = time.process_time()
        judged(read, body)
        assert time.process_time() - started < SLOWEST_S, kind


def test_a_yaml_document_holds_no_more_than_can_be_read_soon() -> None:
    values = ", ".join(["a"] * (MAX_YAML_VALUES - 1))
    assert isinstance(read_source(f"[{values}]".encode(), max_bytes=1 << 20), list)
    with pytest.raises(InvalidInput, match=str(MAX_YAML_VALUES)) as caught:
        read_source(f"[{values}, a]".encode(), max_bytes=1 << 20)
    assert caught.value.too_large


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.text(alphabet=" \n\t-:{}[],'\"&*!|>#%@`?abc01~.é\x1b\ufeff\u2028", max_size=60))
def test_any_yaml_becomes_plain_values_or_a_refusal(text: str) -> None:
    value = judged(read_source, text.encode())
    json.dumps(value, allow_nan=False).encode("utf-8", "strict")


SCHEMAS: dict[str, object] = {
    "backtracking": {"pattern": "^(a+)+$"},
    "huge repetition": {"pattern": "(a{1000}){1000}"},
    "look behind": {"pattern": "(?<=a+)b"},
    "endless reference": {"$ref": "#"},
    "reference elsewhere": {"$ref": "https://elsewhere.internal/schema"},
    "file": {"$ref": "file:///etc/passwd"},
    "unknown draft": {"$schema": "https://elsewhere.internal/draft"},
    "wide": {"anyOf": [{"const": i} for i in range(5_000)]},
    "deep": json.loads('{"not":' * 60 + "{}" + "}" * 60),
    "exponential": {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}},
    "huge bounds": {"maxLength": 2**53 - 1, "minItems": 2**53 - 1, "multipleOf": 5e-324},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_is_refused_or_harmless(name: str) -> None:
    """An operator's bundle is trusted with its meaning, not with the process; so is input under it."""
    bundle = json.loads(counter_bundle())
    bundle["interactions"]["add"]["input"] = {"type": "object", "properties": {"amount": SCHEMAS[name]}}
    started = time.process_time()
    contract = judged(parse_bundle, json.dumps(bundle).encode())
    if contract is not None:
        value = parse(b'{"amount":"' + b"a" * 60_000 + b'!"}', INVOCATION)
        assert isinstance(contract, Contract)
        validator = contract.interaction("add").input
        judged(lambda _: validator.check(value.value, "/input"), b"")
    assert time.process_time() - started < SLOWEST_S
