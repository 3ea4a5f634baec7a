"""Log lines that no caller can forge, fill or make a terminal obey, in both forms."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.plain import LONGEST, Plain
from tests.support.processes import Processes

TOKEN = "lg1.acme.0123abcd.0123456789abcdef." + "s" * 43
URL = "redis://worker:p%40ss-word%2F1@store.internal:6379/0"
HOOK = "https://hook.internal/run?key=hook-key-1"
SETUP = f"""
import logging, sys, threading
from shared.config import SettlementSettings
from shared.telemetry import configure_logs, logger
settings = SettlementSettings(redis_url={URL!r}, handler_url={HOOK!r}, log_format=sys.argv[1])
configure_logs(settings, "settlement")
log = logger("lockgate.test")
"""
FORMS = pytest.mark.parametrize("form", ["json", "console"])
EVIL = "a\r\n2026-01-01T00:00:00Z [info     ] all is well\x1b[2J\x1b]0;x\x07"
EVIL += "\u202egnp\u2028\u0085\x00\ud800\u200b"


def logged(processes: Processes, form: str, code: str, *, status: int = 0) -> str:
    """What a process writes that sets its logs up in one form and runs ``code``."""
    process = processes.python("-c", SETUP + code, form, may_print_traceback=True)
    assert process.wait() == status, process.output
    return process.output


def assert_plain(text: str) -> None:
    """Nothing but visible characters and line ends."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)


@FORMS
def test_what_callers_send_moves_no_terminal_and_forges_no_line(processes: Processes, form: str) -> None:
    said = logged(
        processes,
        form,
        f"""
evil = {EVIL!r}
log.warning("odd", said=evil, more=[evil, {{evil: evil}}], raw=evil.encode("utf-8", "replace"))
log.warning(evil)
logging.getLogger("some.library").error("got %s", evil, extra={{"header": evil}})
""",
    )
    assert_plain(said)
    lines = said.splitlines()
    assert len(lines) == 3
    assert not any(line.startswith("2026-01-01") for line in lines)
    for escaped in (r"\r\n2026", r"\x1b[2J", r"\u202e", r"\u2028", r"\x85", r"\x00", r"\ud800", r"\u200b"):
        assert all(escaped in line.replace("\\\\", "\\") for line in lines), escaped


@FORMS
def test_a_traceback_forges_no_line_either(processes: Processes, form: str) -> None:
    said = logged(
        processes,
        form,
        f"""
try:
    raise ValueError({EVIL!r})
except ValueError:
    log.exception("failed")
    logging.getLogger("some.library").exception("failed too")
""",
    )
    assert_plain(said)
    assert "ValueError" in said
    beginnings = [line for line in said.splitlines() if not line.startswith("    ")]
    assert len(beginnings) == 2
    if form == "json":
        for line in beginnings:
            traceback = json.loads(line)["exception"]
            assert all(part.startswith("    ") and part.isprintable() for part in traceback.split("\n"))


@FORMS
def test_a_long_value_is_cut_and_says_so(processes: Processes, form: str) -> None:
    said = logged(
        processes,
        form,
        """
long = "x" * 5_000_000
log.warning("long", said=long, many=list(range(100_000)), deep=[[[[[[[[long]]]]]]]])
log.warning(long)
logging.getLogger("some.library").error(long)
try:
    raise ValueError(long + "\\n" + "y\\n" * 100_000)
except ValueError:
    log.exception("failed")
""",
    )
    assert len(said) < 20_000
    assert "4999000 more" in said
    assert said.count("failed") == 1
    assert "more lines" in said


@FORMS
def test_no_secret_reaches_a_line_in_any_form(processes: Processes, form: str) -> None:
    """Tokens, logins and declared addresses, by us, by libraries, in what nobody catches."""
    said = logged(
        processes,
        form,
        f"""
token, url, hook = {TOKEN!r}, {URL!r}, {HOOK!r}
library = logging.getLogger("some.library")
log.warning("odd", header="Bearer " + token, nested={{"headers": [("authorization", token)]}}, url=url)
log.warning("bare password p@ss-word/1 and p%40ss-word%2F1")
log.warning("another store", url="rediss://someone:else-word@elsewhere:1")
log.warning("basic", header="Basic dXNlcjpwYXNz", other="bearer abcdefgh")
library.error("calling %s with %r", hook, {{"token": token}}, extra={{"link": url}})
library.error("broken %s %d", token)
class Odd:
    def __repr__(self):
        return "<" + token + url + ">"
log.warning("object", value=Odd(), error=ValueError(url))
try:
    try:
        raise OSError("cannot reach " + url)
    except OSError as error:
        raise RuntimeError("while sending " + token) from error
except RuntimeError:
    log.exception("failed")
    library.exception("failed too")
def crash():
    raise RuntimeError(token + hook)
thread = threading.Thread(target=crash)
thread.start()
thread.join()
class Broken:
    def __del__(self):
        raise RuntimeError(token)
Broken()
import warnings
warnings.warn(url)
raise RuntimeError(token + url)
""",
        status=1,
    )
    for secret in (
        "s" * 40,
        "p@ss",
        "p%40ss",
        "else-word",
        "dXNlcjpwYXNz",
        "abcdefgh",
        "hook-key",
        "store.internal",
    ):
        assert secret not in said, said[max(0, said.index(secret) - 300) :][:600]
    assert "hook.internal" not in said
    assert said.count("0123456789abcdef") >= 8, "which token it was is still told"
    assert said.count("crashed") == 3
    assert said.count("Traceback (most recent call last)") >= 6
    assert re.search(r"elsewhere:1", said)


@given(st.text(max_size=300), st.text(alphabet="lg1.acme-0abcdef_ \x1b\n", max_size=200))
def test_any_text_becomes_one_plain_line(text: str, near: str) -> None:
    for one in (text, near):
        line = Plain().text(one)
        assert line.isprintable()
        assert len(line) <= 10 * LONGEST + 40
        if one.isprintable() and "://" not in one and "lg1." not in one and "earer" not in one.lower():
            assert line == one or "asic" in one.lower()


@given(st.text(min_size=1, max_size=30))
def test_an_escape_tells_which_character_it_was(text: str) -> None:
    line = Plain().text(text)
    hidden = [c for c in text if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"]
    for character in hidden:
        assert character.encode("unicode_escape").decode() in line


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=40)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=40)
    ),
    max_leaves=60,
)


@given(_values)
def test_any_value_becomes_a_bounded_one_of_plain_text(value: object) -> None:
    assert_plain(json.dumps(Plain().value(value), ensure_ascii=False))


def test_a_short_password_does_not_mangle_every_line() -> None:
    plain = Plain(["redis://:a@host/0", "", "http://[broken"])
    assert plain.text("a plain warning") == "a plain warning"
    assert plain.text("redis://:a@host/0") == "***"
