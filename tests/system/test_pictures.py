"""Every picture of the collection through real processes: one verdict, alone or in company, and nobody else notices.

The pictures and what they must look like are those of tests/vision/images; here they meet the whole server.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.system.local_server import Answer, LocalServer, read_failing

pytestmark = pytest.mark.slow

IMAGES = Path(__file__).parent.parent / "vision" / "images"
MANIFEST: list[dict[str, Any]] = json.loads((IMAGES / "manifest.json").read_text())
FILES = [row["file"] for row in MANIFEST]
REFUSED = {row["file"]: row["cause"] for row in MANIFEST if "cause" in row}
EITHER = {row["file"]: row["either"] for row in MANIFEST if "either" in row}
BOMBS = [name for name, cause in REFUSED.items() if cause == "too_many_pixels"]
TINY = [name for name in FILES if name.startswith("tiny_")]
CANARY_TOKENS = 200
GROWTH_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Verdict:
    """What one request comes to: its tokens, or the words of its refusal."""

    token_ids: tuple[int, ...]
    refusal: str = ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, vision={"arena": "256MiB"}) as running:
        yield running


def picture_file(name: str) -> bytes:
    return (IMAGES / name).read_bytes()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def request(*files: bytes) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt="<image>" * len(files) + "What is it?",
        images=[pb.Image(data=data) for data in files],
        sampling=pb.Sampling(temperature=0),
        stop=pb.Stop(max_tokens=4, ignore_eos=True),
        output=pb.Output(logprobs=2),
    )


def ask(server: LocalServer, *files: bytes) -> Answer:
    return Answer(list(server.inference.Generate(request(*files), timeout=120)))


def judge(server: LocalServer, *files: bytes) -> Verdict:
    try:
        return Verdict(tuple(ask(server, *files).token_ids))
    except grpc.RpcError:
        pass
    events, error = read_failing(server.inference.Generate(request(*files), timeout=120))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    assert not any(event.HasField("delta") for event in events), "a token before the refusal"
    return Verdict((), error.details())


def looks(answer: Answer) -> tuple[Any, ...]:
    """All that tells one picture from another: tokens, how likely they and others were, and the prompt's length."""
    records = [record.SerializeToString() for record in answer.logprobs]
    assert records
    return (answer.token_ids, records, answer.finished.usage.prompt_tokens)


def pids(server: LocalServer) -> dict[str, int]:
    names = ["controller", *(gateway.name for gateway in server.plan.gateways())]
    names += [worker.name for worker in server.plan.workers(group=1)] + [server.plan.vision_worker(0).name]
    return {name: server.processes.pid(name) for name in names}


@pytest.fixture(scope="module")
def alone(server: LocalServer) -> dict[str, Verdict]:
    """Each file's verdict when nothing else is asked."""
    return {name: judge(server, picture_file(name)) for name in FILES}


def test_each_is_answered_or_refused_with_its_cause(alone: dict[str, Verdict]) -> None:
    for name, verdict in alone.items():
        if name in REFUSED:
            assert not verdict.token_ids, name
            assert REFUSED[name] in verdict.refusal, (name, verdict.refusal)
            assert "image 0" in verdict.refusal or "images[0]" in verdict.refusal, verdict.refusal
        elif name in EITHER:
            assert verdict.token_ids or any(cause in verdict.refusal for cause in EITHER[name]), verdict.refusal
        else:
            assert len(verdict.token_ids) == 4, (name, verdict.refusal)


def test_a_refusal_names_limit_and_size(alone: dict[str, Verdict]) -> None:
    for name in BOMBS:
        assert "64000000" in alone[name].refusal, alone[name].refusal
    assert "60000x60000" in alone["bomb_header.png"].refusal, alone["bomb_header.png"].refusal


def test_eight_at_once_beside_a_text_stream_change_nothing(server: LocalServer, alone: dict[str, Verdict]) -> None:
    before = pids(server)
    canary = {"prompt": "The small red circle", "sampling": pb.Sampling(temperature=0)}
    canary["stop"] = pb.Stop(max_tokens=CANARY_TOKENS, ignore_eos=True)
    quiet = server.generate(timeout_s=120, **canary)
    with ThreadPoolExecutor(9) as pool:
        singing = pool.submit(server.generate, timeout_s=240, **canary)
        together = dict(zip(FILES, pool.map(lambda name: judge(server, picture_file(name)), FILES), strict=True))
        assert singing.result().token_ids == quiet.token_ids
    assert together == alone
    assert not server.processes.exited()
    assert pids(server) == before


def test_the_verdict_is_the_same_as_second_of_three(server: LocalServer, alone: dict[str, Verdict]) -> None:
    ordinary = [png(Image.linear_gradient("L").resize(size)) for size in ((40, 30), (64, 64))]

    def mixed(name: str) -> Verdict:
        return judge(server, ordinary[0], picture_file(name), ordinary[1])

    with ThreadPoolExecutor(4) as pool:
        verdicts = dict(zip(FILES, pool.map(mixed, FILES), strict=True))
    for name, verdict in verdicts.items():
        if alone[name].refusal:
            expected = alone[name].refusal.replace("image 0", "image 1").replace("images[0]", "images[1]")
            assert verdict.refusal == expected, name
        else:
            assert len(verdict.token_ids) == 4, (name, verdict.refusal)


@pytest.mark.parametrize("orientation", [2, 3, 4, 6, 8])
def test_a_turned_photo_is_its_upright_twin(server: LocalServer, orientation: int) -> None:
    data = picture_file(f"exif_orient_{orientation}.jpg")
    with Image.open(io.BytesIO(data)) as image:
        turned = png(ImageOps.exif_transpose(image))
        pixels = np.asarray(image)
    lying = png(Image.fromarray(pixels))
    answer = looks(ask(server, data))
    assert answer == looks(ask(server, turned))
    assert answer != looks(ask(server, lying))


@pytest.mark.parametrize("name", ["rgba_hidden_noise", "rgba_half"])
def test_transparency_shows_the_background(server: LocalServer, name: str) -> None:
    data = picture_file(f"{name}.png")
    with Image.open(io.BytesIO(data)) as image:
        dropped = png(image.convert("RGBA").convert("RGB"))
    answer = looks(ask(server, data))
    assert answer == looks(ask(server, picture_file(f"refs/{name}.png")))
    assert answer != looks(ask(server, dropped))


def test_another_background_is_another_picture(server: LocalServer, tmp_path: Path) -> None:
    data = picture_file("rgba_half.png")
    with Image.open(io.BytesIO(data)) as image:
        canvas = Image.new("RGBA", image.size, "black")
        on_black = png(Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB"))
    on_white = looks(ask(server, data))
    with LocalServer(make_idefics3(tmp_path / "idefics3"), vision={"background": "#000000"}) as dark:
        answer = looks(ask(dark, data))
        assert answer == looks(ask(dark, on_black))
        assert answer != on_white


def test_bombs_take_no_memory_and_a_legal_picture_follows(server: LocalServer) -> None:
    processes = {name: psutil.Process(pid) for name, pid in pids(server).items()}
    judge(server, picture_file(BOMBS[0]))  # what the first refusal imports
    for process in processes.values():
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak starts anew
    before = {name: process.memory_info().rss for name, process in processes.items()}
    with ThreadPoolExecutor(16) as pool:
        verdicts = list(pool.map(lambda name: judge(server, picture_file(name)), BOMBS * 4))
    assert all("too_many_pixels" in verdict.refusal for verdict in verdicts)
    growth = {name: peak_bytes(process.pid) - before[name] for name, process in processes.items()}
    assert max(growth.values()) < GROWTH_MAX_BYTES, growth
    assert len(judge(server, png(Image.linear_gradient("L").resize((4096, 4096)))).token_ids) == 4
    assert not server.processes.exited()


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_two_hundred_bad_ones_leave_nothing_behind(server: LocalServer) -> None:
    worker = psutil.Process(server.processes.pid(server.plan.vision_worker(0).name))
    bad = [name for name in REFUSED if name not in BOMBS]

    def send(count: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: judge(server, picture_file(bad[number % len(bad)])), range(count)))

    send(50)
    fds, rss = worker.num_fds(), worker.memory_info().rss
    send(200)
    assert worker.num_fds() <= fds
    assert worker.memory_info().rss < 1.05 * rss
    assert server.gauges().kv_blocks_live == 0


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_picture_is_what_it_is_as_rgb(server: LocalServer, name: str) -> None:
    """Sides of one and three pixels are no channel axes: the file's answer is that of its pixels in another format."""
    with Image.open(IMAGES / name) as image:
        file = io.BytesIO()
        image.convert("RGB").save(file, "BMP")
    assert looks(ask(server, picture_file(name))) == looks(ask(server, file.getvalue()))
