"""The requirement matrix: which requirement ids and field cases this run proved.

A test names what it would fail without: ``@pytest.mark.requirement("RT-GUARD-05")``,
``@pytest.mark.case(27)``. An id that the catalogue does not know, or that we do not offer, fails the
collection of its file. An id is covered when at least one test that names it passed, setup and teardown
included, and none failed. Results travel in the reports, so the controller of a distributed run sees them
all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import pytest

Kind = Literal["requirement", "case"]
Status = Literal["offered", "not-offered", "later"]
State = Literal["covered", "failing", "missing", "later", "not-offered"]

HERE: Final = Path(__file__).parent
FILES: Final[Mapping[Kind, str]] = {"requirement": "requirements.tsv", "case": "cases.tsv"}


class Entry(msgspec.Struct, frozen=True):
    """One line of a catalogue.

    ``later`` means planned but not promised yet; a passing test still covers it.
    """

    id: str
    status: Status
    text: str

    @property
    def group(self) -> str:
        return self.id.rpartition("-")[0] or "cases"


def load_catalogue(kind: Kind, folder: Path = HERE) -> dict[str, Entry]:
    """The entries of a catalogue by id, in its order. Raises ValueError for a malformed or repeated line."""
    entries: dict[str, Entry] = {}
    lines = (folder / FILES[kind]).read_text().splitlines()
    for number, line in enumerate(lines[1:], start=2):
        where = f"{FILES[kind]}:{number}"
        cells = line.split("\t")
        if len(cells) != 3 or not all(cells):
            raise ValueError(f"{where}: three cells needed: id, status, text")
        name, status, text = cells
        if status not in get_args(Status):
            raise ValueError(f"{where}: unknown status {status!r}")
        if name in entries:
            raise ValueError(f"{where}: {name} is listed twice")
        entries[name] = msgspec.convert({"id": name, "status": status, "text": text}, Entry)
    return entries


def named_ids(item: pytest.Item, kind: Kind) -> list[str]:
    """The ids that an item's marks name, in order."""
    return [str(name) for mark in item.iter_markers(kind) for name in mark.args]


class Coverage:
    """What the tests of one catalogue said so far."""

    def __init__(self, catalogue: Mapping[str, Entry]) -> None:
        self.catalogue = catalogue
        self.passed: dict[str, set[str]] = defaultdict(set)
        self.failed: dict[str, set[str]] = defaultdict(set)

    def record(self, names: Iterable[str], test: str, phase: str, outcome: str) -> None:
        """Take one phase of one test. A call that passed counts until its teardown fails."""
        for name in names:
            if outcome == "failed":
                self.failed[name].add(test)
            elif phase == "call" and outcome == "passed":
                self.passed[name].add(test)

    def state(self, entry: Entry) -> State:
        if self.failed[entry.id]:
            return "failing"
        if self.passed[entry.id]:
            return "covered"
        return "missing" if entry.status == "offered" else entry.status

    def groups(self) -> dict[str, list[Entry]]:
        grouped: dict[str, list[Entry]] = defaultdict(list)
        for entry in self.catalogue.values():
            grouped[entry.group].append(entry)
        return grouped

    def rows(self) -> Iterator[tuple[str, int, int, dict[State, list[str]]]]:
        """Per group: name, covered, wanted, and the compressed ids of every other state."""
        for group, entries in self.groups().items():
            states = {entry.id: self.state(entry) for entry in entries}
            names = [entry.id for entry in entries]
            covered = sum(state == "covered" for state in states.values())
            wanted = sum(state in ("covered", "failing", "missing") for state in states.values())
            others: tuple[State, ...] = ("failing", "missing", "later", "not-offered")
            yield (
                group,
                covered,
                wanted,
                {
                    other: compress(names, {name for name, state in states.items() if state == other}, group)
                    for other in others
                },
            )

    def as_json(self) -> dict[str, Any]:
        return {
            entry.id: {
                "group": entry.group,
                "status": entry.status,
                "state": self.state(entry),
                "text": entry.text,
                "tests": sorted(self.passed[entry.id]),
                "failing": sorted(self.failed[entry.id]),
            }
            for entry in self.catalogue.values()
        }


def compress(names: list[str], chosen: set[str], group: str) -> list[str]:
    """Neighbours among ``names`` as ranges, without the group's prefix: 01, 03..07."""
    ranges: list[list[str]] = []
    previous = False
    for name in names:
        if name in chosen:
            short = name.removeprefix(f"{group}-")
            if previous:
                ranges[-1][1:] = [short]
            else:
                ranges.append([short])
        previous = name in chosen
    return ["..".join(ends) for ends in ranges]


class Matrix:
    """The plugin: checks marks while collecting, gathers reports, prints and writes at the end."""

    def __init__(self, config: pytest.Config, folder: Path = HERE) -> None:
        self.config = config
        self.coverage: dict[Kind, Coverage] = {kind: Coverage(load_catalogue(kind, folder)) for kind in FILES}

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        made = yield
        for item in made if isinstance(made, list) else [made]:
            if isinstance(item, pytest.Item):
                self._check(collector, item)
        return made

    def _check(self, collector: pytest.Collector, item: pytest.Item) -> None:
        for kind, coverage in self.coverage.items():
            for name in named_ids(item, kind):
                entry = coverage.catalogue.get(name)
                if entry is None:
                    raise collector.CollectError(f"{item.nodeid}: unknown {kind} {name!r}")
                if entry.status == "not-offered":
                    raise collector.CollectError(f"{item.nodeid}: {kind} {name!r} is not offered")
                item.user_properties.append((kind, name))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for kind, coverage in self.coverage.items():
            names = [str(value) for key, value in report.user_properties if key == kind]
            coverage.record(names, report.nodeid, report.when, report.outcome)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        whole = is_whole_run(self.config)
        terminalreporter.section("requirement matrix" if whole else "requirement matrix, this selection only")
        for kind, coverage in self.coverage.items():
            for line in summary(kind, coverage, whole):
                terminalreporter.write_line(line)
        target = self.config.getoption("matrix_json")
        if target:
            document = {f"{kind}s": coverage.as_json() for kind, coverage in self.coverage.items()}
            Path(target).write_text(json.dumps(document, indent=1) + "\n")


def is_whole_run(config: pytest.Config) -> bool:
    narrowed = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect"))
    return not narrowed and config.args_source is not pytest.Config.ArgsSource.ARGS


def summary(kind: Kind, coverage: Coverage, whole: bool) -> Iterator[str]:
    """The lines of one catalogue; a selection of tests only lists the groups that it touched."""
    covered_in_all = wanted_in_all = 0
    for group, covered, wanted, others in coverage.rows():
        covered_in_all += covered
        wanted_in_all += wanted
        shown: tuple[State, ...] = ("failing", "missing", "later", "not-offered") if whole else ("failing",)
        notes = [f"{state} {', '.join(others[state])}" for state in shown if others[state]]
        if whole or covered or notes:
            yield f"{group:<12}{covered:>4}/{wanted:<4}{'; '.join(notes)}".rstrip()
    yield f"{kind + 's:':<15}{covered_in_all} of {wanted_in_all} covered"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-json", metavar="PATH", help="write the requirement matrix of this run as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Matrix(config), "lockgate-matrix")
