"""python -m tests.mutants: every check and every write of every script left out in turn must fail a test.

Prints the survivors as script:line and exits 1 when there are any. --short judges a sample, without first
proving that the scripts as they are pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.mutants.run import run, uncompiled
from tests.mutants.source import PARTS, Mutant, mutants

SHORT_EVERY = 60


def sample(every: list[Mutant]) -> list[Mutant]:
    """A spread over all scripts, the same for the same scripts."""
    return every[SHORT_EVERY // 2 :: SHORT_EVERY]


def main(arguments: list[str] | None = None) -> int:
    """Judge every mutant, print the survivors and what no server would run; 0 when there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--short", action="store_true", help="a sample only")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    options = parser.parse_args(arguments)
    chosen = [m for part in PARTS for m in mutants(part) if options.only in m.name]
    if options.short:
        chosen = sample(chosen)
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    return judge(chosen, options.jobs, verbose=options.verbose, unchanged_too=not options.short)


def judge(chosen: list[Mutant], jobs: int, *, verbose: bool, unchanged_too: bool) -> int:
    started = time.monotonic()
    broken = uncompiled(chosen)
    for mutant in broken:
        print(f"not a script: {mutant.name} -> {mutant.instead!r}")
    survivors = []
    sound = [mutant for mutant in chosen if mutant not in broken]
    first = [None] if unchanged_too else []
    for n, verdict in enumerate(run([*first, *sound], jobs)):
        if verdict.mutant.kind == "unchanged":
            if verdict.killed:
                print(f"the scripts as they are fail {verdict.by}")
                return 1
        elif not verdict.killed:
            survivors.append(verdict.mutant)
            print(f"survived: {verdict.mutant.name} -> {verdict.mutant.instead!r}", flush=True)
        if verbose:
            print(f"{verdict.seconds:5.1f} s  {verdict.mutant.name}  {verdict.by}", flush=True)
        elif n % 25 == 0:
            print(f"{n} of {len(sound)} after {time.monotonic() - started:.0f} s", flush=True)
    print(f"mutants: {len(sound)} judged, {len(survivors)} survived, {time.monotonic() - started:.0f} s")
    return 1 if survivors or broken else 0


if __name__ == "__main__":
    sys.exit(main())
