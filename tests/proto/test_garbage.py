"""What is loaded when a process begins to serve is not looked at again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from airside.proto.garbage import keep_what_is_loaded

loaded = [[] for _ in range(1000)]
keep_what_is_loaded()
assert gc.get_freeze_count() > 1000
assert not gc.get_objects(generation=2)
made_later = []
made_later.append(made_later)  # a cycle
del made_later
assert gc.collect() == 1, "what comes later is still collected"
"""


def test_only_what_comes_later_is_collected() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
