"""Transfers out of one account: the handler of ``bundles/transfer.yaml``.

Sending money cannot be taken back and this bank forgets what it was asked before, so ``send`` is declared
``unsafe``: where its answer is lost nobody repeats it, and the command ends as uncertain. Leaving a note
can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Final

import click

from settlement_svc.examples.handling import Answer, Document, Ledger, options, refused, serve

NOWHERE: Final = "nowhere"
"""An account that takes nothing: a transfer there is declined."""


class Bank:
    """Sends and notes. The effect of ``send`` is its line in the ledger; ``delay_ms`` lies between it and
    the answer.
    """

    def __init__(self, ledger: Ledger, delay_ms: int) -> None:
        self._ledger = ledger
        self._delay_s = delay_ms / 1000

    async def __call__(self, document: Document) -> Answer:
        if document["interaction"] == "send":
            return await self._send(document)
        if document["interaction"] == "note":
            return self._note(document)
        return refused("transfer.unknown", "this bank sends and notes, nothing else")

    async def _send(self, document: Document) -> Answer:
        to, cents = document["input"]["to"], document["input"]["cents"]
        if to == NOWHERE:
            return {"result": {"status": "declined"}}
        self._ledger.record(document, to=to, cents=cents)
        await asyncio.sleep(self._delay_s)
        reference = hashlib.sha256(document["effectKey"].encode()).hexdigest()[:16]
        state = document["session"]["state"]
        return {
            "result": {"status": "sent", "reference": reference},
            "updates": [
                {"name": "transfer.sent", "data": {"to": to, "cents": cents, "reference": reference}}
            ],
            "state": {**state, "sent": state["sent"] + cents},
        }

    def _note(self, document: Document) -> Answer:
        text, state = document["input"]["text"], document["session"]["state"]
        return {
            "result": {"notes": state["notes"] + 1},
            "updates": [{"name": "transfer.noted", "data": {"text": text}}],
            "state": {**state, "notes": state["notes"] + 1},
        }


@click.command()
@options
def main(port: int, delay_ms: int, ledger: Path | None) -> None:
    """Run the handler of the transfer example."""
    serve(Bank(Ledger(ledger), delay_ms), port)


if __name__ == "__main__":
    main(prog_name="python -m settlement_svc.examples.transfer")
