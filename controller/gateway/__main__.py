"""`python -m airside.controller.gateway --settings JSON`: one gateway process."""

from __future__ import annotations

import argparse

from airside.controller.gateway.server import run
from airside.proto.settings import GatewaySettings


def main() -> int:
    """Reads the settings and serves; returns the exit code."""
    parser = argparse.ArgumentParser(prog="airside.controller.gateway")
    parser.add_argument("--settings", required=True, type=GatewaySettings.from_json, help="GatewaySettings as JSON")
    settings: GatewaySettings = parser.parse_args().settings
    return run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
