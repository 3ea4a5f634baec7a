"""The example handlers answer what the example bundles promise."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from settlement_svc.examples.counter import LARGEST, Counter
from settlement_svc.examples.handling import Ledger
from settlement_svc.examples.transfer import Bank
from shared.domain.contract import parse_bundle
from shared.domain.profile import read_answer
from shared.domain.records import Answer


def assignment(interaction: str, payload: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": "op1",
        "effectKey": "op1.worker",
        "attempt": 1,
        "lease": "1-1-h1",
        "interaction": interaction,
        "input": payload,
        "session": {"id": "s1", "cursor": 1, "state": state, "stateRevision": "0"},
    }


def accepted(bundle: str, interaction: str, answered: dict[str, Any]) -> Answer:
    """The answer as a carrier takes it; InvalidInput where it would not."""
    source = importlib.resources.files("settlement_svc.examples.bundles").joinpath(bundle).read_bytes()
    contract = parse_bundle(source)
    body = json.dumps(answered).encode()
    return read_answer(body, contract.interaction(interaction), contract.session, state_revision="0")


def told(member: object) -> Any:
    """A member of an answer as plain data."""
    assert isinstance(member, msgspec.Raw)
    return json.loads(bytes(member))


@pytest.mark.parametrize(
    ("value", "amount", "total"),
    [(0, 3, 3), (3, -5, -2), (LARGEST - 1, 1, LARGEST), (1 - LARGEST, -1, -LARGEST)],
)
async def test_the_counter_adds(value: int, amount: int, total: int) -> None:
    answered = await Counter(Ledger(None), 0)(assignment("add", {"amount": amount}, {"value": value}))
    answer = accepted("counter.yaml", "add", answered)
    assert [told(m) for m in (answer.result, answer.state, answer.updates[0].data)] == [{"value": total}] * 3


@pytest.mark.parametrize(("value", "amount"), [(LARGEST, 1), (-LARGEST, -1)])
async def test_the_counter_refuses_to_leave_the_safe_range(value: int, amount: int) -> None:
    answered = await Counter(Ledger(None), 0)(assignment("add", {"amount": amount}, {"value": value}))
    answer = accepted("counter.yaml", "add", answered)
    assert answer.refused is not None
    assert (answer.refused.code, answer.state, answer.updates) == ("counter.overflow", msgspec.UNSET, ())


async def test_the_bank_sends_once_per_call_and_writes_it_down(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    bank = Bank(Ledger(path), 0)
    document = assignment("send", {"to": "bob", "cents": 5}, {"sent": 10, "notes": 1})
    first = accepted("transfer.yaml", "send", await bank(document))
    await bank({**document, "attempt": 2})
    assert told(first.state) == {"sent": 15, "notes": 1}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["effectKey"], line["attempt"], line["cents"]) for line in lines] == [
        ("op1.worker", 1, 5),
        ("op1.worker", 2, 5),
    ]


async def test_the_bank_declines_and_sends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    document = assignment("send", {"to": "nowhere", "cents": 5}, {"sent": 0, "notes": 0})
    answer = accepted("transfer.yaml", "send", await Bank(Ledger(path), 0)(document))
    assert told(answer.result) == {"status": "declined"}
    assert not path.exists()


async def test_the_bank_notes() -> None:
    document = assignment("note", {"text": "hello"}, {"sent": 0, "notes": 1})
    answer = accepted("transfer.yaml", "note", await Bank(Ledger(None), 0)(document))
    assert told(answer.state) == {"sent": 0, "notes": 2}
    assert [update.name for update in answer.updates] == ["transfer.noted"]


async def test_the_bank_does_nothing_else() -> None:
    assert "refused" in await Bank(Ledger(None), 0)(assignment("rob", {}, {"sent": 0, "notes": 0}))
