"""Logs and metrics of both services.

Log lines carry ids and codes, never payloads, tokens or other secrets. Metric labels come from closed sets
(routes, codes, statuses), never from ids, so that no caller can grow the number of series.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Final, Self

import structlog
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from shared.config import OFF, StoreSettings
from shared.plain import Plain

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

REQUESTS: Final = Counter(
    "lockgate_http_requests",
    "HTTP requests answered, by route template",
    ("service", "route", "method", "status"),
)
REQUEST_SECONDS: Final = Histogram(
    "lockgate_http_request_seconds",
    "Time to answer an HTTP request, streams excluded",
    ("service", "route"),
    buckets=_SECONDS,
)
UNDER_WAY: Final = Gauge("lockgate_http_requests_under_way", "HTTP requests being served", ("service",))
CONNECTIONS: Final = Gauge("lockgate_http_connections", "Open HTTP connections", ("service",))
CONNECTIONS_CUT: Final = Counter(
    "lockgate_http_connections_cut",
    "HTTP connections that were refused or ended for what they did, by reason",
    ("service", "reason"),
)
STREAMS: Final = Gauge("lockgate_streams", "Open update streams")
ADMISSIONS: Final = Counter(
    "lockgate_admissions",
    "Commands and invocations judged, by disposition or the code of the refusal",
    ("family", "result"),
)
LIMITED: Final = Counter("lockgate_limited", "Requests refused or shortened by a tenant's limit", ("limit",))
TENANT_USAGE: Final = Gauge("lockgate_tenant_usage", "What a tenant keeps, by limit", ("tenant", "limit"))
TENANT_LIMIT: Final = Gauge("lockgate_tenant_limit", "What a tenant may keep, by limit", ("tenant", "limit"))
STALE_SNAPSHOTS: Final = Counter(
    "lockgate_stale_snapshots", "Decisions repeated because a revision had moved", ("service",)
)
LOST_REPLIES: Final = Counter(
    "lockgate_lost_replies", "Store replies that were lost and resolved by identity", ("service",)
)
LEASES: Final = Counter("lockgate_leases", "Lease verbs answered by the store, by code", ("verb", "code"))
HANDLER_CALLS: Final = Counter("lockgate_handler_calls", "Handler calls, by how they ended", ("result",))
HANDLER_SECONDS: Final = Histogram(
    "lockgate_handler_seconds", "Time a handler took to answer", buckets=_SECONDS
)
SETTLED: Final = Counter("lockgate_settled", "Operations settled, by outcome", ("outcome",))
REPLACES: Final = Counter("lockgate_replaces", "Guarded replacements, by the store's code", ("code",))
PARKED: Final = Counter("lockgate_parked", "Operations set aside because deciding about them failed")
DUE: Final = Gauge("lockgate_due", "Items of all its tenants that were due when this process last looked")
DUE_SECONDS: Final = Gauge("lockgate_due_oldest_seconds", "How long the oldest of them has been due")

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


_SEVERAL_LINES: Final = frozenset({"exception", "stack", "stack_info"})


def _cleaner(plain: Plain) -> structlog.types.Processor:
    """The last guard: whatever reaches a log line, from whichever library, is plain text without secrets."""

    def clean(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        cleaned: dict[str, Any] = {}
        for key, value in event.items():
            if key.startswith("_"):
                # The formatter's own, taken out again before anything is written.
                cleaned[key] = value
            elif key in _SEVERAL_LINES:
                cleaned[key] = plain.lines(str(value))
            else:
                cleaned[plain.text(key)] = plain.value(value)
        return cleaned

    return clean


def configure_logs(settings: StoreSettings, service: str) -> None:
    """Send every log line of the process, ours and the libraries', to stderr in one form."""
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _logger, _method, event: {"service": service, **event},
        structlog.processors.format_exc_info,
        _cleaner(Plain((settings.redis_url, getattr(settings, "handler_url", "")))),
    ]
    written: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.log_level]),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, written],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[settings.log_level])
    # One line per request is what metrics are for; a server's own chatter is told by ours.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(max(logging.WARNING, _LEVELS[settings.log_level]))
    logging.getLogger("uvicorn").propagate = True
    _log_what_would_be_printed()


def _log_what_would_be_printed() -> None:
    """Python prints what nobody catches, with all that is in it: it goes the way of every other line."""
    log = logging.getLogger("lockgate")

    def crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("crashed", exc_info=(kind, error, trace))

    def thread_crashed(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None:
            crashed(failed.exc_type, failed.exc_value, failed.exc_traceback)

    def ignored(failed: sys.UnraisableHookArgs) -> None:
        if failed.exc_value is not None:
            crashed(failed.exc_type, failed.exc_value, failed.exc_traceback)

    sys.excepthook = crashed
    threading.excepthook = thread_crashed
    sys.unraisablehook = ignored
    logging.captureWarnings(capture=True)
    # A line that cannot be formatted is lost rather than printed raw.
    logging.raiseExceptions = False


def logger(name: str) -> Any:
    """A logger of key-value lines: ``log.info("event", key=value)``."""
    return structlog.get_logger(name)


def metrics_page() -> bytes:
    """Every metric of the process in the Prometheus text form."""
    return generate_latest(REGISTRY)


class MetricsServer:
    """``/metrics`` on a port of its own, in a thread of its own; nothing where the port is off."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._wanted = host, port
        self._running: Any = None

    @property
    def port(self) -> int:
        """The port in use, ``OFF`` where none is."""
        return int(self._running.port) if self._running else OFF

    def __enter__(self) -> Self:
        if self._wanted != OFF:
            # Only who serves pays for a server; the command line counts and logs without one.
            from shared.serving.metrics import serve_metrics

            self._running = serve_metrics(self._host, self._wanted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self._running.stop()
            self._running = None
