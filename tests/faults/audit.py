"""The judge: holds what clients were promised and what workers did against what the store says happened.

Everything is checked and every violation told, so that one run says all it found.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from shared.domain.limits import TenantUsage
from shared.store.keys import TENANTS
from tests.faults.client import Client, Command, Outcome
from tests.faults.contracts import PEER
from tests.faults.ledger import Entry, granted_twice
from tests.faults.system import TENANT, System
from tests.support.polling import wait_until

Update = dict[str, Any]
_SIDE_BY_SIDE: Final = 16


class Audit:
    """One look at a system whose commands are all answered; ``outcomes`` are the settled ones by command."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._journal = system.journal
        self._told = system.journal.acknowledgements()
        self.faults: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.ledger: list[Entry] = []

    @classmethod
    async def of(cls, system: System, client: Client, within_s: float = 45.0) -> Audit:
        """Wait until every acknowledged command is settled and the store at rest, then check everything.

        Raises AssertionError with all violations.
        """
        audit = cls(system)
        await audit._wait_for_outcomes(client, within_s)
        await wait_until(audit._at_rest, within_s, every=0.05)
        audit.ledger = system.ledger.read()
        for session in sorted({command.session for command in audit._journal.commands.values()}):
            await audit._session(client, session)
        audit._effects()
        audit._store()
        assert not audit.faults, "\n".join(audit.faults)
        return audit

    def statuses(self) -> Counter[str]:
        """How many commands ended how."""
        return Counter(outcome.status for outcome in self.outcomes.values())

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    async def _wait_for_outcomes(self, client: Client, within_s: float) -> None:
        admitted = [self._journal.commands[name] for name in self._told]
        waiting = iter(admitted)

        async def wait() -> None:
            for command in waiting:
                self.outcomes[command.id] = await client.settled(command, within_s)

        await asyncio.gather(*(wait() for _ in range(_SIDE_BY_SIDE)))

    def _at_rest(self) -> bool:
        keys = self._system.keys
        due: Any = self._system.raw.zcard(keys.due)
        offers: Any = self._system.raw.xlen(keys.outbox(PEER))
        return bool(due == 0 and offers == 0)

    # Facts

    async def _session(self, client: Client, session: str) -> None:
        updates = await client.updates(session)
        view = await client.view(session)
        numbers = [update["sequence"] for update in updates]
        if numbers != list(range(1, len(numbers) + 1)) or view["cursor"] != len(numbers):
            self._fault(f"{session}: sequences are not contiguous to the head: {numbers}, {view['cursor']}")
        by_command: dict[str, list[Update]] = {}
        for update in updates:
            by_command.setdefault(update["command_id"], []).append(update)
        commands = {c.id: c for c in self._journal.commands.values() if c.session == session}
        for name in by_command.keys() - commands.keys():
            self._fault(f"{session}: holds {name}, which nobody submitted there")
        for name, command in commands.items():
            if name in self.outcomes or name in by_command:
                self._command(command, by_command.get(name, []))
        if "value" in view["state"]:
            self._state(session, updates, view["state"])

    def _command(self, command: Command, updates: list[Update]) -> None:
        kinds = [update["kind"] for update in updates]
        counts = Counter(kinds)
        if counts["command.accepted"] != 1 or counts["command.outcome"] != 1:
            self._fault(f"{command.id}: its facts are {kinds}")
            return
        if kinds[0] != "command.accepted" or kinds[-1] != "command.outcome":
            self._fault(f"{command.id}: its facts come in the order {kinds}")
        told = self._told.get(command.id, set())
        if told - {updates[0]["sequence"]}:
            self._fault(f"{command.id}: admitted as {updates[0]['sequence']}, clients were told {told}")
        outcome = self.outcomes.get(command.id)
        if outcome is None:
            self._fault(f"{command.id}: admitted, though no reply of the run said so, and never read")
            return
        if (updates[-1]["sequence"], updates[-1]["payload"]) != (outcome.sequence, outcome.outcome):
            self._fault(f"{command.id}: outcome read {outcome}, terminal update {updates[-1]}")
        record = self._system.record(command.id)
        if record.get("phase") != "settled" or record.get("outcome_seq") != str(outcome.sequence):
            self._fault(f"{command.id}: the record says {record}, the terminal update {outcome.sequence}")
        if "r:0" in record or record.get("b:0", "pending").startswith("pending"):
            self._fault(f"{command.id}: settled with an open branch or an answer left: {record}")

    def _state(self, session: str, updates: list[Update], state: dict[str, int]) -> None:
        """The view state is the sum of what completed, and every update told the sum of its moment."""
        value = 0
        for update in updates:
            command = self._journal.commands.get(update["command_id"])
            if command is None:
                continue
            if update["kind"] == "application":
                value += command.amount
                if update["payload"]["data"] != {"id": command.id, "value": value}:
                    self._fault(f"{session}: update {update['sequence']} does not follow {value}: {update}")
        completed = sum(
            command.amount
            for command in self._journal.commands.values()
            if command.session == session and self._status(command) == "completed"
        )
        if not state["value"] == value == completed:
            self._fault(
                f"{session}: state {state}, sum of updates {value}, of completed commands {completed}"
            )

    def _status(self, command: Command) -> str:
        outcome = self.outcomes.get(command.id)
        return "" if outcome is None else outcome.status

    # Effects

    def _effects(self) -> None:
        for line in granted_twice(self.ledger):
            self._fault(f"one lease was used for two calls: {line}")
        by_command: dict[str, list[Entry]] = {}
        for entry in self.ledger:
            by_command.setdefault(entry.command, []).append(entry)
        for name in by_command.keys() - self.outcomes.keys():
            self._fault(f"{name} was dispatched and is not recorded")
        for name in self.outcomes:
            self._effects_of(self._journal.commands[name], by_command.get(name, []))

    def _effects_of(self, command: Command, entries: list[Entry]) -> None:
        effects = sum(entry.kind == "effect" for entry in entries)
        status = self._status(command)
        told = f"{command.kind} {command.id}: {effects} effects, outcome {status}"
        if len({(entry.effect_key, entry.operation_id) for entry in entries}) > 1:
            self._fault(f"{told}: its attempts had different effect keys")
        if status == "completed" and (effects == 0 or command.refuse):
            self._fault(told)
        if command.kind != "safe" and effects > 1:
            self._fault(told)
        if command.kind == "pay" and status == "failed" and effects:
            self._fault(told)
        if command.kind == "safe" and status == "uncertain":
            self._fault(told)
        if status not in ("completed", "failed", "uncertain"):
            self._fault(told)

    # The store at rest

    def _store(self) -> None:
        keys, raw = self._system.keys, self._system.raw
        authority: Any = raw.hget(TENANTS, TENANT)
        meta: Any = raw.hmget(keys.meta, "authority", "usage")
        parked: Any = raw.hgetall(keys.parked)
        if meta[0] != authority or meta[0] != self._system.authority.encode():
            self._fault(f"the authority changed: {authority!r}, {meta[0]!r}")
        usage = TenantUsage.parse(meta[1].decode())
        if usage.operations != len(self.outcomes):
            self._fault(
                f"{usage.operations} operations are counted, {len(self.outcomes)} commands are settled"
            )
        if usage.open_operations:
            self._fault(f"{usage.open_operations} operations are counted as open")
        if parked:
            self._fault(f"parked: {parked}")
        if self._system.unacknowledged():
            self._fault(f"{self._system.unacknowledged()} offers are still pending in the outbox")
        for session in sorted({command.session for command in self._journal.commands.values()}):
            record = self._system.session(session)
            if (record["busy"], record["pending"], record["halted"]) != ("", "0", ""):
                self._fault(f"{session}: not at rest: {record}")
