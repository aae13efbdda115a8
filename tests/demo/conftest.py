"""One built demo checkpoint for all tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from airside.cluster.demo_model.checkpoint import demo_checkpoint


@pytest.fixture(scope="session")
def built_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, built into a cache of its own, so that building is what gets tested."""
    cache = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        return demo_checkpoint(print)
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
