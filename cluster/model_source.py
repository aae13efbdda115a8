"""`model.source` -> a local checkpoint: the demo model, a folder, a .gguf file, or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from airside.cluster.demo_model.checkpoint import demo_checkpoint
from airside.cluster.demo_model.wheel import DemoModelError

Progress = Callable[[str], None]

DEMO = "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in one format only, and what configs and tokenizers are made of; no code, no pickles.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_FILES_IGNORED = ["*/*"]  # other exports of the same model live in subfolders (onnx/, original/)


class ModelSourceError(Exception):
    """`model.source` names nothing that can be served; the message says why and what to do."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"model.source: {source!r}: {why}")
        self.source = source


def resolve(source: str, progress: Progress | None = None) -> Path:
    """The checkpoint folder, or .gguf file, that `source` stands for; downloaded or built when need be.

    A name that exists on disk is a path, before it is a Hugging Face id.

    Args:
        source: "demo", a folder with a config.json, a .gguf file, or an "owner/name" of the Hugging Face hub.
        progress: told what is going on, a line at a time, when something takes long.

    Raises:
        ModelSourceError: there is no such model, or it cannot be had here and now.
    """
    tell = progress if progress is not None else _say_nothing
    path = Path(source).expanduser()
    if source == DEMO:
        return _demo(tell)
    if source and path.is_dir():  # the empty path would be the current folder
        return _folder(source, path)
    if path.is_file():
        return _file(source, path)
    if _HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        return _from_hub(source, tell)
    raise ModelSourceError(
        source, 'no such file or folder. Give "demo", a folder with a config.json, a .gguf file, or a Hugging Face id'
    )


def _say_nothing(_line: str) -> None:
    return


def _demo(progress: Progress) -> Path:
    try:
        return demo_checkpoint(progress)
    except DemoModelError as error:
        raise ModelSourceError(DEMO, str(error)) from error


def _folder(source: str, path: Path) -> Path:
    if (path / "config.json").is_file():
        return path.resolve()
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"; it holds {ggufs[0].name}: name that file instead" if ggufs else "; a checkpoint folder needs one"
    raise ModelSourceError(source, f"the folder has no config.json{hint}")


def _file(source: str, path: Path) -> Path:
    if path.suffix == ".gguf":
        return path.resolve()
    hint = f"; give the folder it is in, {path.parent}" if path.suffix in {".safetensors", ".json"} else ""
    raise ModelSourceError(source, f"a model file must be a .gguf file{hint}")


def _from_hub(source: str, progress: Progress) -> Path:
    from huggingface_hub import errors, snapshot_download

    progress(f"fetching {source} from the Hugging Face hub, or from its cache")
    try:
        folder = snapshot_download(repo_id=source, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_FILES_IGNORED)
    except (errors.HFValidationError, OSError) as error:  # the hub's other errors are kinds of OSError
        raise ModelSourceError(source, _hub_remedy(error)) from error
    return _complete(source, Path(folder))


def _hub_remedy(error: Exception) -> str:
    from huggingface_hub import errors

    match error:  # from the special to the general: each of these is a kind of a later one
        case errors.GatedRepoError():
            return "access to this model is restricted: accept its terms on huggingface.co and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "the Hugging Face hub has no such model, or it is private (then set HF_TOKEN); no such folder either"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return (
                "no such folder, not in the local cache, and the Hugging Face hub cannot be reached. Connect once, or "
                f"name a folder that holds the model, or use {DEMO!r}, which needs only a Python package index"
            )
        case _:
            return f"the download from the Hugging Face hub failed; try again ({error})"


def _complete(source: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelSourceError(source, f"the repository has no config.json (looked in {folder})")
    if not any(folder.glob("*.safetensors")):
        raise ModelSourceError(source, "the repository has no .safetensors weights; other formats are not read")
    return folder
