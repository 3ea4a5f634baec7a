"""Documents people write: YAML or JSON into the same plain values, with nothing of YAML that JSON has not.

Read from parser events, so that no tag builds an object and no alias can explode: explicit tags, anchors,
aliases and a second document are refused. A plain scalar is null, a boolean, a number as JSON spells it, or
text; what other YAML readers take for a number is refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import yaml

from shared.domain.canonical import INVOCATION, parse
from shared.domain.errors import InputFault, InvalidInput
from shared.domain.numbers import BadNumber, invocation_number
from shared.domain.shape import quoted
from shared.domain.strict import Json, verify

MAX_BUNDLE_BYTES: Final = 262_144
MAX_YAML_VALUES: Final = 100_000
"""Names and values of a YAML document: its reader is slow, so more of them must be written as JSON."""

_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: Final[dict[str, Json]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_ELSEWHERE: Final = re.compile(
    r"[-+]?(0[xob][0-9a-fA-F_]+|(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
)


def read_source(source: bytes, *, root: str = "bundle", max_bytes: int = MAX_BUNDLE_BYTES) -> Json:
    """The value of a JSON document (one that begins with ``{``) or a YAML one; InvalidInput where it is
    neither.
    """
    if len(source) > max_bytes:
        raise InvalidInput(root, f"must not exceed {max_bytes} bytes", code=InputFault.TOO_LARGE)
    if source.lstrip()[:1] == b"{":
        return parse(source, INVOCATION, max_bytes=max_bytes, root=root).value
    try:
        text = source.decode("utf-8", "strict")
    except UnicodeDecodeError as bad:
        raise InvalidInput(root, f"must be UTF-8; byte {bad.start} is not") from None
    if text.startswith("\ufeff"):
        raise InvalidInput(root, "must not begin with a byte order mark")
    return verify(_Builder(root).build(text), INVOCATION.max_depth, root)


class _Builder:
    """Turns events into values without recursion, so depth is a count and not a stack."""

    def __init__(self, root: str) -> None:
        self._root = root

    def build(self, text: str) -> object:
        try:
            events = iter(yaml.parse(text, Loader=_LOADER))
            return self._document(events)
        except yaml.MarkedYAMLError as bad:
            mark = bad.problem_mark
            place = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
            raise InvalidInput(self._root, f"is not YAML{place}: {bad.problem}") from None
        except yaml.YAMLError:
            raise InvalidInput(
                self._root, "is not YAML: it holds characters that YAML does not allow"
            ) from None

    def _document(self, events: Iterator[Any]) -> object:
        result: object = None
        documents = values = 0
        # Open containers, each with the key that waits for its value: an empty list where none does.
        open_at: list[tuple[dict[str, object] | list[object], list[str]]] = []
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "is a second document")
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                open_at.pop()
            elif isinstance(event, yaml.NodeEvent):
                values += 1
                if values > MAX_YAML_VALUES:
                    rule = f"must not hold more than {MAX_YAML_VALUES} names and values; write it as JSON"
                    raise InvalidInput(self._root, rule, code=InputFault.TOO_LARGE)
                value = self._node(event)
                if not open_at:
                    result = value
                else:
                    self._place(event, value, *open_at[-1])
                if isinstance(value, (dict, list)):
                    open_at.append((value, []))
                    if len(open_at) > INVOCATION.max_depth:
                        self._refuse(event, f"is nested deeper than {INVOCATION.max_depth}")
        return result

    def _node(self, event: Any) -> object:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(event, "uses an anchor or alias; write the value out")
        if event.tag is not None:
            self._refuse(event, f"uses the tag {quoted(event.tag)}; only plain values are read")
        if isinstance(event, yaml.MappingStartEvent):
            return {}
        if isinstance(event, yaml.SequenceStartEvent):
            return []
        return self._scalar(event) if event.implicit[0] else event.value

    def _scalar(self, event: Any) -> Json:
        plain: str = event.value
        if plain in _WORDS:
            return _WORDS[plain]
        if _NUMBER.fullmatch(plain):
            try:
                return invocation_number(plain)
            except BadNumber as bad:
                self._refuse(event, bad.rule)
        if _NUMBER_ELSEWHERE.fullmatch(plain):
            self._refuse(event, "could be a number; write it as JSON does, or quote it as text")
        return plain

    def _place(
        self, event: Any, value: object, container: dict[str, object] | list[object], key: list[str]
    ) -> None:
        if isinstance(container, list):
            container.append(value)
        elif key:
            container[key.pop()] = value
        elif not isinstance(value, str):
            self._refuse(event, "must be a name; quote it to make it text")
        elif value in container:
            self._refuse(event, f"repeats the name {quoted(value)}")
        else:
            key.append(value)

    def _refuse(self, event: Any, rule: str) -> NoReturn:
        mark = event.start_mark
        raise InvalidInput(self._root, f"line {mark.line + 1} column {mark.column + 1} {rule}")
