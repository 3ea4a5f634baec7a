"""Policies that tests apply as an operator does, and what became of the work they are about."""

from __future__ import annotations

import json
from typing import Any

from shared.domain.policy_document import compile_policy
from shared.domain.records import Operation
from shared.store.policies import apply_policy
from tests.settlement.host import TENANT, Host
from tests.support.polling import wait_until

ALLOWED: dict[str, Any] = {
    "principals": ["*"],
    "actions": ["session.open", "session.read", "session.close", "command.submit"],
    "effect": "allow",
}


def denied(*actions: str, **lists: list[str]) -> dict[str, Any]:
    """A rule that takes something from everybody: to submit commands, if nothing else is named."""
    return {"principals": ["*"], "actions": list(actions or ("command.submit",)), "effect": "deny", **lists}


async def apply(host: Host, *rules: dict[str, Any]) -> str:
    """Apply a policy of these rules and then, for everything else, all; gives its revision. The processes
    under test are not told of it by anything but the store.
    """
    document = compile_policy({"rules": [*rules, ALLOWED]})
    return (await apply_policy(host.admin, TENANT, document, "operator")).revision


async def learn(host: Host) -> None:
    """Let the processes know the present policy, as anything refused for its sake would."""
    for handle in (host.handle, host.door):
        await handle.snapshots.reload(await handle.snapshots.get())


async def stored(host: Host, operation_id: str) -> Operation:
    """The operation as it is recorded, whatever policy the process knows."""
    op = await host.handle.reads.operation(operation_id)
    assert op is not None
    return op


async def settled(host: Host, operation_id: str) -> bool:
    """Whether it has ended."""
    return (await stored(host, operation_id)).phase == "settled"


async def ending(host: Host, operation_id: str, within: float = 15.0) -> tuple[str, str, str]:
    """Wait until an operation has ended: status of its branch, of its outcome, and the outcome's code."""
    await wait_until(lambda: settled(host, operation_id), within)
    op = await stored(host, operation_id)
    assert op.outcome_sequence is not None
    fact = await host.handle.reads.fact(op.admission.session_id, op.outcome_sequence)
    assert fact is not None
    assert fact.command_id == op.admission.command_id
    outcome = json.loads(fact.payload)
    return op.branches[0].status, outcome["status"], outcome["error"]["code"] if outcome["error"] else ""
