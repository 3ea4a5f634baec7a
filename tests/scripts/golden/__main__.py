"""Write the golden copies anew from the scripts as they are."""

from __future__ import annotations

import lua
from tests.scripts.golden import FOLDER

if __name__ == "__main__":
    for old in FOLDER.glob("*.lua"):
        old.unlink()
    for name in lua.NAMES:
        (FOLDER / f"{name}.lua").write_text(lua.expand(name))
