"""How much memory processes have had at their peak."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

THIS_PROCESS = "this process, LLM's front end"


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has had resident since its start. Raises RuntimeError when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} is gone, or has no resident memory")


def peaks_here() -> dict[str, int]:
    """Of this process, and of Airside's processes that it has started: by module, those of one added up."""
    me = psutil.Process()
    return {THIS_PROCESS: peak_rss_bytes(me.pid), **_added_up(me.children(recursive=True))}


def peak_of_tree(pid: int) -> int:
    """Of a process and all that it started and that still runs, added up. Raises RuntimeError when it is gone."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error as error:
        raise RuntimeError(f"process {pid} is gone") from error
    peak = peak_rss_bytes(pid)
    for child in children:
        with contextlib.suppress(RuntimeError):  # it has ended meanwhile
            peak += peak_rss_bytes(child.pid)
    return peak


def _added_up(processes: Iterable[psutil.Process]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for process in processes:
        module = next((word for word in process.cmdline() if word.startswith("airside.")), None)
        if module is not None:
            peaks[module] = peaks.get(module, 0) + peak_rss_bytes(process.pid)
    return peaks
