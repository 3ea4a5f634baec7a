"""Rows of the printed table: what was measured, the figures, the aim where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """One line; ``met`` is None where there is no aim."""

    what: str
    figures: str
    ratio: str = ""
    aim: str = ""
    met: bool | None = None


def spread(values: Sequence[float], unit: str, digits: int = 0) -> str:
    """Median with the lowest and highest of the runs."""
    return f"{median(values):,.{digits}f} {unit} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a table for people."""
    print(f"\n{title}")
    width = max(len(row.what) for row in rows)
    for row in rows:
        verdict = {None: "", True: "met", False: "missed"}[row.met]
        tail = "  ".join(part for part in (row.ratio, f"aim {row.aim}" if row.aim else "", verdict) if part)
        print(f"  {row.what:<{width}}  {row.figures}" + (f"  |  {tail}" if tail else ""))
