"""Worker processes over the bus: one rank and two, their answers, and how they end."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from airside.proto.channel import Hub
from airside.proto.logprob_record import read_records
from airside.proto.messages import (
    CloseGrammar,
    DropPixels,
    GrammarFailed,
    GrammarReady,
    Heartbeat,
    OpenGrammar,
    PixelsParcel,
    StepResult,
    WorkerFailed,
)
from airside.workers.load import load_runner
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from tests.workers.pictures import make_prompt, picture
from tests.workers.ranks import PATIENCE_S, Ranks, start_ranks
from tests.workers.step_plans import (
    Track,
    plan_step,
    run_tracks,
    run_tracks_ahead,
    scattered_blocks,
    worker_settings,
)

pytestmark = pytest.mark.slow

PROMPTS = [[7, 100, 200, 300, 5], list(range(60, 101)), [9]]
NUM_TOKENS = 10
STEPS_MAX = 5000  # of a tiny model: more than it makes in a few seconds


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """A short path: ipc endpoints must fit in 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="airside-test-") as folder:
        yield Path(folder)


def llama_tracks() -> list[Track]:
    blocks = scattered_blocks(len(PROMPTS), 16)
    return [Track(i, list(prompt), table) for i, (prompt, table) in enumerate(zip(PROMPTS, blocks, strict=True))]


def alone(path: Path, tracks: list[Track], arena: Path = Path("/dev/shm")) -> list[list[int]]:
    """What one rank in this process makes of the tracks, each computed in one piece."""
    runner: ModelRunner = load_runner(worker_settings(str(path)), RankGroup(0, 1), PixelArena(arena))
    runner.allocate(256)
    return run_tracks(runner.execute, tracks, 512, NUM_TOKENS)


@pytest.mark.parametrize(
    ("checkpoint", "world_size"),
    [
        ("llama_path", 1),
        ("llama_path", 2),
        ("untied_llama_path", 2),
        ("odd_vocabulary_path", 2),
    ],
)
def test_ranks_make_the_tokens_of_one(
    checkpoint: str, world_size: int, run_folder: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(checkpoint)
    with start_ranks(path, run_folder, world_size) as ranks:
        hellos = ranks.set_up(num_blocks=48)
        assert [(hello.rank, hello.world_size, hello.group) for hello in hellos] == [
            (rank, world_size, 1) for rank in range(world_size)
        ]
        assert all(hello.num_blocks == 256 for hello in hellos)
        made = ranks.generate(llama_tracks(), chunk=16, num_tokens=NUM_TOKENS)
        assert ranks.shut_down() == [0] * world_size
    assert made == alone(path, llama_tracks())


def test_ranks_that_do_not_sample_are_told_what_a_placeholder_stands_for(llama_path: Path, run_folder: Path) -> None:
    with start_ranks(llama_path, run_folder, 2) as ranks:
        ranks.set_up(num_blocks=48)
        made = run_tracks_ahead(ranks.step, llama_tracks(), 16, NUM_TOKENS)
        assert ranks.shut_down() == [0, 0]
    assert made == alone(llama_path, llama_tracks())


def test_records_are_the_same_from_one_rank_and_two(llama_path: Path, run_folder: Path) -> None:
    def track() -> Track:
        return Track(1, list(PROMPTS[1]), scattered_blocks(1, 16)[0], logprobs=5, prompt_logprobs=2)

    plan = plan_step(0, [track()], [len(PROMPTS[1])])
    runner: ModelRunner = load_runner(worker_settings(str(llama_path)), RankGroup(0, 1), PixelArena())
    runner.allocate(256)
    expected = runner.execute(plan)
    assert expected is not None
    with start_ranks(llama_path, run_folder, 2) as ranks:
        ranks.set_up(num_blocks=48)
        result = ranks.step(plan)
        assert ranks.shut_down() == [0, 0]
    for data, other, count in (
        (result.logprobs, expected.logprobs, 1),
        (result.prompt_logprobs, expected.prompt_logprobs, len(PROMPTS[1]) - 1),
    ):
        for record, twin in zip(read_records(data, count), read_records(other, count), strict=True):
            assert record.top_ids == twin.top_ids
            assert record.logprob == pytest.approx(twin.logprob, abs=1e-4)


def test_a_grammar_is_built_beside_the_steps_and_then_restricts(llama_path: Path, run_folder: Path) -> None:
    track = Track(5, [40, 90, 200], scattered_blocks(1, 16)[0], structured=True)
    with start_ranks(llama_path, run_folder, 2) as ranks:
        ranks.set_up(num_blocks=16)
        assert ranks.hub.send("worker-0", OpenGrammar(4, "{}", b""))
        assert ranks.hub.send("worker-0", OpenGrammar(5, LLMatcher.grammar_from_regex("(yes|no)"), b""))
        peer, failed = ranks.wait_for(GrammarFailed)
        assert isinstance(failed, GrammarFailed)
        assert (peer, failed.seq_id) == ("worker-0", 4)
        assert ranks.wait_for(GrammarReady) == ("worker-0", GrammarReady(5))
        run_tracks(ranks.step, [track], 512, 1)
        assert ranks.hub.send("worker-0", CloseGrammar(5))
        assert ranks.shut_down() == [0, 0]
    tokenizer = Tokenizer.from_file(str(llama_path / "tokenizer.json"))
    assert any(word.startswith(tokenizer.decode(track.made)) for word in ("yes", "no"))


def test_why_a_grammar_failed_is_told_before_the_step_that_it_left_without_a_token(
    llama_path: Path, run_folder: Path
) -> None:
    track = Track(5, [40, 90, 200], scattered_blocks(1, 16)[0], structured=True)
    with start_ranks(llama_path, run_folder, 1) as ranks:
        ranks.set_up(num_blocks=16)
        assert ranks.hub.send("worker-0", OpenGrammar(5, 'start: "a" other\nother: other', b""))
        assert ranks.wait_for(GrammarReady) == ("worker-0", GrammarReady(5))
        run_tracks(ranks.step, [track], 512, 1)
        ranks.send_all(plan_step(1, [track], [1]))
        said = [ranks.wait_for(GrammarFailed, StepResult)[1] for _ in range(2)]
        assert ranks.shut_down() == [0]
    failed, result = said
    assert failed == GrammarFailed(5, "the grammar cannot go on: it allows nothing that could come next")
    assert isinstance(result, StepResult)
    assert np.frombuffer(result.sampled, np.int32).tolist() == [-2]


def test_two_ranks_see_the_same_pictures(idefics3_path: Path, run_folder: Path) -> None:
    arena = Path("/dev/shm")
    name = f"airside-test-{uuid.uuid4().hex[:8]}"
    try:
        prompt = make_prompt(
            idefics3_path, arena, "<image>What is it?<image>", [picture(60, 20, 1), picture(40, 90, 2)], name
        )

        def tracks() -> list[Track]:
            return [Track(1, list(prompt.tokens), scattered_blocks(1, 64)[0], prompt.pixels, prompt.image_places)]

        with start_ranks(idefics3_path, run_folder, 2) as ranks:
            ranks.set_up(num_blocks=64)
            made = ranks.generate(tracks(), chunk=16, num_tokens=NUM_TOKENS)
            assert ranks.shut_down() == [0, 0]
        assert made == alone(idefics3_path, tracks())
    finally:
        for segment in arena.glob(f"{name}-*"):
            segment.unlink()


def test_two_ranks_see_pictures_that_were_sent(idefics3_path: Path, run_folder: Path, tmp_path: Path) -> None:
    pictures = [picture(60, 20, 1), picture(40, 90, 2)]
    prompt = make_prompt(idefics3_path, tmp_path, "<image>What is it?<image>", pictures, "nowhere")

    def tracks() -> list[Track]:
        return [Track(1, list(prompt.tokens), scattered_blocks(1, 64)[0], prompt.pixels, prompt.image_places)]

    with start_ranks(idefics3_path, run_folder, 2) as ranks:
        ranks.set_up(num_blocks=64)
        for ref in prompt.pixels:
            slab = memoryview((tmp_path / ref.segment).read_bytes())[ref.slab :]
            ranks.send_all(PixelsParcel(ref.segment, ref.slab, ref.num_bytes), [slab])
        made = ranks.generate(tracks(), chunk=16, num_tokens=NUM_TOKENS)
        for ref in prompt.pixels:
            ranks.send_all(DropPixels(ref.segment, ref.slab))
        assert ranks.shut_down() == [0, 0]
    assert made == alone(idefics3_path, tracks(), tmp_path)


def test_a_rank_that_is_sent_less_than_it_is_told_fails_and_says_why(llama_path: Path, run_folder: Path) -> None:
    with start_ranks(llama_path, run_folder, 1) as ranks:
        ranks.set_up(num_blocks=8)
        ranks.send_all(PixelsParcel("nowhere", 64, 4096), [memoryview(bytes(4095))])
        _, failed = ranks.wait_for(WorkerFailed)
    assert failed == WorkerFailed(
        0, "PixelsUnreadable: slab 64 of nowhere has 4096 bytes, but came as frames of [4095]"
    )


@pytest.mark.parametrize("busy", [False, True])
def test_every_rank_says_that_it_lives_and_how_large_it_is(llama_path: Path, run_folder: Path, busy: bool) -> None:
    with start_ranks(llama_path, run_folder, 2) as ranks:
        ranks.set_up(num_blocks=8)
        heard: Counter[str] = Counter()
        for step_id in range(STEPS_MAX):
            if busy:  # one step after another, so that rank 0 always has something else to say
                ranks.send_all(plan_step(step_id, [Track(1, [5, 6], [7])], [2]))
            due = StepResult if busy else Heartbeat
            while True:
                peer, message = ranks.wait_for(StepResult, Heartbeat)
                if isinstance(message, Heartbeat):
                    assert message.rss_bytes > 10 * 1024**2
                    heard[peer] += 1
                if isinstance(message, due):
                    break
            if all(heard[name] >= 2 for name in ranks.names):
                return
    raise AssertionError(f"two heartbeats of each rank were due, {heard} came")


def test_a_step_that_fails_is_told_and_ends_the_process(llama_path: Path, run_folder: Path) -> None:
    with start_ranks(llama_path, run_folder, 1) as ranks:
        ranks.set_up(num_blocks=2)
        plan = plan_step(3, [Track(1, [5, 6], [7])], [2])
        ranks.send_all(plan)
        _, failed = ranks.wait_for(WorkerFailed)
        assert failed == WorkerFailed(0, "AssertionError: step 3: no such block")
        assert ranks.processes[0].wait(timeout=PATIENCE_S) == 1


def test_a_checkpoint_that_cannot_be_loaded_is_told(llama_path: Path, run_folder: Path) -> None:
    broken = Path(shutil.copytree(llama_path, run_folder / "broken"))
    (broken / "model.safetensors").unlink()
    with start_ranks(broken, run_folder, 1) as ranks:
        _, failed = ranks.wait_for(WorkerFailed)
        assert isinstance(failed, WorkerFailed)
        assert failed.detail.startswith("CheckpointError: ")
        assert "\n" not in failed.detail
        assert ranks.processes[0].wait(timeout=PATIENCE_S) == 1


def test_when_one_rank_is_lost_the_other_says_so(llama_path: Path, run_folder: Path) -> None:
    with start_ranks(llama_path, run_folder, 2) as ranks:
        ranks.set_up(num_blocks=8)
        ranks.processes[1].kill()
        ranks.processes[1].wait(timeout=PATIENCE_S)
        assert ranks.hub.send("worker-0", plan_step(0, [Track(1, [5, 6], [7])], [2]))
        peer, failed = ranks.wait_for(WorkerFailed)
        assert peer == "worker-0"
        assert isinstance(failed, WorkerFailed)
        assert failed.rank == 0


def test_a_worker_whose_parent_is_gone_exits(llama_path: Path, run_folder: Path) -> None:
    endpoint = f"ipc://{run_folder}/bus"
    settings = worker_settings(str(llama_path), endpoint=endpoint, name="worker-0")
    worker = shlex.join([sys.executable, "-m", "airside.workers", "--settings", settings.to_json()])
    with Hub(endpoint) as hub:
        # The shell starts the worker, says its pid, and lives until its input closes.
        parent = subprocess.Popen(
            ["sh", "-c", f"{worker} & echo $!; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        try:
            Ranks(hub, [parent]).set_up(num_blocks=8)
            parent.communicate("")
            orphan.wait(timeout=PATIENCE_S)
        finally:
            if orphan.is_running():
                orphan.kill()
