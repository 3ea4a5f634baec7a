"""The requirement matrix cannot be fooled: it counts passes only, refuses unknown ids, and adds up
distributed runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import Coverage, Entry, compress, load_catalogue, summary
from tests.support.processes import Processes

NOT_OFFERED = {"KEYX-29", "KEYX-33", "KEYX-34", "KEYX-35", "KEYX-48"}

INNER_CONFIG = """
[pytest]
addopts = --strict-markers --import-mode=importlib -p tests.matrix -p no:cacheprovider
filterwarnings = error
markers =
    requirement(id, ...): requirement ids
    case(number, ...): field cases
"""


class Inner:
    """A pytest run of its own over one file."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes = processes
        self.folder = folder
        (folder / "pytest.ini").write_text(INNER_CONFIG)

    def run(self, *sources: str, distributed: bool = False) -> tuple[int, str, dict[str, Any]]:
        """Exit status, printed text, and the matrix as JSON (empty when none was written)."""
        for number, source in enumerate(sources):
            (self.folder / f"test_inner_{number}.py").write_text("import pytest\n\n" + source)
        target = self.folder / "matrix.json"
        arguments = ["--rootdir", str(self.folder), "-c", str(self.folder / "pytest.ini")]
        if distributed:
            arguments += ["-p", "xdist", "-n", "2"]
        child = self._processes.python(
            "-m", "pytest", *arguments, "--matrix-json", str(target), str(self.folder),
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, may_print_traceback=True,
        )  # fmt: skip
        status = child.wait(60)
        return status, child.output, json.loads(target.read_text()) if target.exists() else {}


@pytest.fixture
def inner(processes: Processes, tmp_path: Path) -> Inner:
    folder = tmp_path / "inner"
    folder.mkdir()
    return Inner(processes, folder)


def test_the_catalogues_are_complete() -> None:
    requirements = load_catalogue("requirement")
    assert len(requirements) == 472
    assert {entry.id for entry in requirements.values() if entry.status == "not-offered"} == NOT_OFFERED
    shape = re.compile(r"RT-[A-Z]+-\d\d|KEYX?-\d\d|DASP-CORE-\d{3}[a-h]|DASPX-\d\d")
    assert all(shape.fullmatch(name) for name in requirements)
    cases = load_catalogue("case")
    assert len(cases) == 74
    assert {entry.id for entry in cases.values() if entry.status == "later"} == {"37", "100", "108"}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["A-1\toffered"], "requirements.tsv:2: three cells"),
        (["A-1\toffered\t"], "requirements.tsv:2: three cells"),
        (["A-1\tperhaps\ttext"], "requirements.tsv:2: unknown status 'perhaps'"),
        (["A-1\toffered\ttext", "A-1\toffered\ttext"], "requirements.tsv:3: A-1 is listed twice"),
    ],
)
def test_a_malformed_catalogue_names_its_line(lines: list[str], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.tsv").write_text("\n".join(["id\tstatus\ttext", *lines]))
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load_catalogue("requirement", tmp_path)


@pytest.mark.parametrize(
    ("chosen", "ranges"),
    [
        ("", []),
        ("A-01", ["01"]),
        ("A-01 A-02 A-03", ["01..03"]),
        ("A-01 A-03 A-04b", ["01", "03..04b"]),
        ("A-01 A-02 A-03 A-04b A-05", ["01..05"]),
    ],
)
def test_neighbours_are_shown_as_ranges(chosen: str, ranges: list[str]) -> None:
    names = ["A-01", "A-02", "A-03", "A-04b", "A-05"]
    assert compress(names, set(chosen.split()), "A") == ranges


def test_a_whole_run_lists_every_group_with_what_is_missing() -> None:
    entries = [
        Entry("A-01", "offered", "one"),
        Entry("A-02", "offered", "two"),
        Entry("A-03", "not-offered", "three"),
        Entry("B-01", "later", "four"),
        Entry("B-02", "offered", "five"),
    ]
    coverage = Coverage({entry.id: entry for entry in entries})
    coverage.record(["A-01", "B-02"], "test_one", "call", "passed")
    coverage.record(["B-02"], "test_two", "call", "failed")
    lines = [re.sub(" +", " ", line) for line in summary("requirement", coverage, whole=True)]
    assert lines == [
        "A 1/2 missing 02; not-offered 03",
        "B 0/1 failing 02; later 01",
        "requirements: 1 of 3 covered",
    ]
    touched = [re.sub(" +", " ", line) for line in summary("requirement", coverage, whole=False)]
    assert touched == ["A 1/2", "B 0/1 failing 02", "requirements: 1 of 3 covered"]


WRONG = {
    '@pytest.mark.requirement("RT-GUARD-99")': "unknown requirement 'RT-GUARD-99'",
    '@pytest.mark.requirement("RT-GUARD-01", "rt-guard-02")': "unknown requirement 'rt-guard-02'",
    '@pytest.mark.requirement("KEYX-29")': "requirement 'KEYX-29' is not offered",
    "@pytest.mark.case(5)": "unknown case '5'",
}
WRONG_ON_CLASS = "@pytest.mark.case(13)\nclass TestAll:\n    def test_one(self):\n        pass\n"
WRONG_ON_MODULE = "pytestmark = pytest.mark.case(18)\n\ndef test_one():\n    pass\n"


@pytest.mark.parametrize("distributed", [False, True])
def test_a_wrong_id_fails_the_collection(distributed: bool, inner: Inner) -> None:
    sources = [f"{mark}\ndef test_one():\n    pass\n" for mark in WRONG]
    status, output, _ = inner.run(*sources, WRONG_ON_CLASS, WRONG_ON_MODULE, distributed=distributed)
    assert status in (1, 2)
    for complaint in [*WRONG.values(), "unknown case '13'", "unknown case '18'"]:
        assert complaint in output
    assert "6 errors" in output
    assert "passed" not in output


MIXED = """
@pytest.mark.requirement("RT-GUARD-01", "RT-GUARD-02")
@pytest.mark.case(27)
def test_passes():
    pass

@pytest.mark.requirement("RT-GUARD-02", "RT-GUARD-03")
def test_fails():
    assert False

@pytest.fixture
def breaking_after():
    yield
    raise RuntimeError("teardown")

@pytest.mark.requirement("RT-GUARD-04")
def test_passes_but_its_teardown_fails(breaking_after):
    pass

@pytest.fixture
def breaking_before():
    raise RuntimeError("setup")

@pytest.mark.requirement("RT-GUARD-05")
def test_never_starts(breaking_before):
    pass

@pytest.mark.requirement("RT-GUARD-06")
def test_is_skipped():
    pytest.skip("elsewhere")

@pytest.mark.requirement("RT-GUARD-07")
class TestClass:
    @pytest.mark.parametrize("n", [1, 2])
    def test_inside(self, n):
        pass

@pytest.mark.requirement("RT-WF-01")
def test_of_something_planned():
    pass
"""


@pytest.mark.parametrize("distributed", [False, True])
def test_only_a_pass_covers_and_a_failure_uncovers(distributed: bool, inner: Inner) -> None:
    status, output, document = inner.run(MIXED, distributed=distributed)
    assert status == 1
    states = {name: row["state"] for name, row in document["requirements"].items()}
    assert [states[f"RT-GUARD-0{n}"] for n in range(1, 9)] == [
        "covered", "failing", "failing", "failing", "failing", "missing", "covered", "missing",
    ]  # fmt: skip
    assert states["RT-WF-01"] == "covered"
    assert (states["RT-WF-02"], states["KEYX-29"]) == ("later", "not-offered")
    assert document["cases"]["27"]["state"] == "covered"
    assert document["requirements"]["RT-GUARD-07"]["tests"] == [
        "test_inner_0.py::TestClass::test_inside[1]",
        "test_inner_0.py::TestClass::test_inside[2]",
    ]
    assert re.search(r"^RT-GUARD +2/18 +failing 02\.\.05$", output, re.MULTILINE)
    assert output.index("requirement matrix") < output.rindex("passed")
