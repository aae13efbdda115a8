"""`airside bench drafts`: what draft tokens bring on a text that repeats itself, and cost on one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airside.cluster.bench.precision import precision_of
from airside.cluster.bench.progress import progress
from airside.cluster.bench.prompts import make_prompts
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median
from airside.cluster.model_source import resolve
from airside.cluster.offline.llm import LLM
from airside.cluster.offline.outputs import RequestOutput
from airside.cluster.sampling_params import SamplingParams
from airside.workers.model_config import load_model_config

DRAFTS = "Drafts, one request: decode, tokens/s"
_SENTENCE_TOKENS = 10  # of most vocabularies


@dataclass(frozen=True, slots=True)
class DraftsLoad:
    """What is asked of the engine, once with drafts and once without, in each round."""

    prompt_tokens: int = 128
    output_tokens: int = 256
    rounds: int = 7


QUICK = DraftsLoad(prompt_tokens=32, output_tokens=40, rounds=1)


@dataclass(slots=True)
class Text:
    """A kind of text, and what was measured of it.

    Args:
        label: as it is shown.
        repeats: the prompt is one sentence over and over, and the likeliest token follows; else the prompt is made-up
            tokens, and what follows is drawn at temperature 1 from a seed, since small models go round when greedy.
    """

    label: str
    repeats: bool
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    verified: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    rounds_unlike: list[int] = field(default_factory=list)
    """In which the tokens were not the same with drafts and without."""

    def prompt(self, load: DraftsLoad, vocab_size: int, seed: int) -> str | list[int]:
        """Of a round; the sentences are as many tokens only roughly."""
        if self.repeats:
            return f"The red fox jumps over {seed} lazy dogs. " * max(2, load.prompt_tokens // _SENTENCE_TOKENS)
        return make_prompts(1, load.prompt_tokens, vocab_size, seed)[0]

    def params(self, load: DraftsLoad, seed: int, drafts_max: int | None) -> SamplingParams:
        """Of a round; drafts_max 0: no drafts, None: as many as the engine is configured for."""
        return SamplingParams(
            temperature=0 if self.repeats else 1,
            top_k=0,
            top_p=1,
            min_p=0,
            seed=seed,
            max_tokens=load.output_tokens,
            ignore_eos=True,
            drafts_max=drafts_max,
        )


def bench_drafts(model: str, load: DraftsLoad, options: Mapping[str, Any]) -> Report:
    """Measures one engine, with and without drafts in turns, so that what a machine does over time meets both.

    Args:
        options: arguments of `LLM` beside the model. Drafts are by n-gram and prefix caching is off unless they say
            otherwise.
    """
    path = resolve(model, print)
    config = load_model_config(path)
    precision = precision_of(config, options)
    drafts = {"method": "ngram", **options.get("drafts", {})}
    texts = [Text("repeats itself", repeats=True), Text("does not", repeats=False)]
    with progress(load.rounds * len(texts) + 2) as advance:
        advance("loading the model")
        with LLM(str(path), **{"enable_prefix_caching": False, **options, "drafts": drafts}) as llm:
            advance("warming up")
            for text in texts:
                _measure_round(llm, text, load, config.vocab_size, number=-1)
            texts = [Text(text.label, text.repeats) for text in texts]
            for number in range(load.rounds):
                for text in texts:
                    advance(f"round {number + 1} of {load.rounds}: a text that {text.label}")
                    _measure_round(llm, text, load, config.vocab_size, number)
    return Report(
        f"airside bench drafts: {model}, {precision}",
        {"model": model, **asdict(precision), "options": {**options, "drafts": drafts}, **asdict(load)},
        [_table(texts)],
        [Chart(DRAFTS, "text", "ratio")],
        {f"{text.label}: {kind}": getattr(text, kind) for text in texts for kind in ("plain", "drafted")},
        None,
        [
            f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens; median of {load.rounds}; "
            f"{drafts['method']}",
            *_unlike(texts),
        ],
    )


def _measure_round(llm: LLM, text: Text, load: DraftsLoad, vocab_size: int, number: int) -> None:
    """Once with drafts and once without; which comes first changes from round to round."""
    prompt, seed = text.prompt(load, vocab_size, number), number + 1
    outputs: dict[bool, RequestOutput] = {}
    for with_drafts in (number % 2 == 0, number % 2 != 0):
        params = text.params(load, seed, None if with_drafts else 0)
        (outputs[with_drafts],) = llm.generate([prompt], params)
    if len(outputs[True].token_ids) != load.output_tokens:
        raise RuntimeError(f"fewer tokens than asked: {outputs[True].finish_reason}: {outputs[True].detail}")
    if outputs[True].token_ids != outputs[False].token_ids:
        text.rounds_unlike.append(number + 1)
    text.plain.append((load.output_tokens - 1) / outputs[False].timings.decode_s)
    text.drafted.append((load.output_tokens - 1) / outputs[True].timings.decode_s)
    text.verified.append(outputs[True].usage.draft_tokens)
    text.accepted.append(outputs[True].usage.accepted_tokens)


def _table(texts: list[Text]) -> Table:
    columns = [
        Column("text", "text that"),
        Column("plain", "without drafts"),
        Column("drafted", "with drafts"),
        Column("ratio", "ratio", 3),
        Column("lowest", "lowest of a round", 3),
        Column("verified", "drafts of an output", 0),
        Column("accepted", "accepted", 0),
        Column("same", "same tokens"),
    ]
    table = Table(DRAFTS, columns)
    for text in texts:
        ratios = [drafted / plain for drafted, plain in zip(text.drafted, text.plain, strict=True)]
        table.add(
            text=text.label,
            plain=median(text.plain),
            drafted=median(text.drafted),
            ratio=median(ratios),
            lowest=min(ratios),
            verified=float(median(text.verified)),
            accepted=float(median(text.accepted)),
            same="no" if text.rounds_unlike else "yes",
        )
    return table


def _unlike(texts: list[Text]) -> list[str]:
    return [
        f"WRONG: of the text that {text.label}, drafts changed the tokens of rounds {text.rounds_unlike}"
        for text in texts
        if text.rounds_unlike
    ]
