"""The scripts as texts: golden copies, headers, the one table of codes, the include loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

import lua
from shared.store.codes import Code
from tests.mutants.lexer import Token, closing, tokens
from tests.scripts.golden import FOLDER

EVERY = pytest.mark.parametrize("name", lua.NAMES)
FLAGS = {
    "admit": "",
    "epoch": "flags=allow-oom",
    "lease": "flags=allow-oom",
    "lookup": "flags=no-writes",
    "registry": "flags=allow-oom",
    "replace": "flags=allow-oom",
    "session": "flags=allow-oom",
    "session_open": "",
}
OPTIONS = {"COUNT", "STREAMS"}
"""Upper-case words that are no codes: options built into an argument list."""


def header(name: str) -> str:
    """The comment block that opens a script."""
    lines = lua.expand(name).splitlines()[1:]
    end = next(n for n, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(lines[:end])


def returned_codes(name: str) -> set[str]:
    """Upper-case strings of a script outside of calls to the server."""
    found, inside, codes = tokens(lua.expand(name)), 0, set()
    for n, token in enumerate(found):
        if is_call(found, n):
            inside = max(inside, closing(found, n + 3))
        text = token.text.strip("'")
        if n > inside and token.text.startswith("'") and re.fullmatch("[A-Z][A-Z_]+", text):
            codes.add(text)
    return codes - OPTIONS


def is_call(found: list[Token], n: int) -> bool:
    return found[n].text == "redis" and found[n + 2].text in ("call", "pcall")


@EVERY
def test_a_change_shows_in_every_script_it_reaches(name: str) -> None:
    golden = (FOLDER / f"{name}.lua").read_text()
    assert lua.expand(name) == golden, "renew with: python -m tests.scripts.golden"


def test_there_is_a_golden_copy_of_every_script_and_of_nothing_else() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.lua")) == sorted(lua.NAMES)
    folder = Path(lua.__file__).parent
    assert sorted(path.stem for path in folder.glob("*.lua")) == sorted(lua.NAMES)


@EVERY
def test_the_header_is_the_scripts_contract(name: str) -> None:
    text = header(name)
    assert text.startswith(f"-- {name}: ")
    for word in ("KEYS", "ARGV", "Replies {code, now, ...}", "Facts written: ", "Invariant"):
        assert word in text, word


@EVERY
def test_the_flags_say_what_memory_does_to_a_script(name: str) -> None:
    """New work is refused whole when memory is out; what finishes work, and what only looks, still runs."""
    assert lua.expand(name).splitlines()[0] == f"#!lua {FLAGS[name]}".strip()


@EVERY
def test_every_code_a_script_returns_is_in_its_header_and_in_the_table(name: str) -> None:
    replies = header(name).partition("Replies {code, now, ...}")[2].partition("Facts written")[0]
    listed = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b|\bOK\b", replies)) - {"ARGV", "KEYS"}
    returned = returned_codes(name)
    assert returned <= {code.value for code in Code}
    assert returned == listed


def test_every_code_of_the_table_is_returned_by_some_script() -> None:
    assert {code for name in lua.NAMES for code in returned_codes(name)} == {code.value for code in Code}


@EVERY
def test_time_is_read_once(name: str) -> None:
    """Two readings of one run may differ; what is decided by the first would be stored by the second."""
    text = lua.expand(name)
    assert text.count("redis.call('TIME')") == 1
    assert len(re.findall(r"\bnow_ms\(\)", text)) == 2


@EVERY
def test_no_script_parses_json(name: str) -> None:
    assert "cjson" not in lua.expand(name)


@EVERY
def test_a_script_is_known_by_the_servers_own_digest(name: str, raw: redis.Redis) -> None:
    script = lua.load(name)
    assert raw.script_load(script.source) == script.sha
    assert lua.load(name) is script


# The loader


def expanded(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], **more: str) -> str:
    monkeypatch.setattr(lua, "_read", files.__getitem__)
    return lua.expand("main", more or None)


def test_an_include_is_expanded_once_at_its_first_mention(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "main.lua": "#!lua\n--@include a\n--@include b\nreturn\n",
        "include/a.lua": "--@include b\nlocal a\n",
        "include/b.lua": "local b\n",
    }
    assert expanded(monkeypatch, files).split() == ["#!lua", "local", "b", "local", "a", "return"]


@pytest.mark.parametrize("loop", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_cycle_of_includes_is_refused_and_named(monkeypatch: pytest.MonkeyPatch, loop: list[str]) -> None:
    following = dict(zip(loop, [*loop[1:], loop[0]], strict=True))
    files = {f"include/{part}.lua": f"--@include {after}\n" for part, after in following.items()}
    with pytest.raises(ValueError, match=" -> ".join([*loop, loop[0]])):
        expanded(monkeypatch, {"main.lua": "--@include a\n", **files})


def test_a_missing_include_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        expanded(monkeypatch, {"main.lua": "--@include nowhere\n"})


def test_a_replacement_stands_in_for_the_include_and_is_expanded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"main.lua": "--@include a\nreturn\n", "include/a.lua": "local a\n", "include/b.lua": "local b\n"}
    text = expanded(monkeypatch, files, a="--@include b\nlocal other\n")
    assert text.split() == ["local", "b", "local", "other", "return"]
