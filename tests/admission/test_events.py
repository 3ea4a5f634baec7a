"""Facts as CloudEvents: one identity for ever, and the stored bytes as they are."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.canonical import MAX_FACT_BYTES
from shared.domain.events import Renderer, rfc3339, source
from shared.domain.ids import MAX_SAFE

AUTHORITY = "0123456789abcdef" * 2
RENDERER = Renderer("acme", AUTHORITY, "s:1")


def test_an_update_is_a_whole_event() -> None:
    written = RENDERER.update(7, "outcome", "c1", b'{"status":"completed"}', 1_700_000_000_123)
    assert json.loads(written) == {
        "specversion": "1.0",
        "id": "s:1/7",
        "source": f"urn:lockgate:acme:{AUTHORITY}",
        "type": "dasp.v1.update",
        "datacontenttype": "application/json",
        "time": "2023-11-14T22:13:20.123Z",
        "data": {
            "session_id": "s:1",
            "sequence": 7,
            "kind": "command.outcome",
            "command_id": "c1",
            "payload": {"status": "completed"},
        },
    }
    assert b" " not in written


@pytest.mark.parametrize(
    ("kind", "told"),
    [("accepted", "command.accepted"), ("application", "application"), ("outcome", "command.outcome")],
)
def test_kinds_are_those_of_the_protocol(kind: str, told: str) -> None:
    written = RENDERER.update(1, kind, "c1", b"{}", 0)  # type: ignore[arg-type]
    assert json.loads(written)["data"]["kind"] == told


def test_an_update_without_a_command_says_null() -> None:
    assert json.loads(RENDERER.update(1, "application", "", b"{}", 0))["data"]["command_id"] is None


@pytest.mark.requirement("DASP-CORE-009c")
def test_rendering_again_gives_the_same_bytes_and_another_place_another_identity() -> None:
    one = RENDERER.update(1, "accepted", "c1", b"{}", 5)
    assert Renderer("acme", AUTHORITY, "s:1").update(1, "accepted", "c1", b"{}", 5) == one
    others = [
        RENDERER.update(2, "accepted", "c1", b"{}", 5),
        Renderer("acme", AUTHORITY, "s:2").update(1, "accepted", "c1", b"{}", 5),
        Renderer("acme", "f" * 32, "s:1").update(1, "accepted", "c1", b"{}", 5),
    ]
    identities = {(event["source"], event["id"]) for event in map(json.loads, [one, *others])}
    assert len(identities) == 4


def test_a_payload_goes_in_as_it_is() -> None:
    payload = b'{"a":[],"b":{},"n":9007199254740991,"s":"a/b\xe2\x80\xa8","z":null}'
    assert payload in RENDERER.update(1, "application", "c1", payload, 0)


@pytest.mark.requirement("DASPX-06")
@given(st.integers(1, MAX_SAFE), st.integers(0, MAX_SAFE // 1000), st.integers(1, 128))
def test_the_overhead_is_never_exceeded(sequence: int, at_ms: int, length: int) -> None:
    """What leaves room for it fits into one saved update, whatever its sequence and time."""
    command_id = "c" * length
    room = MAX_FACT_BYTES - RENDERER.overhead("application", command_id)
    at_ms = min(at_ms, 253_402_300_799_999)
    payload = b'"' + b"x" * (room - 2) + b'"'
    assert len(RENDERER.update(sequence, "application", command_id, payload, at_ms)) <= MAX_FACT_BYTES
    longest = RENDERER.update(MAX_SAFE, "application", command_id, payload, at_ms)
    assert len(longest) == MAX_FACT_BYTES


@given(st.integers(0, 253_402_300_799_999))
def test_instants_are_exact_to_the_millisecond(at_ms: int) -> None:
    read = datetime.fromisoformat(rfc3339(at_ms))
    assert read.tzinfo is not None
    passed = read - datetime(1970, 1, 1, tzinfo=UTC)
    assert (passed.days * 86_400 + passed.seconds) * 1000 + passed.microseconds // 1000 == at_ms


def test_the_source_names_tenant_and_authority() -> None:
    assert source("acme", AUTHORITY) == f"urn:lockgate:acme:{AUTHORITY}"
