"""The engine core, a family and a runner in one process: requests with pictures, as the server would compute them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from airside._core import Engine, EngineConfig, Request, StepPlan
from airside.proto.codec import VERSION, pack_rows
from airside.proto.messages import ImageRow, PixelsRef, decode
from airside.proto.messages import StepPlan as StepPlanMessage
from airside.vision_workers.families.family import Family, ImageShape
from airside.workers.model_runner import ModelRunner
from tests.engine.columns import i32, token_rows
from tests.workers.pictures import write_segment


@dataclass(frozen=True, slots=True)
class Picture:
    """What a vision worker says of a picture."""

    shape: ImageShape
    content_hash: bytes
    pixels: PixelsRef


def prepare(family: Family, arena: Path, image: Image.Image) -> Picture:
    """Its tensors lie in a segment of the folder `arena`, which is named by their content."""
    content_hash = hashlib.blake2b(image.tobytes() + repr(image.size).encode(), digest_size=16).digest()
    pixels = write_segment(arena, content_hash.hex(), family.process(image))
    return Picture(family.shape(*image.size), content_hash, pixels)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: a prompt with one image token per picture, how many tokens to make, which of them are drafts."""

    tokens: list[int]
    pictures: list[Picture]
    num_tokens: int
    golden: list[int] = dataclasses.field(default_factory=list)


class PictureServer:
    """Requests run to their ends. The engine, and with it the prefix cache, lives on from call to call."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, image_token_id: int) -> None:
        self._runner = runner
        self._image_token_id = image_token_id
        self.engine = Engine(config)
        self._num_asked = 0
        self._pictures: dict[int, list[Picture]] = {}

    def generate(self, asked: list[Asked]) -> list[list[int]]:
        """What each makes, in order."""
        first = self._num_asked
        for request in asked:
            self._add(self._num_asked, request)
            self._num_asked += 1
        made: dict[int, list[int]] = {}
        planned: deque[StepPlan] = deque()
        while True:
            while (plan := self.engine.schedule(0.0)) is not None:
                planned.append(plan)
            if not planned:
                break
            self._execute(planned.popleft())
            for output in self.engine.take_outputs():
                for seq_id, tokens in token_rows(output):
                    made.setdefault(seq_id, []).extend(tokens)
        return [made[seq_id] for seq_id in range(first, self._num_asked)]

    def _add(self, seq_id: int, asked: Asked) -> None:
        marks = [place for place, token in enumerate(asked.tokens) if token == self._image_token_id]
        golden = {"golden_tokens": i32(asked.golden), "golden_mode": "draft"} if asked.golden else {}
        request = Request(
            client=0,
            seq_id=seq_id,
            token_ids=i32(asked.tokens),
            image_positions=marks,
            arrival=0.0,
            max_tokens=asked.num_tokens,
            temperature=0.0,
            **golden,
        )
        rejection = self.engine.add(request, 0.0)
        assert rejection is None, rejection.detail
        self._pictures[seq_id] = asked.pictures
        for index, picture in enumerate(asked.pictures):
            shape = picture.shape
            self.engine.set_shape(
                seq_id, index, i32(shape.expansion.tolist()), picture.content_hash, shape.rope_advance
            )
            self.engine.set_ready(seq_id, index)

    def _rows(self, images: list[tuple[int, int, int, int]]) -> list[ImageRow]:
        pictures = [self._pictures[seq_id][index] for seq_id, index, *_ in images]
        return [
            ImageRow(*image, picture.pixels, picture.content_hash)
            for image, picture in zip(images, pictures, strict=True)
        ]

    def _execute(self, plan: StepPlan) -> None:
        lists = self._rows(plan.images), [], [], self._rows([(*image, 0, 0) for image in plan.ahead])
        message = decode(plan.frame(VERSION, StepPlanMessage.kind, *map(pack_rows, lists)))
        assert isinstance(message, StepPlanMessage)
        result = self._runner.execute(message)
        assert result is not None
        self.engine.apply(plan.step_id, result.sampled, 0.0)
        self.engine.check()
