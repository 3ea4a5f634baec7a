"""Golden copies of the expanded scripts, so that a change of an include shows in every script it reaches.

Renew them with ``python -m tests.scripts.golden`` and read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
