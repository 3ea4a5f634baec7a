"""``python -m admission_svc``: one door process, set up by ``LOCKGATE_*``, drained by SIGTERM or Ctrl-C."""

from __future__ import annotations

import gc
import os
import sys

from admission_svc.app import Door
from admission_svc.server import DoorServer, configuration
from shared.config import OFF, AdmissionSettings, SettingError, read
from shared.store.runtime import Runtime
from shared.telemetry import MetricsServer, configure_logs, logger

_WRONG_SETTINGS = 2


def run(settings: AdmissionSettings) -> None:
    """Serve until a signal. Raises SettingError for a store URL that is none, OSError for a port in use."""
    try:
        runtime = Runtime(settings.redis_url, settings.declared_durability)
    except ValueError as error:
        raise SettingError(f"LOCKGATE_REDIS_URL: {error}") from None
    configure_logs(settings, "admission")
    log = logger("lockgate.admission")
    door = Door(runtime, settings)
    _spare_the_collector()
    apart = OFF if settings.metrics_port == settings.port != 0 else settings.metrics_port
    with MetricsServer(settings.host, apart) as metrics:

        def told(port: int) -> None:
            log.info("listening", host=settings.host, port=port, metrics_port=metrics.port)

        DoorServer(configuration(door, settings), door.drain, told).run()
    log.info("ended")


def _spare_the_collector() -> None:
    """What is here now stays; what a request makes is freed by its count. Looking for cycles as often as the
    defaults do took an eighth of the door's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def main() -> int:
    """The exit status: 0 after an orderly end, 2 for wrong settings."""
    try:
        run(read(AdmissionSettings, os.environ))
    except (SettingError, OSError) as error:
        print(f"lockgate admission: {error}", file=sys.stderr)  # noqa: T201 -- before there is a log
        return _WRONG_SETTINGS
    return 0


if __name__ == "__main__":
    sys.exit(main())
