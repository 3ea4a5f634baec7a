"""The table of settings: one reading of environment and flags, and no quiet misspellings."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import (
    OFF,
    AdmissionSettings,
    SettingError,
    SettlementSettings,
    StoreSettings,
    known_variables,
    read,
    table,
)
from shared.store.inspection import Boundary

URL = {"LOCKGATE_REDIS_URL": "redis://127.0.0.1:6379"}
SERVICES: tuple[type[StoreSettings], ...] = (AdmissionSettings, SettlementSettings)


@pytest.mark.parametrize("kind", SERVICES)
def test_defaults_are_those_the_table_shows(kind: type[StoreSettings]) -> None:
    settings = read(kind, URL)
    for row in table(kind):
        if not row.doc.required and row.default:
            assert getattr(settings, row.name) == row.parse(row.default), row.name


@pytest.mark.parametrize("kind", SERVICES)
def test_every_row_has_a_help_and_both_names(kind: type[StoreSettings]) -> None:
    for row in table(kind):
        assert row.doc.help.endswith("."), row.name
        assert row.variable == "LOCKGATE_" + row.name.upper()
        assert row.flag == "--" + row.name.replace("_", "-")
        assert row.variable in known_variables()


def test_flags_win_over_variables_and_empty_ones_are_unset() -> None:
    environ = {**URL, "LOCKGATE_PORT": "81", "LOCKGATE_HOST": "", "PATH": "/bin"}
    settings = read(AdmissionSettings, environ, {"port": "82"})
    assert (settings.port, settings.host) == (82, "127.0.0.1")


def test_values_are_read_as_what_they_are() -> None:
    environ = {
        **URL,
        "LOCKGATE_METRICS_PORT": "off",
        "LOCKGATE_DECLARED_DURABILITY": "process-restart",
        "LOCKGATE_LOG_FORMAT": "console",
        "LOCKGATE_DRAIN_SECONDS": "0",
        "LOCKGATE_STORE_BINARY": "/somewhere",
        "LOCKGATE_HANDLER_URL": "http://handler",
    }
    settings = read(AdmissionSettings, environ)
    assert settings.metrics_port == OFF
    assert settings.declared_durability is Boundary.PROCESS_RESTART
    assert (settings.log_format, settings.drain_seconds) == ("console", 0)
    assert read(SettlementSettings, environ).handler_url == "http://handler"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "LOCKGATE_REDIS_URL must be set"),
        ({**URL, "LOCKGATE_PROT": "1"}, "LOCKGATE_PROT is not a setting; the known ones are LOCKGATE_"),
        ({**URL, "LOCKGATE_": "1"}, "LOCKGATE_ is not a setting"),
        ({**URL, "LOCKGATE_PORT": "x"}, "LOCKGATE_PORT must be a whole number from 0 to 65535"),
        (
            {**URL, "LOCKGATE_METRICS_PORT": "x"},
            "LOCKGATE_METRICS_PORT must be a whole number from 0 to 65535, or off",
        ),
        ({**URL, "LOCKGATE_PORT": "-1"}, "LOCKGATE_PORT"),
        ({**URL, "LOCKGATE_PORT": "65536"}, "LOCKGATE_PORT"),
        ({**URL, "LOCKGATE_PORT": "9" * 5_000}, "LOCKGATE_PORT"),
        ({**URL, "LOCKGATE_PORT": "٣"}, "LOCKGATE_PORT"),
        ({**URL, "LOCKGATE_MAX_REQUESTS": "0"}, "LOCKGATE_MAX_REQUESTS must be a whole number from 1"),
        ({**URL, "LOCKGATE_DRAIN_SECONDS": "off"}, "LOCKGATE_DRAIN_SECONDS must be a whole number"),
        ({**URL, "LOCKGATE_LOG_FORMAT": "xml"}, "LOCKGATE_LOG_FORMAT must be one of json, console"),
        (
            {**URL, "LOCKGATE_DECLARED_DURABILITY": "unknown"},
            "LOCKGATE_DECLARED_DURABILITY must be one of volatile, process-restart, power-loss",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_rule(environ: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError) as refused:
        read(AdmissionSettings, environ)
    assert str(refused.value).startswith(said)


def test_an_error_never_repeats_a_value() -> None:
    for name in ("LOCKGATE_PORT", "LOCKGATE_LOG_FORMAT", "LOCKGATE_DECLARED_DURABILITY"):
        with pytest.raises(SettingError) as refused:
            read(AdmissionSettings, {**URL, name: "pass-word"})
        assert "pass-word" not in str(refused.value)


def test_a_listening_port_that_is_off_is_refused() -> None:
    with pytest.raises(SettingError):
        read(AdmissionSettings, {**URL, "LOCKGATE_PORT": "off"})


def test_settings_are_frozen() -> None:
    settings: Any = read(AdmissionSettings, URL)
    with pytest.raises(AttributeError):
        settings.port = 1
