"""Which processes belong to a test: those that name its directory in their arguments or environment."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import is_alive


def belongings(directory: Path) -> dict[int, str]:
    """Process id → arguments of everything alive that names ``directory``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in arguments + environment and is_alive(int(entry.name)):
            found[int(entry.name)] = arguments.replace(b"\0", b" ").decode(errors="replace").strip()
    return found
