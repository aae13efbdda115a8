"""`airside scale vision` with a stand-in for the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from typer.testing import CliRunner

from airside.cluster.cli import app, wait_vision
from airside.cluster.cli.vision_size import VisionSize
from airside.proto import airside_pb2 as pb


class StandIn:
    """The client: `asked` is what it was asked for; each look at the workers is the next of `looks`, then the last."""

    asked: tuple[int, int | None]
    looks: Sequence[tuple[int, Sequence[str]]] = [(0, ())]  # the target, and the states of the vision workers

    def __init__(self, _address: str) -> None:
        self.left = list(self.looks)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def scale_vision(self, replicas: int, replicas_max: int | None = None) -> None:
        StandIn.asked = (replicas, replicas_max)

    def list_workers(self) -> pb.ListWorkersReply:
        target, states = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        rows = [pb.Worker(role="vision_worker", state=state) for state in states]
        return pb.ListWorkersReply(workers=[pb.Worker(role="worker", state="busy"), *rows], vision_target=target)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("airside.cluster.client.Client", StandIn)
    monkeypatch.setattr(wait_vision, "_ASK_EVERY_S", 0.0)
    yield
    StandIn.looks = [(0, ())]


def scale(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["scale", "vision", *arguments, "--address", "127.0.0.1:9"])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("size", "asked", "said"),
    [
        ("3", (3, None), "vision workers: 3 wanted"),
        ("0", (0, None), "vision workers: 0 wanted"),
        ("1-4", (1, 4), "vision workers: 1 to 4 wanted"),
        ("0 - 2", (0, 2), "vision workers: 0 to 2 wanted"),
        ("2-2", (2, 2), "vision workers: 2 to 2 wanted"),
    ],
)
def test_what_is_asked_for(size: str, asked: tuple[int, int | None], said: str) -> None:
    assert scale(size) == (0, f"{said}\n")
    assert StandIn.asked == asked


@pytest.mark.parametrize("size", ["", "many", "1-", "4-1", "1..4", "1-2-3", "0.5", "\u0661", "9999999"])
def test_what_is_no_size(size: str) -> None:
    with pytest.raises(ValueError, match=r"is neither a number|is no range"):
        VisionSize.parse(size)
    assert scale(size)[0] == 2


def test_waiting_for_a_number() -> None:
    StandIn.looks = [(2, ["ready"]), (2, ["ready", "busy", "draining"]), (2, ["lost", "ready", "busy"])]
    status, output = scale("2", "--wait")
    assert status == 0
    assert output.splitlines()[-1] == "vision workers: 2 up, 0 draining, 2 wanted"


def test_waiting_for_what_the_load_makes_of_a_range() -> None:
    StandIn.looks = [(0, []), (3, ["ready", "ready"]), (3, ["ready", "ready", "busy"])]
    status, output = scale("1-4", "--wait")
    assert status == 0
    assert output.splitlines()[1:] == [
        "vision workers: 0 up, 0 draining, 1 wanted",
        "vision workers: 2 up, 0 draining, 3 wanted",
        "vision workers: 3 up, 0 draining, 3 wanted",
    ]


def test_in_vain() -> None:
    StandIn.looks = [(3, ["ready"])]
    status, output = scale("3", "--wait", "--timeout", "0")
    assert status == 1
    assert "not there yet: vision workers: 1 up, 0 draining, 3 wanted after 0 s" in output
