"""The shipped bundles are what the guides say they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.domain.contract import Contract, Execution, OnUncertain, Profile, parse_bundle
from shared.domain.errors import InvalidInput
from shared.domain.interaction import Effects, Verdict
from shared.domain.profile import check_command, read_answer
from tests.domain.helpers import BUNDLES, document


def shipped(name: str) -> tuple[Contract, Profile]:
    contract = parse_bundle((BUNDLES / f"{name}.yaml").read_bytes())
    assert contract.session is not None
    return contract, contract.session


def admitted(contract: Contract, name: str, payload: str) -> bytes:
    doc = document(f'{{"input":{payload}}}')
    assert isinstance(doc.value, dict)
    return check_command(contract, name, doc, doc.value["input"])[1]


def answer(contract: Contract, command: str, body: Any) -> Verdict:
    interaction = contract.command(command)
    read = read_answer(json.dumps(body).encode(), interaction, contract.session)
    return interaction.verdict(json.loads(bytes(read.result or b"null")))


@pytest.mark.parametrize("path", sorted(BUNDLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_bundle_is_a_profile_and_reads_back(path: Any) -> None:
    contract = parse_bundle(path.read_bytes())
    assert contract.session is not None
    assert parse_bundle(contract.document).digest == contract.digest


def test_the_counter_is_the_running_example() -> None:
    contract, profile = shipped("counter")
    assert (profile.id, profile.version) == ("urn:example:dasp:counter", "1")
    assert (profile.execution, profile.on_uncertain) == (Execution.SERIAL, OnUncertain.CONTINUE)
    assert profile.initial == b'{"value":0}'
    assert set(profile.commands) == {"counter.add"}
    assert set(profile.updates) == {"counter.changed"}
    add = contract.command("counter.add")
    assert (add.audience.peers, add.effects) == (("counter",), Effects.NONE)
    assert (add.lease.lease_ms, add.lease.renew_ms) == (2_000, 500)
    assert admitted(contract, "counter.add", '{"amount":-1000000}') == b'{"amount":-1000000}'
    for payload in (
        '{"amount":1000001}',
        '{"amount":-1000001}',
        '{"amount":"3"}',
        "{}",
        '{"amount":3,"x":1}',
    ):
        with pytest.raises(InvalidInput):
            admitted(contract, "counter.add", payload)
    done = {
        "result": {"value": 3},
        "updates": [{"name": "counter.changed", "data": {"value": 3}}],
        "state": {"value": 3},
    }
    assert answer(contract, "counter.add", done) is Verdict.SUCCESS


def test_the_transfers_have_one_unsafe_command_and_one_that_may_be_repeated() -> None:
    contract, profile = shipped("transfer")
    assert profile.id == "urn:example:dasp:ledger"
    assert profile.execution is Execution.SERIAL
    assert profile.on_uncertain is OnUncertain.CONTINUE
    send, note = contract.command("transfer.send"), contract.command("transfer.note")
    assert (send.effects, note.effects) == (Effects.UNSAFE, Effects.NONE)
    assert send.audience.peers == note.audience.peers == ("bank",)
    assert admitted(contract, "transfer.send", '{"to":"bob","cents":500}')
    assert admitted(contract, "transfer.note", '{"text":"rent"}')
    for status, verdict in (
        ("sent", Verdict.SUCCESS),
        ("declined", Verdict.FAILURE),
        ("busy", Verdict.RETRYABLE),
    ):
        assert answer(contract, "transfer.send", {"result": {"status": status}}) is verdict
    assert (
        answer(contract, "transfer.note", {"result": {"notes": 1}, "state": {"sent": 0, "notes": 1}})
        is Verdict.SUCCESS
    )
