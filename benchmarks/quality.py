"""What quantised weights cost in quality: the perplexity of one text for each of `model.quantization`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from airside import LLM

TEXT = Path(__file__).parent / "quality_text.txt"


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="as model.source; a .gguf file is also used as it is")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    kinds = ["none", "int8", *(["gguf"] if args.model.endswith(".gguf") else [])]
    print("| model.quantization | perplexity | to none | largest difference of a log-probability |\n|---|---|---|---|")
    exact: list[float] = []
    for kind in kinds:
        found = log_probabilities(args.model, args.dtype, kind, args.text.read_text(encoding="utf-8"))
        exact = exact or found
        change = perplexity(found) / perplexity(exact) - 1
        largest = max(abs(a - b) for a, b in zip(found, exact, strict=True))
        print(f"| {kind} | {perplexity(found):.3f} | {change:+.2%} | {largest:.2f} |", flush=True)


def log_probabilities(model: str, dtype: str, quantization: str, text: str) -> list[float]:
    """Of each token of a text but its first words, which it is read after."""
    beginning, rest = text.split(" ", 1)
    with LLM(model, dtype=dtype, quantization=quantization, enable_prefix_caching=False) as llm:
        return llm.score(beginning, " " + rest).logprobs


def perplexity(logprobs: list[float]) -> float:
    """exp of the mean of `-log p` (Jelinek et al. 1977)."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


if __name__ == "__main__":
    main()
