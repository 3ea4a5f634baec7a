"""A few seconds of random faults; ``make chaos`` runs the same for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shared.store.embedded import EmbeddedStore
from tests.faults.chaos import storm
from tests.support.processes import Processes

SECONDS = 6.0


@pytest.mark.requirement("DASP-CORE-006a", "DASP-CORE-006c", "DASP-CORE-009a", "DASPX-08")
@pytest.mark.case(54)
async def test_random_faults_break_no_promise(
    own_store: EmbeddedStore, processes: Processes, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    print(await storm(own_store, processes, tmp_path, SECONDS, seed))
