"""A counter per session: the handler of ``bundles/counter.yaml``.

It keeps nothing itself: the value comes with the assignment as the session's state and goes back as its new
state, so an answer that was lost is simply computed again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import click

from settlement_svc.examples.handling import Answer, Document, Ledger, options, refused, serve

LARGEST: Final = 2**53 - 1


class Counter:
    """Adds. ``delay_ms`` lets a demonstration see it at work, ``ledger`` lets a test count its calls."""

    def __init__(self, ledger: Ledger, delay_ms: int) -> None:
        self._ledger = ledger
        self._delay_s = delay_ms / 1000

    async def __call__(self, document: Document) -> Answer:
        amount = document["input"]["amount"]
        value = document["session"]["state"]["value"] + amount
        self._ledger.record(document, amount=amount)
        await asyncio.sleep(self._delay_s)
        if abs(value) > LARGEST:
            return refused("counter.overflow", f"the value would leave the range of -{LARGEST} to {LARGEST}")
        return {
            "result": {"value": value},
            "updates": [{"name": "counter.changed", "data": {"value": value}}],
            "state": {"value": value},
        }


@click.command()
@options
def main(port: int, delay_ms: int, ledger: Path | None) -> None:
    """Run the handler of the counter example."""
    serve(Counter(Ledger(ledger), delay_ms), port)


if __name__ == "__main__":
    main(prog_name="python -m settlement_svc.examples.counter")
