"""SECURITY.md names a test file for each promise: each is there, and has tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
TEXT: Final = (ROOT / "SECURITY.md").read_text()
CITED: Final = sorted(set(re.findall(r"`(tests/[^`]+)`", TEXT)))


@pytest.mark.parametrize("path", CITED)
def test_a_cited_file_has_tests(path: str) -> None:
    assert re.search(r"^(async )?def test_", (ROOT / path).read_text(), re.MULTILINE)


def test_every_promise_names_its_tests() -> None:
    promised = TEXT.partition("## What is promised")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", promised, re.MULTILINE)
    rows = [row for row in rows if row not in (("promise", "tests"), ("---", "---"))]
    assert len(rows) > 20
    assert [promise for promise, tests in rows if "`tests/" not in tests] == []
