"""Asks held-out questions of every kind and prints a table: of plain transformers, or of a running server.

    python -m airside.cluster.demo_model.training.evaluate [--model FOLDER] [--per-kind 100]
    python -m airside.cluster.demo_model.training.evaluate --address 127.0.0.1:50051

An answer counts if it is the expected one, word for word, greedily chosen.
"""

from __future__ import annotations

import argparse
import io
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from airside.cluster.client import Client
from airside.cluster.demo_model.checkpoint import demo_checkpoint
from airside.cluster.demo_model.training.exam import Case, cases
from airside.cluster.demo_model.training.questions import Kind
from airside.cluster.demo_model.training.scans import load_scans
from airside.cluster.sampling_params import SamplingParams

ANSWER_TOKENS = 12
SEED = 2026
AT_ONCE = 16

Answer = Callable[[list[Case]], list[str]]


@dataclass(frozen=True, slots=True)
class Result:
    """How one kind fared: `constant` questions would be right if the most frequent answer were always given."""

    kind: Kind
    asked: int
    right: int
    constant: int
    wrong: list[tuple[Case, str]]


def examine(answer: Answer, kinds: list[Kind], per_kind: int, seed: int = SEED) -> list[Result]:
    """Asks `per_kind` held-out questions of each kind."""
    scans = load_scans()
    results = []
    for kind in kinds:
        asked = cases(kind, per_kind, scans, seed)
        said = answer(asked)
        wrong = [(c, text) for c, text in zip(asked, said, strict=True) if text.strip() != c.question.answer]
        [(_, constant)] = Counter(case.question.answer for case in asked).most_common(1)
        results.append(Result(kind, len(asked), len(asked) - len(wrong), constant, wrong))
    return results


def of_server(address: str) -> Answer:
    """Answers of a running server, through `Generate`."""

    def answer(asked: list[Case]) -> list[str]:
        with Client(address) as client, ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda case: _generated(client, case), asked))

    return answer


def _generated(client: Client, case: Case) -> str:
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    events = client.generate(case.prompt, case.pictures, params)
    return "".join(event.delta.text for event in events if event.WhichOneof("event") == "delta")


def of_transformers(folder: Path) -> Answer:
    """Answers of plain transformers, in bfloat16."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def some(asked: list[Case]) -> list[str]:
        images = [[Image.open(io.BytesIO(data)).convert("RGB") for data in case.pictures] for case in asked]
        inputs = processor(text=[case.prompt for case in asked], images=images, padding=True, return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        made = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        said: list[str] = processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return said

    return lambda asked: [text for i in range(0, len(asked), AT_ONCE) for text in some(asked[i : i + AT_ONCE])]


def table(results: list[Result]) -> str:
    """Markdown: kind, asked, right in percent, what always giving the most frequent answer would have made."""
    rows = ["| question | asked | right | always the same answer |", "|---|---|---|---|"]
    rows += [
        f"| {result.kind} | {result.asked} | {result.right / result.asked:.1%} | {result.constant / result.asked:.0%} |"
        for result in results
    ]
    return "\n".join(rows)


def main() -> None:
    """Prints the table and some wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an assembled checkpoint; by default the demo model")
    parser.add_argument("--address", help="host:port of a server of the demo model")
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--kinds", nargs="*", default=[kind.name.lower() for kind in Kind])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wrong", type=int, default=2, help="wrong answers to show of each kind")
    options = parser.parse_args()
    begun = time.monotonic()
    answer = of_server(options.address) if options.address else of_transformers(options.model or demo_checkpoint(print))
    kinds = [Kind[name.upper()] for name in options.kinds]
    results = examine(answer, kinds, options.per_kind, options.seed)
    print(table(results))
    for result in results:
        for case, said in result.wrong[: options.wrong]:
            print(f"{result.kind}: {case.question.text} {case.question.answer!r}, said {said!r}, sizes {case.sizes}")
    print(f"{sum(result.asked for result in results)} questions in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
