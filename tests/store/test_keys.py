"""Keys: exact spelling, one slot per tenant, and no two things under one key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from shared.domain.errors import InvalidInput
from shared.domain.ids import operation_id
from shared.store.keys import SETTLERS, TENANTS, Keys, cursor_field, turn_member

KINDS_WITH_ID = (
    "op",
    "session",
    "updates",
    "queue",
    "cursors",
    "outbox",
    "effects",
    "attempts",
    "reservations",
)
KINDS = ("meta", "due", "contracts", "peers", "policy", "tokens", "ledger", "parked", "wake")

# Wider than any id pattern on purpose: what the patterns keep out must not matter here.
any_ascii = st.text(st.characters(max_codepoint=127), min_size=1, max_size=12)
tenants = st.sampled_from(["a", "a-b", "ab", "b", "0", "meta", "op"]) | st.text(
    "az09", min_size=1, max_size=9
)
tokens = st.text("aZ9._:-", min_size=1, max_size=9)


def spell(tenant: str, kind: str, name: str) -> bytes:
    key: bytes = getattr(Keys(tenant), kind)(name)
    return key


def test_keys_are_spelled_exactly_so() -> None:
    keys = Keys("acme")
    assert {kind: getattr(keys, kind) for kind in KINDS} == {
        "meta": b"lg:{acme}:meta",
        "due": b"lg:{acme}:due",
        "contracts": b"lg:{acme}:contracts",
        "peers": b"lg:{acme}:peers",
        "policy": b"lg:{acme}:policy",
        "tokens": b"lg:{acme}:tokens",
        "ledger": b"lg:{acme}:ledger",
        "parked": b"lg:{acme}:parked",
        "wake": b"lg:{acme}:wake",
    }
    assert {kind: spell("acme", kind, "x:1") for kind in KINDS_WITH_ID} == {
        "op": b"lg:{acme}:op:x:1",
        "session": b"lg:{acme}:session:x:1",
        "updates": b"lg:{acme}:updates:x:1",
        "queue": b"lg:{acme}:queue:x:1",
        "cursors": b"lg:{acme}:cursors:x:1",
        "outbox": b"lg:{acme}:outbox:x:1",
        "effects": b"lg:{acme}:effects:x:1",
        "attempts": b"lg:{acme}:attempts:x:1",
        "reservations": b"lg:{acme}:reservations:x:1",
    }
    assert TENANTS == b"lg:tenants"
    assert SETTLERS == b"lg:settlers"


@given(tenants, any_ascii)
def test_all_keys_of_a_tenant_lie_in_one_slot(tenant: str, name: str) -> None:
    keys = Keys(tenant)
    spelled = [spell(tenant, kind, name) for kind in KINDS_WITH_ID] + [getattr(keys, kind) for kind in KINDS]
    assert {key_slot(key) for key in spelled} == {key_slot(tenant.encode())}


def test_tenants_are_spread_over_slots() -> None:
    assert len({key_slot(Keys(f"tenant-{n}").meta) for n in range(100)}) > 90


Thing = tuple[str, str, str]
things = st.tuples(tenants, st.sampled_from(KINDS_WITH_ID), any_ascii) | st.tuples(
    tenants, st.sampled_from(KINDS), st.just("")
)


def key_of(thing: Thing) -> bytes:
    tenant, kind, name = thing
    if kind in KINDS_WITH_ID:
        return spell(tenant, kind, name)
    key: bytes = getattr(Keys(tenant), kind)
    return key


@given(st.lists(things, min_size=2, max_size=8, unique=True))
def test_different_things_have_different_keys(different: list[Thing]) -> None:
    keys = [key_of(thing) for thing in different]
    assert len(set(keys)) == len(keys)
    assert not {TENANTS, SETTLERS} & set(keys)


@pytest.mark.parametrize(
    "tenant",
    [
        "",
        "}",
        "{",
        "{}",
        "a}b",
        "a{b}",
        "t*",
        "t?",
        "[a]",
        "A",
        "ä",
        "a b",
        "a:b",
        "a--b",
        "-a",
        "a-",
        "a\n",
        "a" * 64,
    ],
)
def test_a_tenant_id_that_could_leave_its_tag_is_refused(tenant: str) -> None:
    with pytest.raises(InvalidInput, match="tenant"):
        Keys(tenant)


def test_an_id_outside_ascii_spells_no_key() -> None:
    with pytest.raises(UnicodeEncodeError):
        Keys("acme").session("sé")


@given(st.lists(st.tuples(tokens, tokens), min_size=2, max_size=8, unique=True))
def test_different_clients_have_different_cursor_fields(clients: list[tuple[str, str]]) -> None:
    fields = [cursor_field(principal, client) for principal, client in clients]
    assert len(set(fields)) == len(fields)


def test_cursor_fields_do_not_mix_where_a_colon_would() -> None:
    assert cursor_field("a:b", "c") != cursor_field("a", "b:c")


@given(tokens, tokens)
def test_a_turn_is_never_taken_for_an_operation(session: str, key: str) -> None:
    assert turn_member(session) != operation_id("alice", "sha256:" + "0" * 64, key)
