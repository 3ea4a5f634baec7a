"""The sidecar in this process against a scripted handler."""

from __future__ import annotations

import json

from tests.settlement.host import Host, contract
from tests.settlement.scripted import ScriptedHandler


async def test_a_command_is_worked_and_settled(redis_url: str) -> None:
    async with Host.create(redis_url, contract()) as host, ScriptedHandler() as handler:
        await host.open()
        async with host.sidecar(handler.url):
            await host.submit("c1")
            assert (await host.outcome("c1"))["status"] == "completed"
        facts = await host.facts()
        assert [fact.kind for fact in facts] == ["accepted", "application", "outcome"]
        assert json.loads((await host.session()).state) == {"n": 1}
