"""What an actor tells about the process it was; no Ray here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from airside.cluster.supervisor.actors import LastError, ProcessActor


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
