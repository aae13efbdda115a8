"""`model.source`: each kind is found, and everything else is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from airside.cluster import model_source
from airside.cluster.demo_model.wheel import DemoModelError
from airside.cluster.model_source import ModelSourceError, resolve


def refusal(source: str) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve(source)
    assert str(caught.value).startswith(f"model.source: {source!r}: ")
    assert caught.value.source == source
    return str(caught.value)


def test_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path.resolve()


def test_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "owner" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/model") == tmp_path.resolve() / "owner" / "model"  # and not the hub's


def test_gguf_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path.resolve() / "m.gguf"


def test_folder_without_a_config_is_refused_naming_the_gguf_in_it(tmp_path: Path) -> None:
    assert "no config.json" in refusal(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "name that file" in refusal(str(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    assert f"give the folder it is in, {tmp_path}" in refusal(str(weights))


@pytest.mark.parametrize("source", ["nope", "", "./no/such", "/no/such/folder", "owner/missing.gguf", "a/b/c"])
def test_what_is_nowhere_is_refused_with_the_choices(source: str) -> None:
    assert '"demo", a folder with a config.json, a .gguf file, or a Hugging Face id' in refusal(source)


def test_demo_model_that_cannot_be_built_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_progress: object) -> Path:
        raise DemoModelError("no network")

    monkeypatch.setattr(model_source, "demo_checkpoint", fail)
    assert "no network" in refusal("demo")


RESPONSE: Any = SimpleNamespace(headers={}, request=None)  # Any: stands in for the hub's HTTP library


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errors.LocalEntryNotFoundError("no connection"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "has no such model"),
        (errors.GatedRepoError("403", response=RESPONSE), "accept its terms"),
        (errors.HfHubHTTPError("502", response=RESPONSE), "try again"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hub_failures_say_what_to_do(error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_arguments: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert remedy in refusal("owner/model")


def test_hub_download_takes_no_pickles_and_tells_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, object] = {}

    def download(**arguments: object) -> str:
        asked.update(arguments)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "no .safetensors" in refusal("owner/model")
    (tmp_path / "model.safetensors").write_bytes(b"")
    lines: list[str] = []
    assert resolve("owner/model", lines.append) == tmp_path
    assert lines
    assert asked["repo_id"] == "owner/model"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any(pattern.endswith((".bin", ".pt", ".pth", "*", ".py")) for pattern in patterns)
