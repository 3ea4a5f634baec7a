"""Logs that tell ids and never secrets, metrics that nobody can make grow."""

from __future__ import annotations

import json

import httpx
import pytest

from shared.config import OFF
from shared.telemetry import MetricsServer, metrics_page
from tests.support.processes import Processes

TOKEN = "lg1.acme.0123abcd.0123456789abcdef." + "s" * 43


SETUP = """
import logging
from shared.config import AdmissionSettings
from shared.telemetry import configure_logs, logger
configure_logs(AdmissionSettings(redis_url="redis://x"), "admission")
log = logger("lockgate.test")
"""


def logged(processes: Processes, code: str) -> str:
    """What a process writes that sets its logs up and runs ``code``."""
    process = processes.python("-c", SETUP + code, may_print_traceback=True)
    assert process.wait() == 0, process.output
    return process.output


def test_our_lines_and_those_of_libraries_have_one_form(processes: Processes) -> None:
    said = logged(
        processes,
        """
log.info("listening", port=8080)
logging.getLogger("some.library").warning("went %s", "wrong")
""",
    )
    ours, theirs = map(json.loads, said.splitlines())
    told = {"event": "listening", "port": 8080, "service": "admission", "level": "info"}
    assert told.items() <= ours.items()
    assert {"event": "went wrong", "service": "admission", "level": "warning"}.items() <= theirs.items()


def test_secrets_never_reach_a_line(processes: Processes) -> None:
    said = logged(
        processes,
        f"""
log.warning("odd header", header="Bearer {TOKEN}")
logging.getLogger("some.library").error("cannot reach redis://user:pass-word@host:6379/0")
try:
    raise ValueError("bad {TOKEN}")
except ValueError:
    log.exception("failed")
""",
    )
    assert "Traceback" in said
    assert "s" * 43 not in said
    assert "pass-word" not in said
    assert "0123456789abcdef" in said, "which token it was is still told"
    assert "host:6379" in said


def test_requests_have_no_line_each(processes: Processes) -> None:
    said = logged(
        processes,
        """
logging.getLogger("uvicorn.access").info("GET /")
logging.getLogger("httpx").info("HTTP Request: GET http://127.0.0.1")
log.debug("too fine")
""",
    )
    assert said == ""


def test_the_metrics_port_serves_and_ends() -> None:
    with MetricsServer("127.0.0.1", 0) as server:
        page = httpx.get(f"http://127.0.0.1:{server.port}/metrics")
        assert page.status_code == 200
        assert b"lockgate_admissions" in page.content
        port = server.port
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_off_is_not_opened() -> None:
    with MetricsServer("127.0.0.1", OFF) as server:
        assert server.port == OFF


def test_every_metric_of_ours_says_what_it_counts() -> None:
    helps = [line for line in metrics_page().decode().splitlines() if line.startswith("# HELP lockgate_")]
    assert len(helps) > 10
    for line in helps:
        assert len(line.split(" ", 3)[3]) > 10, line
