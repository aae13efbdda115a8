"""`python -m airside.vision_workers --settings JSON`: one vision worker process."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import warnings
from types import FrameType

from airside.proto.channel import ConnectionBroken
from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.families.family import UnsupportedModel
from airside.vision_workers.process import run
from airside.vision_workers.segment import NoRoomForSegment

log = logging.getLogger(__name__)


def main() -> int:
    """The process's exit status: 0 when it was told to end, 1 when the checkpoint or the arena cannot be served.

    Also 1 when the controller, on another node, is out of reach.
    """
    parser = argparse.ArgumentParser(prog="airside.vision_workers", description=__doc__)
    parser.add_argument("--settings", required=True, help="VisionWorkerSettings as JSON")
    settings = VisionWorkerSettings.from_json(parser.parse_args().settings)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {settings.name} %(name)s: %(message)s",
    )
    _do_without_torch()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # its remarks on odd metadata are no news to an operator
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        run(settings)
    except (NoRoomForSegment, UnsupportedModel) as error:
        log.error("cannot serve pictures: %s", error)
        return 1
    except ConnectionBroken as error:
        log.error("%s", error)
        return 1
    return 0


def _do_without_torch() -> None:
    """Lets transformers find no torch: the image processors on Pillow need none, and would load it all the same.

    Loaded, it makes a process four times as large, which takes three times as long to be there.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def _end(number: int, _: FrameType | None) -> None:
    """Unwinds the stack, so that the segment is removed; once, so that nothing interrupts that."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    log.info("ending: %s", signal.Signals(number).name)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
