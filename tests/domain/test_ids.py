"""Id patterns, derived identities, safe integers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.errors import InvalidInput
from shared.domain.ids import (
    MAX_SAFE,
    IdKind,
    MessageKind,
    attempt_id,
    check,
    check_uri,
    command_operation_id,
    intent_digest,
    invocation_digest,
    message_id,
    operation_id,
    reservation_id,
    safe_add_ms,
    safe_integer,
)
from tests.domain.helpers import VECTORS

DIGEST = "sha256:" + "0" * 64
OPERATION = VECTORS["operation_id"][0]["operationId"]

WELL_FORMED: dict[IdKind, list[str]] = {
    IdKind.TENANT: ["a", "0", "a-b", "acme-2", "a" * 63],
    IdKind.PEER: ["alfa", "peer-1"],
    IdKind.ROLE: ["caller"],
    IdKind.SINK: ["mail"],
    IdKind.SESSION: ["a", "A.b_c:d-e", "...", "-", "x" * 128],
    IdKind.COMMAND: ["c-1", "command:add.1"],
    IdKind.ACTOR: ["actor:1"],
    IdKind.REQUEST: ["r.1"],
    IdKind.PRINCIPAL: ["alice", "svc.orders", "DASP", "dasp2"],
    IdKind.CLIENT: ["web"],
    IdKind.CONTRACT: ["demo.review", "a", "a-_.0"],
    IdKind.INTERACTION: ["review"],
    IdKind.NAME: ["counter.add", "n" * 128],
    IdKind.VERSION: ["1.0.0", "1.0.0-rc.1+build_5"],
    IdKind.BRANCH: ["alfa", "A_b.c-1", "b" * 64],
    IdKind.INVOCATION_KEY: ["k", "two words", " k ", "~", ".", "k" * 255],
    IdKind.OPERATION: [OPERATION],
    IdKind.DIGEST: [DIGEST],
    IdKind.AUTHORITY: ["0123456789abcdef0123456789abcdef"],
    IdKind.UUID: ["6d9ff4a1-5c0e-5d3b-9a7c-3f2be1c04e57"],
}
MALFORMED: dict[IdKind, list[object]] = {
    IdKind.TENANT: ["-a", "a-", "a--b", "A", "a" * 64, "a}b", "{}", "a.b", "t*", "é"],
    IdKind.PEER: ["Alfa", "a_b", "a:b"],
    IdKind.ROLE: ["peer:alfa"],
    IdKind.SINK: ["a/b"],
    IdKind.SESSION: [".", "..", "a/b", "a b", "x" * 129, "é", "a\n", "\na", "a\x00"],
    IdKind.COMMAND: ["c 1", "."],
    IdKind.ACTOR: [".."],
    IdKind.REQUEST: ["r/1"],
    IdKind.PRINCIPAL: ["dasp", "..", "a b"],
    IdKind.CLIENT: ["."],
    IdKind.CONTRACT: ["1a", "A", ".a", "a:b", "n" * 129],
    IdKind.INTERACTION: ["_a"],
    IdKind.NAME: ["Counter.add", "a b"],
    IdKind.VERSION: [".", "..", "1/2", "v" * 65],
    IdKind.BRANCH: [".", "..", "a:b", "b" * 65],
    IdKind.INVOCATION_KEY: ["   ", "\t", "k\n", "k\x7f", "ключ", "k" * 256],
    IdKind.OPERATION: ["op" + "A" * 64, "op" + "0" * 63, OPERATION + "0"],
    IdKind.DIGEST: ["sha256:" + "0" * 63, "SHA256:" + "0" * 64],
    IdKind.AUTHORITY: ["0" * 31, "G" * 32],
    IdKind.UUID: ["6D9FF4A1-5C0E-5D3B-9A7C-3F2BE1C04E57", "6d9ff4a15c0e5d3b9a7c3f2be1c04e57"],
}


@pytest.mark.parametrize("kind", list(IdKind))
def test_each_kind_takes_what_its_pattern_says(kind: IdKind) -> None:
    for value in WELL_FORMED[kind]:
        assert check(kind, value) == value


@pytest.mark.parametrize("kind", list(IdKind))
def test_each_kind_refuses_everything_else_without_repeating_it(kind: IdKind) -> None:
    for value in [*MALFORMED[kind], "", None, 1, True, b"a", ["a"]]:
        with pytest.raises(InvalidInput) as caught:
            check(kind, value, "/somewhere")
        assert caught.value.path == "/somewhere"
        if isinstance(value, str) and len(value) > 8:
            assert value not in str(caught.value)


@pytest.mark.parametrize("key", ["", " ", "    ", "\t"])
def test_an_empty_or_blank_key_is_no_key(key: str) -> None:
    with pytest.raises(InvalidInput):
        check(IdKind.INVOCATION_KEY, key)


def test_only_a_principal_may_not_be_called_like_the_session_namespace() -> None:
    assert check(IdKind.SESSION, "dasp") == check(IdKind.CLIENT, "dasp") == "dasp"


def test_the_numbers_that_others_rely_on() -> None:
    assert MAX_SAFE == 9_007_199_254_740_991
    assert [kind.value for kind in MessageKind] == [1, 2, 3]


def test_a_refusal_without_place_names_the_kind() -> None:
    with pytest.raises(InvalidInput) as caught:
        check(IdKind.TENANT, "no tenant")
    assert caught.value.path == "tenant"


def test_a_hostile_length_is_refused_before_its_pattern_runs() -> None:
    for kind in IdKind:
        with pytest.raises(InvalidInput):
            check(kind, "a-" * 5_000_000)


@pytest.mark.parametrize("uri", ["urn:example:dasp:counter", "https://example.com/a?b#c", "tag:x,2024:%20"])
def test_absolute_uris(uri: str) -> None:
    assert check_uri(uri, "/id") == uri


def test_a_uri_has_at_most_512_characters() -> None:
    assert check_uri("urn:" + "a" * 508, "/id")
    with pytest.raises(InvalidInput):
        check_uri("urn:" + "a" * 509, "/id")


@pytest.mark.parametrize(
    "uri", ["counter", "/a", "", "urn:", "1rn:a", "urn:a b", "urn:%2", "urn:é", "urn:" + "a" * 512, None]
)
def test_other_text_is_no_absolute_uri(uri: object) -> None:
    with pytest.raises(InvalidInput):
        check_uri(uri, "/id")


@pytest.mark.requirement("RT-ADM-02", "RT-ADM-03")
@pytest.mark.parametrize("vector", VECTORS["operation_id"])
def test_operation_ids_match_the_vectors(vector: dict[str, str]) -> None:
    made = operation_id(vector["principalId"], vector["contractDigest"], vector["invocationKey"])
    assert made == vector["operationId"]


@pytest.mark.requirement("RT-ADM-03")
def test_a_length_counts_bytes_and_not_characters() -> None:
    principal, key = "åli", "ключ"
    framed = b"".join(
        len(part.encode()).to_bytes(8, "big") + part.encode() for part in (principal, DIGEST, key)
    )
    assert len(key.encode()) != len(key)
    assert operation_id(principal, DIGEST, key) == "op" + hashlib.sha256(framed).hexdigest()


@pytest.mark.requirement("RT-ADM-04")
def test_framing_keeps_fields_apart() -> None:
    made = {
        tuple(vector["parts"]): operation_id(*vector["parts"]) for vector in VECTORS["operation_id_framing"]
    }
    assert made == {tuple(v["parts"]): v["operationId"] for v in VECTORS["operation_id_framing"]}
    assert operation_id("ab", "c", "k") != operation_id("a", "bc", "k")
    assert len(set(made.values())) == len(made)


@pytest.mark.requirement("RT-ADM-05")
def test_an_operation_token_has_66_bytes_and_is_taken_where_operations_are_named() -> None:
    token = operation_id("alice", DIGEST, "k")
    assert len(token.encode()) == 66
    assert check(IdKind.OPERATION, token) == token
    assert len(message_id(MessageKind.REQUEST, DIGEST, token, "alfa", 1)) == 64
    assert reservation_id(token) != attempt_id(token)


@pytest.mark.requirement("RT-CAN-07")
def test_the_contract_digest_is_part_of_the_key() -> None:
    assert operation_id("alice", DIGEST, "k") != operation_id("alice", "sha256:" + "1" * 64, "k")


@pytest.mark.parametrize("vector", VECTORS["session_command_id"])
def test_command_operations_match_the_vectors(vector: dict[str, str]) -> None:
    assert command_operation_id(vector["authorityId"], vector["commandId"]) == vector["operationId"]


def test_a_command_is_one_per_authority_and_no_principal_can_name_it() -> None:
    authority = "0123456789abcdef0123456789abcdef"
    assert command_operation_id(authority, "c") == operation_id("dasp", authority, "c")
    assert command_operation_id(authority, "c") != command_operation_id("f" * 32, "c")
    with pytest.raises(InvalidInput):
        check(IdKind.PRINCIPAL, "dasp")


@pytest.mark.requirement("RT-OUT-03")
@pytest.mark.parametrize("vector", VECTORS["message_id"])
def test_message_ids_match_the_vectors(vector: dict[str, Any]) -> None:
    made = message_id(
        MessageKind(vector["kind"]),
        vector["contractDigest"],
        vector["operationId"],
        vector["branchId"],
        vector["attempt"],
    )
    assert made == vector["messageId"]


@pytest.mark.requirement("RT-OUT-03")
def test_message_fields_do_not_run_into_each_other() -> None:
    request = MessageKind.REQUEST
    assert message_id(request, "ab", "c", "d", 1) != message_id(request, "a", "bc", "d", 1)
    assert message_id(request, "a", "bc", "d", 1) != message_id(request, "a", "b", "cd", 1)
    with pytest.raises(OverflowError):
        message_id(request, "a", "b", "c", 2**64)


@pytest.mark.requirement("RT-OUT-04")
def test_a_message_id_differs_by_each_coordinate() -> None:
    made = {
        message_id(kind, digest, operation, branch, attempt)
        for kind in MessageKind
        for digest in (DIGEST, "sha256:" + "1" * 64)
        for operation in (OPERATION, "op" + "0" * 64)
        for branch in ("alfa", "bravo")
        for attempt in (1, 2, 256)
    }
    assert len(made) == 3 * 2 * 2 * 2 * 3


@pytest.mark.requirement("RT-OUT-04")
def test_another_process_derives_the_same_identities() -> None:
    """Also under another hash seed, which would move anything that depends on the order of a set."""
    program = (
        "from shared.domain.ids import *;"
        f"print(message_id(MessageKind.RESULT, {DIGEST!r}, {OPERATION!r}, 'alfa', 7));"
        f"print(reservation_id({OPERATION!r}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "4711", "PYTHONPATH": ":".join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert printed == [
        message_id(MessageKind.RESULT, DIGEST, OPERATION, "alfa", 7),
        str(reservation_id(OPERATION)),
    ]


def test_derived_uuids_are_fixed() -> None:
    """They are stored nowhere by themselves: a change would orphan every reservation."""
    assert reservation_id(OPERATION) == UUID("7596917b-0889-549f-9d2d-fe1a103891d3")
    assert attempt_id(OPERATION) == UUID("ed19e699-97d0-5faa-bb51-9121f645342b")


@given(
    st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3), st.binary(max_size=3)),
    st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3), st.binary(max_size=3)),
)
def test_an_intent_is_its_three_parts(one: tuple[str, str, bytes], other: tuple[str, str, bytes]) -> None:
    assert (intent_digest(*one) == intent_digest(*other)) == (one == other)
    assert (invocation_digest(one[0], one[2], other[2]) == invocation_digest(other[0], other[2], one[2])) == (
        (one[0], one[2]) == (other[0], other[2])
    )


def test_intents_of_commands_and_invocations_never_meet() -> None:
    assert len(intent_digest("s", "n", b"{}")) == len(invocation_digest("i", b"{}")) == 32
    assert intent_digest("s", "n", b"{}") != invocation_digest("s", b"n", b"{}")
    assert invocation_digest("i", b"{}") != invocation_digest("i", b"{}", b"[]")


def test_lone_surrogates_have_no_identity() -> None:
    with pytest.raises(InvalidInput):
        operation_id("a", DIGEST, "\ud800")
    with pytest.raises(InvalidInput):
        intent_digest("\ud800", "n", b"{}")


@pytest.mark.requirement("RT-TIME-08", "RT-GUARD-09")
def test_an_instant_beyond_the_safe_integers_is_refused() -> None:
    assert safe_add_ms(MAX_SAFE - 30_000, 30_000) == MAX_SAFE
    assert safe_add_ms(5, -5) == 0
    for instant, duration in (
        (MAX_SAFE - 30_000, 30_001),
        (MAX_SAFE, 1),
        (0, MAX_SAFE + 1),
        (0, -1),
        (5, -6),
    ):
        with pytest.raises(InvalidInput) as caught:
            safe_add_ms(instant, duration)
        assert caught.value.path == "deadline"


def test_safe_integers_are_integers_within_bounds() -> None:
    assert safe_integer(MAX_SAFE, "/n", 0) == MAX_SAFE
    for value in (MAX_SAFE + 1, -1, True, 1.0, "1", None):
        with pytest.raises(InvalidInput):
            safe_integer(value, "/n", 0)
