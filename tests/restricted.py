"""Runs tests again with services under restricted users of the store.

``--acl some`` (the default) does so for the tests of :data:`SOME`, ``--acl all`` for all of :data:`ALL`,
``--acl only`` for these without running them as they are, ``--acl off`` for none. A command that the store
refuses to a service fails the test and is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.support import acl

ALL: Final = ("tests.admission", "tests.settlement", "tests.scripts")
SOME: Final = {
    "tests.admission": "batch closing commands events live scope sessions tokens waiting",
    "tests.settlement": "endings offers processes sessions settle sidecar",
}
"""Enough to send every command that any process sends, in less than a minute of one processor."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--acl",
        choices=("off", "some", "all", "only"),
        default="some",
        help="which modules run again with services under restricted users of the store",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mode = metafunc.config.getoption("--acl")
    if mode == "off" or "store_rules" not in metafunc.fixturenames:
        return
    if not _chosen(metafunc.module.__name__, mode):
        return
    apart = metafunc.definition.get_closest_marker("unrestricted") is not None
    ways = [False] if apart else [True] if mode == "only" else [False, True]
    names = [pytest.HIDDEN_PARAM if way is False else "restricted" for way in ways]
    metafunc.parametrize("store_rules", ways, ids=names, indirect=True)


@pytest.fixture(autouse=True)
def store_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restrict the services of a test that is run for that."""
    with acl.services(bool(getattr(request, "param", False))) as refused:
        yield
    if refused:
        pytest.fail("the store refused to services: " + ", ".join(sorted(refused)))


def _chosen(module: str, mode: str) -> bool:
    package, _, name = module.rpartition(".test_")
    if mode == "some":
        return name in SOME.get(package, "").split()
    return package in ALL
