"""What an actor tells about the process it was; no Ray here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from airside.cluster.supervisor import actors
from airside.cluster.supervisor.actors import CheckpointMissing, LastError, ProcessActor, VisionWorkerActor
from airside.proto.settings import VisionWorkerSettings


@pytest.fixture(autouse=True)
def record_factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


def test_the_last_error_is_kept_in_one_line() -> None:
    kept = LastError()
    log = logging.getLogger("airside.test")
    log.error("first %s", "cause")
    assert kept.line == "first cause"
    log.warning("no error")
    assert kept.line == "first cause"
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    assert kept.line == "ValueError: two lines"


@pytest.mark.parametrize(("status", "ended"), [(0, (0, "")), (1, (1, "no such file"))])
def test_an_exit_status_comes_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, status: int, ended: tuple[int, str]
) -> None:
    program = ModuleType("some_process.__main__")

    def main() -> int:
        logging.getLogger("airside.test").error("no such file")
        return status

    program.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_process.__main__", program)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    class SomeActor(ProcessActor):
        module = "some_process"

    assert SomeActor("{}", num_threads=1).run() == ended


class Program:
    """In place of a vision worker's: what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node_id: str) -> None:
        self.told: list[VisionWorkerSettings] = []
        program = ModuleType("airside.vision_workers.__main__")
        program.main = self._main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "airside.vision_workers.__main__", program)
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(actors, "_node_id", lambda: node_id)
        monkeypatch.setattr(actors, "_node_name", lambda: "the-other")

    def _main(self) -> int:
        self.told.append(VisionWorkerSettings.from_json(sys.argv[2]))
        return 0


def vision_settings(model: Path, endpoint: str, node: str = "here") -> VisionWorkerSettings:
    return VisionWorkerSettings(endpoint, "vision-0", str(model), "airside-s", 1, 1, 1, 1.0, node=node)


@pytest.mark.parametrize(("home", "told"), [("", "ipc"), ("a", "ipc"), ("b", "tcp")])
def test_a_vision_worker_goes_by_where_ray_has_put_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, told: str
) -> None:
    program = Program(monkeypatch, node_id="a")
    here, there = vision_settings(tmp_path, "ipc"), vision_settings(tmp_path, "tcp")
    elsewhere = ("", "") if not home else (home, there.to_json())
    assert VisionWorkerActor(here.to_json(), 1, *elsewhere).run() == (0, "")
    assert program.told == [here if told == "ipc" else vision_settings(tmp_path, "tcp", node="the-other")]


def test_a_checkpoint_that_another_node_does_not_have_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = Program(monkeypatch, node_id="a")
    settings = vision_settings(tmp_path / "m", "tcp").to_json()
    actor = VisionWorkerActor(settings, 1, "b", settings)
    with pytest.raises(CheckpointMissing, match=f"node the-other has no {tmp_path}/m .* the same path .* STRICT_PACK"):
        actor.run()
    assert program.told == []
