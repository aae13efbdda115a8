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
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from airside.cluster.config.schema import Config
from airside.cluster.environment import cache_folder
from airside.cluster.gpus import count_gpus
from airside.cluster.image_source import ImageSource, to_image
from airside.cluster.launch_plan import LaunchPlan, Machine, Run
from airside.cluster.local_processes import LocalProcesses
from airside.cluster.model_source import resolve
from airside.cluster.offline.generation import Generation, Generations
from airside.cluster.offline.outputs import RequestOutput, Score
from airside.cluster.offline.session import OfflineError, Session
from airside.cluster.sampling_params import SamplingParams
from airside.controller.gateway import request_checks as checks
from airside.controller.gateway.errors import invalid
from airside.controller.gateway.grammar_check import GrammarChecker
from airside.controller.gateway.image_sources import read_images
from airside.controller.gateway.prompt import Prompt, hash_images
from airside.controller.gateway.terms import TermsReader
from airside.controller.gateway.text_model import TextModel
from airside.proto import messages as msg
from airside.proto.abort_cause import AbortCause
from airside.workers.model_config import load_model_config
from airside.workers.weights.load_times import START_UP

START_TIMEOUT_S = 180.0

Text = str | Sequence[int]
"""A text, or its token ids."""

_DEFAULTS = SamplingParams()


class LLM:
    """A model, loaded and ready. Its processes end with the thread that made it.

    Args:
        model: "demo", a checkpoint folder, a .gguf file or a Hugging Face id.
        dtype: "auto", "bfloat16", "float16" or "float32".
        quantization: "none", "int8" or "gguf": the YAML file's `model.quantization`.
        max_model_len: the longest prompt plus output; None: all the model has.
        packed_cache: whether packed weights of earlier starts are used, and kept for later ones.
        vision_workers: image preprocessing processes; ignored for text models.
        media: keys of the YAML file's `vision.media` block, for pictures that are named by URL.
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
        quantization: str = "none",
        max_model_len: int | None = None,
        packed_cache: bool = True,
        vision_workers: int = 1,
        media: dict[str, Any] | None = None,
        **engine: Any,  # Any: checked by the configuration's model
    ) -> None:
        model_block = {
            "source": model,
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len or "auto",
            "packed_cache": packed_cache,
        }
        config = _offline_config(model_block, vision_workers, media or {}, engine)
        path = resolve(config.model.source, print)
        model_config = load_model_config(path)
        with contextlib.ExitStack() as opened:
            self._processes = LocalProcesses()
            opened.callback(self._processes.stop)
            run = Run(secrets.token_hex(4), self._processes.run_dir)
            machine = Machine("local", os.cpu_count() or 1, count_gpus(), packed_cache=cache_folder() / "packed")
            plan = LaunchPlan(config, model_config, path, run, machine, port=0)
            gateway = plan.gateways()[0]
            self._text = TextModel.of(gateway)
            self._terms = TermsReader(gateway, self._text)
            self._grammars = GrammarChecker(gateway, self._text)
            opened.callback(self._grammars.close)
            self._limits = checks.ImageLimits(
                self._text.image_mark_id,
                self._text.image_mark,
                config.vision.limits.max_images_per_prompt,
                config.vision.limits.max_bytes,
                config.vision.media.allow_urls,
                self._text.picture_ids,
            )
            self._session = Session(plan.run.endpoint, self._processes)
            opened.callback(self._session.close)
            self._start(plan)
            self._state = self._session.await_ready(START_TIMEOUT_S)
            self._opened = opened.pop_all()
        self._seq_ids = itertools.count(secrets.randbits(31) << 32)

    def generate(
        self,
        prompts: Sequence[Text],
        params: SamplingParams | Sequence[SamplingParams] = _DEFAULTS,
        images: Sequence[Sequence[ImageSource]] | None = None,
    ) -> list[RequestOutput]:
        """Computes all prompts, as many at once as fit, and returns one output per prompt, in order.

        Args:
            prompts: texts, or token ids.
            params: one for all, or one per prompt.
            images: per prompt, its pictures in the order of its marks: the bytes of a file, its path, a `data:` URI,
                or a URL, which `media` must allow.

        Raises:
            RequestError: a prompt or a parameter is not valid; nothing was computed.
            OSError: an image's path cannot be read; the same.
            OfflineError: a process of the engine is gone.
        """
        arrival = time.time()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        files = images if images is not None else [()] * len(prompts)
        _check_one_each("params", each, prompts)
        _check_one_each("images", files, prompts)
        generations = [
            self._generation(f"prompts[{index}]", *parts, f"images[{index}]", arrival)
            for index, parts in enumerate(zip(prompts, each, files, strict=True))
        ]
        self._run(generations)
        return [generation.output for generation in generations]

    def score(self, prompt: Text, continuation: Text) -> Score:
        """How likely the model finds a continuation of a prompt; nothing is sampled. Raises as `score_all`."""
        return self.score_all([prompt], [continuation])[0]

    def score_all(self, prompts: Sequence[Text], continuations: Sequence[Text]) -> list[Score]:
        """The same for many prompts with one continuation each, together.

        Texts are tokenized apart from one another: a continuation begins with a token of its own.

        Raises:
            RequestError: a prompt or a continuation is not valid, or both together are too long.
            OfflineError: a process of the engine is gone, or a sequence did not reach its end.
        """
        _check_one_each("continuations", continuations, prompts)
        golden = [self._encode(text, add_special_tokens=False) for text in continuations]
        for index, token_ids in enumerate(golden):
            if not token_ids:
                raise invalid(f"continuations[{index}]", "is empty; send at least one token")
        params = [
            SamplingParams(golden_tokens=token_ids, force_golden=True, logprobs=0, ignore_eos=True)
            for token_ids in golden
        ]
        scores = []
        for token_ids, output in zip(golden, self.generate(prompts, params), strict=True):
            if output.token_ids != token_ids:
                raise OfflineError(f"a score ended early: {output.finish_reason}: {output.detail}")
            scores.append(Score(token_ids, [row.logprob for row in output.logprobs]))
        return scores

    def stats(self) -> dict[str, float]:
        """The engine's gauges, by their names in `airside.v1.Gauges`."""
        return self._session.ask(msg.GaugesQuery, msg.Gauges).gauges

    def start_up(self) -> dict[str, float]:
        """What the start of rank 0 took, by its parts: seconds."""
        lines = self._processes.log("worker-0").splitlines()
        parts = next((line.split(START_UP, 1)[1] for line in lines if START_UP in line), "")
        return {name.removesuffix("_s"): float(value) for name, value in (word.split("=") for word in parts.split())}

    def close(self) -> None:
        """Ends the engine's processes and frees what they held. Safe to call twice."""
        self._opened.close()

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

    def _generation(
        self, where: str, text: Text, params: SamplingParams, given: Sequence[ImageSource], images: str, arrival: float
    ) -> Generation:
        """One prompt, checked. `where` and `images` name it and its pictures in errors."""
        request, max_model_len = params.to_request(), self._state.max_model_len
        terms = self._terms.read(request, max_model_len, arrival)
        fields = [f"{images}[{i}]" for i in range(len(given))]
        sources = read_images([to_image(image) for image in given], fields, self._limits)
        token_ids = self._encode(text, add_special_tokens=True)
        checks.check_in_vocabulary(where, token_ids, self._text.vocab_size)
        checks.check_length(where, len(token_ids), max_model_len)
        if terms.drafts.golden_mode == "force":
            checks.check_golden_fits(len(terms.drafts.golden_tokens), len(token_ids), max_model_len)
        if request.HasField("structure"):
            terms = dataclasses.replace(terms, grammar=self._grammars.check_blocking(request.structure))
        marks = checks.check_marks(where, token_ids, len(given), self._limits)
        prompt = Prompt(token_ids, marks, sources.files, sources.urls, hash_images(sources.files))
        seq_ids = [next(self._seq_ids) for _ in range(terms.n)]
        return Generation(seq_ids, terms, prompt, self._text, self._session.send)

    def _encode(self, text: Text, add_special_tokens: bool) -> list[int]:
        return self._text.encode(text, add_special_tokens).ids if isinstance(text, str) else list(text)

    def _run(self, generations: Sequence[Generation]) -> None:
        """Until every sequence has its end."""
        self._session.hello()
        running = Generations(generations)
        try:
            for generation in generations:
                for request in generation.add_requests():
                    self._session.send(request, generation.prompt.images)
            while running.unfinished:
                running.take(self._session.receive())
        except BaseException:
            self._abandon(running.unfinished)
            raise

    def _abandon(self, seq_ids: Iterable[int]) -> None:
        """Nobody waits for these any more: an interrupted call must not slow down the next."""
        with contextlib.suppress(OfflineError):
            for seq_id in seq_ids:
                self._session.send(msg.AbortSequence(seq_id, AbortCause.CALL_INTERRUPTED))


def _check_one_each(name: str, values: Sequence[object], prompts: Sequence[object]) -> None:
    if len(values) != len(prompts):
        raise invalid(name, f"has {len(values)} entries for {len(prompts)} prompts; send one for each")


def _offline_config(
    model: dict[str, Any],
    vision_workers: int,
    media: dict[str, Any],
    engine: dict[str, Any],
) -> Config:
    limits = {"max_queued_requests": 2**30, "max_queued_tokens": 2**40, **engine.get("limits", {})}
    engine = {"max_num_mixed_tokens": 2**30, **engine}  # nobody waits for the next token, but for all
    return Config.model_validate(
        {
            "model": model,
            "engine": {**engine, "limits": limits},
            "vision": {
                "autoscaling_config": {"min_replicas": vision_workers, "max_replicas": max(1, vision_workers)},
                "media": media,
            },
        }
    )
