"""`python -m airside.controller --settings JSON`: one controller, until SIGTERM, SIGINT or a `Shutdown`."""

from __future__ import annotations

import argparse
import logging
import signal
from types import FrameType

from airside.controller.controller import Controller
from airside.proto.channel import Hub
from airside.proto.garbage import keep_what_is_loaded
from airside.proto.settings import ControllerSettings

_log = logging.getLogger(__name__)


def main() -> None:
    """Runs the controller of the given settings; returns when it was told to stop."""
    parser = argparse.ArgumentParser(prog="airside.controller", description=__doc__)
    parser.add_argument("--settings", required=True, help="ControllerSettings as JSON")
    settings = ControllerSettings.from_json(parser.parse_args().settings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with Hub(settings.endpoint) as hub:
        if settings.network_endpoint:
            hub.listen(settings.network_endpoint, settings.network_keys)
            _log.info("bus_listens endpoint=%s", settings.network_endpoint)
        controller = Controller(settings, hub)

        def stop(number: int, _frame: FrameType | None) -> None:
            controller.stop(signal.Signals(number).name)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        keep_what_is_loaded()
        controller.run()


if __name__ == "__main__":
    main()
