"""Options of the engine's tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-traces",
        action="store_true",
        help="write what the engine does into tests/engine/traces; read the difference before keeping it",
    )
