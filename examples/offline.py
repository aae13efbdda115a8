"""The engine from Python, without a server: `python examples/offline.py`."""

from airside import LLM, SamplingParams

with LLM("demo") as llm:
    prompts = ["The capital of France is", "Ten, nine, eight,", "Once upon a time"]
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True
    ):
        print(f"{prompt}{output.text}   [{output.finish_reason}, {len(output.token_ids)} tokens]")
