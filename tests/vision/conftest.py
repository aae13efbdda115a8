"""A tiny Idefics3 checkpoint (processor side only), the pictures, and the check that no segment is left behind."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from airside.proto.channel import Envelope, Hub
from airside.proto.messages import Credit, Heartbeat, Message, VisionHello
from airside.vision_workers.fetch.download import FetchRules
from airside.vision_workers.fetch.fetcher import Fetcher
from tests.vision.fetching import Fetching

M = TypeVar("M", bound=Message)

TILE_SIDE = 32
IMAGE_SEQ_LEN = 4  # (32 / 8)^2 patches, shuffled by 2
SPLIT_SIDE = 4 * TILE_SIDE
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SHM = Path("/dev/shm")


def make_tokenizer(marks: list[str]) -> Tokenizer:
    """Bytes, `marks`, and one merge that matters: two newlines are one token, as in real vocabularies."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["a\n\na\n\nb\n\nb\n\n"], trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return tokenizer


def make_checkpoint(folder: Path, *, splitting: bool, marks: list[str]) -> Path:
    """Writes what an Idefics3 checkpoint says about pictures, as transformers itself writes it."""
    tokenizer = make_tokenizer(marks)
    image_processor = Idefics3ImageProcessorPil(
        do_image_splitting=splitting,
        size={"longest_edge": SPLIT_SIDE if splitting else TILE_SIDE},
        max_image_size={"longest_edge": TILE_SIDE},
    )
    processor = Idefics3Processor(
        image_processor, PreTrainedTokenizerFast(tokenizer_object=tokenizer), image_seq_len=IMAGE_SEQ_LEN
    )
    processor.save_pretrained(folder)
    config = {
        "model_type": "idefics3",
        "image_token_id": tokenizer.token_to_id("<image>"),
        "scale_factor": 2,
        "vision_config": {"patch_size": 8, "image_size": TILE_SIDE},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def splitting_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows_and_cols = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    return make_checkpoint(tmp_path_factory.mktemp("splitting"), splitting=True, marks=MARKS + rows_and_cols)


@pytest.fixture(scope="session")
def single_tile_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("single"), splitting=False, marks=MARKS)


@pytest.fixture(autouse=True)
def _no_segment_left() -> Iterator[None]:
    yield
    assert not list(SHM.glob(f"airside-vtest-{os.getpid()}-*"))  # others may be testing at the same time


class Script:
    """The controller's side of the bus, played by a test."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._inbox: deque[Envelope] = deque()
        self._peer = ""

    def expect(self, kind: type[M]) -> M:
        """The next message of the worker, heartbeats apart; fails the test when it is of another kind."""
        message = self.next()
        assert isinstance(message, kind), f"{message} where a {kind.__name__} was due"
        return message

    def next(self, *, heartbeats: bool = False) -> Message:
        """The next message of the worker; heartbeats are passed over unless asked for."""
        return self._next(heartbeats).message

    def next_with_files(self) -> tuple[Message, list[bytes]]:
        """The next message of the worker but heartbeats, and the files that it brings."""
        envelope = self._next(heartbeats=False)
        return envelope.message, [bytes(file) for file in envelope.attachments]

    def _next(self, heartbeats: bool) -> Envelope:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            while self._inbox:
                envelope = self._inbox.popleft()
                if heartbeats or not isinstance(envelope.message, Heartbeat):
                    return envelope
            for envelope in self.hub.receive(200):
                self._peer = envelope.peer
                self._inbox.append(envelope)
        raise AssertionError("the worker says nothing")

    def says_no_more(self) -> bool:
        """Whether no message but heartbeats came before this call."""
        self._inbox.extend(self.hub.receive(0))
        return all(isinstance(envelope.message, Heartbeat) for envelope in self._inbox)

    def greet(self) -> VisionHello:
        """Takes the worker's hello and its first credits."""
        hello = self.expect(VisionHello)
        assert self.expect(Credit).jobs > 1
        return hello

    def send(self, message: Message, data: bytes | None = None) -> None:
        """To the worker that spoke last."""
        assert self.hub.send(self._peer, message, [] if data is None else [memoryview(data)])


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="vtest-") as folder:  # pytest's own paths are too long for a socket
        yield f"ipc://{folder}/bus"


@pytest.fixture
def script(endpoint: str) -> Iterator[Script]:
    with Hub(endpoint) as hub:
        yield Script(hub)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(opened: ExitStack, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Fetching]]:
    """Makes a fetcher; after the test, no log line has a URL's query."""
    caplog.set_level("DEBUG")

    def make(fetch_rules: FetchRules | None, **bounds: int) -> Fetching:
        fetcher = Fetcher(fetch_rules, **bounds)
        opened.callback(fetcher.close)
        return Fetching(fetcher)

    yield make
    assert "sekrit" not in caplog.text
