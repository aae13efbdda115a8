"""The offline `LLM`: the same engine, driven from Python, without Ray and without an open port.

It starts a controller, the ranks and (for image models) a vision worker as children, and is itself their one front
end: it checks, tokenizes and detokenizes with the gateway's own parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from airside.cluster.config.schema import Config
from airside.cluster.launch_plan import LaunchPlan, Machine, Run
from airside.cluster.local_processes import LocalProcesses
from airside.cluster.model_source import resolve
from airside.cluster.offline.session import OfflineError, Session
from airside.controller.gateway import request_checks as checks
from airside.controller.gateway.errors import invalid
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import messages as msg
from airside.workers.model_config import load_model_config

START_TIMEOUT_S = 180.0

Prompt = str | Sequence[int]

_STOP_FIELDS = {
    # of SamplingParams: as `airside.v1.Stop` calls it
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "token_ids",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; None means the checkpoint's default. Fields as in `airside.v1`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Sequence[int] = ()

    def to_proto(self) -> tuple[pb.Sampling, pb.Stop]:
        """The same as the public messages, with only those fields set that were given.

        Raises:
            RequestError: a value that is of another type, or outside its type's range.
        """
        sampling, stop = pb.Sampling(), pb.Stop()
        for name, value in dataclasses.asdict(self).items():
            if value is None:
                continue
            block: Any = stop if name in _STOP_FIELDS else sampling  # Any: one of two message classes
            try:
                block.MergeFrom(type(block)(**{_STOP_FIELDS.get(name, name): value}))
            except (TypeError, ValueError) as error:
                raise invalid(name, f"is {value!r}: {error}") from error
        return sampling, stop


@dataclass(slots=True)
class RequestOutput:
    """What one prompt led to. Times are seconds; `time_to_first_token_s` counts from the call of `generate`."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    detail: str = ""
    seed: int = 0
    prompt_tokens: int = 0
    image_tokens: int = 0
    preemptions: int = 0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0


class LLM:
    """A model, loaded and ready. Its processes end with the thread that made it.

    Args:
        model: "demo", a checkpoint folder, a .gguf file or a Hugging Face id.
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_model_len: the longest prompt plus output; None: all the model has.
        vision_workers: image preprocessing processes; ignored for text models.
        engine: keys of the YAML file's `engine` block, e.g. tensor_parallel_size=2.

    Raises:
        pydantic.ValidationError, LaunchError, ModelSourceError: the arguments do not fit, and why.
        OfflineError: a process did not come up.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        vision_workers: int = 1,
        **engine: Any,  # Any: checked by the configuration's model
    ) -> None:
        config = _offline_config(model, dtype, max_model_len, vision_workers, engine)
        path = resolve(config.model.source, print)
        model_config = load_model_config(path)
        self._processes = LocalProcesses()
        try:
            run = Run(secrets.token_hex(4), self._processes.run_dir)
            machine = Machine("local", os.cpu_count() or 1, 0 if config.engine.device == "cpu" else _num_gpus())
            plan = LaunchPlan(config, model_config, path, run, machine, port=0)
            self._text = TextModel.load(str(path))
            self._limits = checks.ImageLimits(
                self._text.image_mark_id,
                self._text.image_mark,
                config.vision.limits.max_images_per_prompt,
                config.vision.limits.max_bytes,
            )
            self._session = Session(plan.run.endpoint, self._processes)
            self._start(plan)
            self._state = self._session.await_ready(START_TIMEOUT_S)
        except BaseException:
            self._processes.stop()
            raise
        self._seq_ids = itertools.count(secrets.randbits(31) << 32)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        images: Sequence[Sequence[bytes]] | None = None,
    ) -> list[RequestOutput]:
        """Computes all prompts, as many at once as fit, and returns one output per prompt, in order.

        Args:
            prompts: texts, or token ids.
            params: one for all, or one per prompt.
            images: per prompt, the bytes of its image files in the order of its marks.

        Raises:
            RequestError: a prompt or a parameter is not valid; nothing was computed.
            OfflineError: a process of the engine is gone.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        files = images if images is not None else [()] * len(prompts)
        requests = [self._request(*parts, index) for index, parts in enumerate(zip(prompts, each, files, strict=True))]
        self._session.hello()
        outputs: dict[int, RequestOutput] = {}
        for request, _ in requests:
            token_ids = np.frombuffer(request.token_ids, "<i4").tolist()
            outputs[request.seq_id] = RequestOutput(prompt_token_ids=token_ids, seed=request.seed)
        unfinished = set(outputs)
        try:
            for request, attachments in requests:
                self._session.send(dataclasses.replace(request, arrival=time.time()), attachments)
            self._collect(outputs, unfinished)
        except BaseException:
            self._abandon(unfinished)
            raise
        for output in outputs.values():
            detokenizer = self._text.detokenizer()
            output.text = detokenizer.push(output.token_ids) + detokenizer.flush()
        return list(outputs.values())

    def stats(self) -> dict[str, float]:
        """The engine's gauges, by their names in `airside.v1.Gauges`."""
        return self._session.ask(msg.GaugesQuery, msg.Gauges).gauges

    def close(self) -> None:
        """Ends the engine's processes and frees what they held. Safe to call twice."""
        self._session.close()
        self._processes.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, plan: LaunchPlan) -> None:
        self._processes.start("controller", plan.controller())
        for worker in plan.workers(group=1):
            self._processes.start(worker.name, worker)
        for number in range(plan.vision_replicas):
            vision_worker = plan.vision_worker(number)
            self._processes.start(vision_worker.name, vision_worker)

    def _request(
        self, prompt: Prompt, params: SamplingParams, files: Sequence[bytes], index: int
    ) -> tuple[msg.AddRequest, list[bytes]]:
        where = f"prompts[{index}]"
        sampling_proto, stop_proto = params.to_proto()
        sampling = checks.check_sampling(sampling_proto, self._text.defaults)
        max_model_len = self._state.max_model_len
        stop = checks.check_stop(stop_proto, self._text.end_ids, self._text.vocab_size, max_model_len)
        attachments = checks.check_images(
            [pb.Image(data=file) for file in files], [f"images[{index}][{i}]" for i in range(len(files))], self._limits
        )
        token_ids = self._text.encode(prompt, True).ids if isinstance(prompt, str) else list(prompt)
        checks.check_in_vocabulary(where, token_ids, self._text.vocab_size)
        checks.check_length(where, len(token_ids), max_model_len)
        seq_id = next(self._seq_ids)
        request = msg.AddRequest(
            seq_id=seq_id,
            request_id=str(seq_id),
            token_ids=np.asarray(token_ids, "<i4").tobytes(),
            image_positions=checks.check_marks(where, token_ids, len(files), self._limits),
            arrival=0.0,
            priority=0,
            deadline=None,
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=stop.token_ids,
            **dataclasses.asdict(sampling),
        )
        return request, attachments

    def _collect(self, outputs: dict[int, RequestOutput], unfinished: set[int]) -> None:
        """Receives until every output has its end."""
        while unfinished:
            match self._session.receive():
                case msg.OutputBatch() as batch:
                    unfinished -= _take(batch, outputs)
                case msg.Rejected() as rejected if rejected.seq_id in unfinished:
                    outputs[rejected.seq_id].finish_reason = "rejected"
                    outputs[rejected.seq_id].detail = f"{rejected.code}: {rejected.detail}"
                    unfinished.discard(rejected.seq_id)

    def _abandon(self, seq_ids: set[int]) -> None:
        """Nobody waits for these any more: an interrupted call must not slow down the next."""
        with contextlib.suppress(OfflineError):
            for seq_id in seq_ids:
                self._session.send(msg.AbortSequence(seq_id, "the call of generate was interrupted"))


def _take(batch: msg.OutputBatch, outputs: dict[int, RequestOutput]) -> set[int]:
    """Adds a batch's tokens to their outputs; returns the sequences that ended in it."""
    for seq_id, token_ids in batch.rows():
        if seq_id in outputs:
            outputs[seq_id].token_ids += token_ids
    for row in batch.finished:
        output = outputs.get(row.seq_id)
        if output is not None:
            output.finish_reason, output.detail = row.reason, row.detail
            output.prompt_tokens, output.image_tokens = row.prompt_tokens, row.image_tokens
            output.preemptions = row.preemptions
            output.time_to_first_token_s, output.decode_s = row.time_to_first_token_s, row.decode_s
    return {row.seq_id for row in batch.finished}


def _offline_config(
    model: str, dtype: str, max_model_len: int | None, vision_workers: int, engine: dict[str, Any]
) -> Config:
    model_block = {"source": model, "dtype": dtype, "max_model_len": max_model_len or "auto"}
    unbounded = {"max_queued_requests": 2**30, "max_queued_tokens": 2**40}
    return Config.model_validate(
        {
            "model": model_block,
            "engine": {"limits": unbounded, **engine},
            "vision": {"replicas": vision_workers, "max_replicas": max(1, vision_workers)},
        }
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
