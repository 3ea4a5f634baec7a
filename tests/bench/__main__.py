"""``make bench``: everything measured in one go, medians and ratios with the settings they hold for."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path

from shared.store.embedded import EmbeddedStore
from tests.bench import door, fairness, store, worker
from tests.bench.table import show
from tests.bench.world import one_store, running

PARTS = ("store", "door", "worker", "fairness")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything by default"
    )
    parts = parser.parse_args().parts or PARTS
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, embedded store with appendfsync always,"
    )
    print("one door process (uvloop, httptools), token + default policy + schema + exact canonical form.")
    print("Shared machines are noisy: compare ratios, not absolute figures.")
    if "store" in parts:
        with tempfile.TemporaryDirectory(prefix="lg-bench-") as folder, EmbeddedStore(Path(folder)) as server:
            show("The script on the store (requests per second, 50 clients)", store.rows(server))
    if "fairness" in parts:
        with one_store() as (server, processes):
            show("Settling in turn, one process for two tenants", fairness.rows(server, processes))
    if {"door", "worker"} & set(parts):
        with running() as system:
            if "worker" in parts:
                show("The worker's way", worker.rows(system))
            if "door" in parts:
                show("The door (processor time per request, 32 connections)", door.rows(system))


if __name__ == "__main__":
    main()
