"""Text made fit for a log line: no secret in it, nothing a terminal would obey, no more than a line holds.

What callers send reaches a log inside descriptions, exceptions and the lines of libraries, so it is not for
the one who writes a line to think of it: everything on its way into a log goes through here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

LONGEST: Final = 1_000
"""Characters of one value."""
_READ: Final = 65_536
_MOST_ITEMS: Final = 32
_DEEPEST: Final = 4
_LINES: Final = (20, 60)
_INDENT: Final = "    "
_SHORTEST_SECRET: Final = 6
_HIDDEN: Final = "***"

_TOKEN: Final = re.compile(r"lg1\.([a-z0-9-]{1,63})\.[0-9a-f]{8}\.([0-9a-f]{16})\.[A-Za-z0-9_-]+")
_CREDENTIALS: Final = re.compile(r"\b(bearer|basic)(\s+|%20|\+)(?!lg1\.)[^\s\"',;]+", re.IGNORECASE)
_URL_LOGIN: Final = re.compile(r"(\b[a-z]+://)[^/@\s]*@")


class Plain:
    """Cleans what is logged. ``urls`` are places whose addresses and logins must not be told, not even where
    they appear in a form that no pattern knows.
    """

    def __init__(self, urls: Iterable[str] = ()) -> None:
        found = {part for url in urls for part in _parts(url) if len(part) >= _SHORTEST_SECRET}
        self._secrets = sorted(found, key=len, reverse=True)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Numbers and truth values as they are, containers of a bounded size, all else as text."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            return self.text(value)
        if depth >= _DEEPEST:
            return "…"
        if isinstance(value, Mapping):
            items = list(value.items())[:_MOST_ITEMS]
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in items}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.value(item, depth + 1) for item in list(value)[:_MOST_ITEMS]]
        return self.text(_shown(value))

    def text(self, text: str) -> str:
        """One line of at most ``LONGEST`` characters and what escaping adds."""
        read = self._redacted(text[:_READ])
        more = len(text) - _READ if len(text) > _READ else 0
        if len(read) > LONGEST:
            more += len(read) - LONGEST
            read = read[:LONGEST]
        return _escaped(read) + (f"… ({more} more)" if more else "")

    def lines(self, text: str) -> str:
        """Several lines, each indented, so that none of them looks like the beginning of a log line."""
        lines = text.split("\n")
        first, most = _LINES
        if len(lines) > most:
            lines = [*lines[:first], f"… ({len(lines) - most} more lines)", *lines[first - most :]]
        return "\n".join(_INDENT + self.text(line) for line in lines)

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        text = _CREDENTIALS.sub(r"\1 ***", _TOKEN.sub(r"lg1.\1.***.\2.***", text))
        return _URL_LOGIN.sub(r"\1***@", text)


def _parts(url: str) -> Iterable[str]:
    """A URL and those parts of it that are secrets by themselves, as written and decoded."""
    yield url
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    login = parts.netloc.rpartition("@")[0]
    for part in (login, login.partition(":")[2], parts.query):
        yield part
        yield unquote(part)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 -- a log line must not fail for what it tells of
        return f"<{type(value).__name__}>"


def _escaped(text: str) -> str:
    """Whatever moves a cursor, turns the direction of writing or cannot be seen, as an escape sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
