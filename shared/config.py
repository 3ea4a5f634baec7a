"""Settings of both services: one table of names, defaults and help, read from ``LOCKGATE_*`` variables.

A field of a settings class is a variable (``redis_url`` is ``LOCKGATE_REDIS_URL``) and a flag
(``--redis-url``); flags win. Everything is checked at the start: an unknown variable, a value out of range
or a missing one is an error that names it, because a misspelt setting that is silently ignored shows up when
it matters most.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from shared.store.inspection import Boundary

PREFIX: Final = "LOCKGATE_"
OFF: Final = -1
"""A port that is not opened."""


class SettingError(ValueError):
    """A setting that is missing, unknown or out of range: its name and its rule, never its value."""


@dataclass(frozen=True)
class Doc:
    """What a setting is for, and its bounds where it is a number. ``optional`` also allows ``off``."""

    help: str
    low: int = 0
    high: int = 0
    required: bool = False
    port: bool = False
    optional: bool = False


_DRAIN: Final = Doc("How long work may take to end after SIGTERM, in seconds.", high=600)
_PORT: Final = Doc("The port to listen on; 0 takes a free one and logs it.", high=65_535, port=True)
_METRICS: Final = Doc(
    "The port of /metrics: off, 0 for a free one, or the service's own port.",
    high=65_535,
    port=True,
    optional=True,
)


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """What every process needs that speaks to the store."""

    redis_url: Annotated[
        str,
        Doc("The store, redis://, rediss:// or unix://; `lockgate up` brings its own.", required=True),
    ] = ""
    declared_durability: Annotated[
        Boundary | None,
        Doc(
            "What acknowledged writes survive by your word; new work is refused while the store proves less."
        ),
    ] = None
    log_format: Annotated[Literal["json", "console"], Doc("Log lines for machines or for people.")] = "json"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Doc("The least severe log lines to write.")
    ] = "info"


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings(StoreSettings):
    """The tenants' door."""

    host: Annotated[str, Doc("The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _PORT] = 8080
    metrics_port: Annotated[int, _METRICS] = 9080
    drain_seconds: Annotated[int, _DRAIN] = 20
    max_requests: Annotated[
        int,
        Doc("Requests under way, waits and streams included; further ones get 503.", low=1, high=1_000_000),
    ] = 10_000
    max_connections: Annotated[
        int,
        Doc("Open connections; an idle one makes room, else a further one gets 503.", low=1, high=1_000_000),
    ] = 12_000
    request_seconds: Annotated[
        int, Doc("How long a request may take to arrive whole, in seconds.", low=1, high=3_600)
    ] = 60
    idle_seconds: Annotated[
        int,
        Doc(
            "How long a connection without a request stays open, in seconds; longer than a proxy's in front.",
            low=1,
            high=3_600,
        ),
    ] = 75
    unread_seconds: Annotated[
        int,
        Doc("How long a client may leave unread what it was sent, in seconds.", low=1, high=3_600),
    ] = 60


@dataclass(frozen=True, kw_only=True)
class SettlementSettings(StoreSettings):
    """The workers' side: a sidecar where a peer is named, else the central recovery process."""

    tenant: Annotated[str, Doc("The tenant to serve; without one, all are settled.")] = ""
    peer: Annotated[str, Doc("The peer to work for; needs a tenant and a handler.")] = ""
    handler_url: Annotated[str, Doc("Where the handler takes requests, http:// or https://.")] = ""
    concurrency: Annotated[int, Doc("Leases held at the same time.", low=1, high=1024)] = 16
    host: Annotated[str, Doc("The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _PORT] = 8081
    metrics_port: Annotated[int, _METRICS] = 9081
    drain_seconds: Annotated[int, _DRAIN] = 20


OTHERS: Final[Mapping[str, str]] = {
    "LOCKGATE_STORE_BINARY": "A server binary for the embedded store in place of the bundled one.",
}
"""Variables that are read elsewhere: known, so that one environment can hold everything."""

S = TypeVar("S", bound=StoreSettings)


@dataclass(frozen=True)
class Setting:
    """One row of the table, enough to make a flag of it."""

    name: str
    default: str
    doc: Doc
    choices: tuple[str, ...]
    integer: bool

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value that ``text`` stands for; SettingError where it stands for none."""
        if self.doc.optional and text == "off":
            return OFF
        if self.integer:
            return self._integer(text)
        if self.choices and text not in self.choices:
            raise SettingError(f"{self.variable} must be one of {', '.join(self.choices)}")
        if not text and self.doc.required:
            raise SettingError(f"{self.variable} must be set. {self.doc.help}")
        return Boundary(text) if self.name == "declared_durability" else text

    def _integer(self, text: str) -> int:
        low, high = self.doc.low, self.doc.high
        # The length is looked at first: Python refuses very long numbers with an error of its own.
        if not (text.isascii() and text.isdigit() and len(text) < 10) or not low <= int(text) <= high:
            also = ", or off" if self.doc.optional else ""
            raise SettingError(f"{self.variable} must be a whole number from {low} to {high}{also}")
        return int(text)


def table(kind: type[StoreSettings]) -> tuple[Setting, ...]:
    """The settings of one service, in the order of its fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(_row(field, *typing.get_args(hints[field.name])) for field in dataclasses.fields(kind))


def _row(field: dataclasses.Field[Any], hint: Any, doc: Doc) -> Setting:
    choices: tuple[str, ...] = ()
    if hint == Boundary | None:
        choices = tuple(boundary.value for boundary in Boundary if boundary is not Boundary.UNKNOWN)
    elif typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
    default = "" if field.default is None else str(field.default)
    return Setting(field.name, default, doc, choices, hint is int)


def known_variables() -> frozenset[str]:
    """Every variable that any of our programs reads."""
    rows = (*table(AdmissionSettings), *table(SettlementSettings))
    return frozenset(row.variable for row in rows) | OTHERS.keys()


def read(kind: type[S], environ: Mapping[str, str], flags: Mapping[str, str] | None = None) -> S:
    """The settings of one service from its environment, ``flags`` (field name → text) winning.

    An empty variable is an unset one. Raises SettingError.
    """
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known_variables())
    if unknown:
        known = ", ".join(sorted(known_variables()))
        raise SettingError(f"{unknown[0]} is not a setting; the known ones are {known}")
    values: dict[str, Any] = {}
    for row in table(kind):
        text = (flags or {}).get(row.name) or environ.get(row.variable, "")
        if text or row.doc.required:
            values[row.name] = row.parse(text)
    return kind(**values)
