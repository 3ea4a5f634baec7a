"""How the demonstration speaks: one line for what is done, one for what was seen, aligned."""

from __future__ import annotations

import sys
import textwrap
from typing import Final

import click

_WIDTH: Final = 100
_INDENT: Final = 5


class Teller:
    """Numbers the steps and marks each as held or broken."""

    def __init__(self) -> None:
        self._step = 0
        encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
        self._held, self._broken = ("✓", "✗") if encoding.startswith("utf") else ("ok", "BROKEN")

    def title(self, text: str) -> None:
        """A line of its own before the steps."""
        click.echo(text)

    def does(self, text: str) -> None:
        """What is done now."""
        self._step += 1
        click.echo(f"\n{click.style(f'{self._step:>{_INDENT - 2}}', bold=True)}  {text}")

    def saw(self, text: str) -> None:
        """The evidence, and that the promise held."""
        self._line(click.style(self._held, fg="green"), len(self._held), text)

    def broke(self, text: str) -> None:
        """The promise that did not hold."""
        self._line(click.style(self._broken, fg="red"), len(self._broken), text)

    def _line(self, mark: str, mark_width: int, text: str) -> None:
        lines = textwrap.wrap(text, _WIDTH - _INDENT - mark_width - 1, break_long_words=False) or [""]
        click.echo(f"{' ' * _INDENT}{mark} {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{' ' * (_INDENT + mark_width + 1)}{line}")
