"""Thirty requests of every kind that a server takes, and what came of each: the material of `test_same_tokens.py`."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.system.local_server import Answer, LocalServer

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}'


@dataclass(frozen=True)
class Outcome:
    """What a client sees of one continuation, as far as it must not depend on anything but the request."""

    token_ids: tuple[int, ...]
    text: str
    reason: str
    stop_match: str


def requests_of_all_kinds(takes_images: bool) -> list[pb.GenerateRequest]:
    """Thirty, or the twenty-one without pictures. Their prompts share beginnings and end around block borders."""
    rng = random.Random(30)
    common = [rng.randrange(60, 512) for _ in range(48)]
    made = [_text(common[:shared] + _tokens(rng, own)) for shared, own in TEXT_LENGTHS]
    made += [_sampled(common[:20] + _tokens(rng, 7), seed) for seed in range(5)]
    made += [_structured(structure, seed) for seed, structure in enumerate(_structures())]
    made += [_stopped(common[:33]), _scored(common[:17])]
    if takes_images:
        made += [_picture_request(rng, number) for number in range(9)]
    return made


TEXT_LENGTHS = [(0, 1), (0, 15), (0, 16), (0, 17), (16, 0), (32, 1), (47, 0), (48, 0), (48, 30), (48, 70)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(60, 512) for _ in range(count)]


def _text(token_ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.Sampling(temperature=0),
        stop=pb.Stop(max_tokens=24, ignore_eos=True),
    )


def _sampled(token_ids: list[int], seed: int) -> pb.GenerateRequest:
    sampling = pb.Sampling(temperature=0.9, seed=seed)
    match seed:
        case 1:
            sampling.MergeFrom(pb.Sampling(top_k=20, top_p=0.9, min_p=0.01))
        case 2:
            sampling.MergeFrom(pb.Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5))
        case 3:
            sampling.logit_bias[100] = 3.0
            sampling.allowed_token_ids.extend(range(80, 180))
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=sampling,
        stop=pb.Stop(max_tokens=20, ignore_eos=True),
        n=2 if seed == 4 else 1,
    )


def _structures() -> list[pb.Structure]:
    return [
        pb.Structure(json_schema=SCHEMA),
        pb.Structure(regex="(red|blue){2,6}!"),
        pb.Structure(choice=pb.Choice(texts=["a small circle", "a small square", "nothing"])),
        pb.Structure(gbnf='root ::= "[" ("x" | root) "]"'),
    ]


def _structured(structure: pb.Structure, seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt="The picture in the middle of the small red circle is",
        structure=structure,
        sampling=pb.Sampling(temperature=0.7, seed=seed),
        stop=pb.Stop(max_tokens=30),
    )


def _stopped(token_ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        structure=pb.Structure(regex="[a-e ]{12}stop here.*"),
        sampling=pb.Sampling(temperature=1, seed=9),
        stop=pb.Stop(max_tokens=40, strings=["stop h"]),
    )


def _scored(token_ids: list[int]) -> pb.GenerateRequest:
    request = _text(token_ids)
    request.output.CopyFrom(pb.Output(logprobs=3, prompt_logprobs=2))
    return request


def _picture_request(rng: random.Random, number: int) -> pb.GenerateRequest:
    sizes = [(48, 64), (90, 30), (20, 20)][: 1 + number % 2]
    prompts = ("<image>What is it?", "The <image> and <image>, are they alike?")
    request = pb.GenerateRequest(
        prompt=prompts[number % 2],
        images=[pb.Image(data=_noise(rng if number < 7 else random.Random(7), *size)) for size in sizes],
        sampling=pb.Sampling(temperature=0 if number % 3 else 0.8, seed=number),
        stop=pb.Stop(max_tokens=16, ignore_eos=number != 8),
    )
    if number == 8:
        request.structure.regex = "(it is|they are) [a-z ]{3,9}"
    return request


def _noise(rng: random.Random, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height)).save(buffer, "PNG")
    return buffer.getvalue()


def outcomes(server: LocalServer, request: pb.GenerateRequest) -> list[Outcome]:
    """What comes of a request, one entry per continuation."""
    events = list(server.inference.Generate(request, timeout=120))
    answers = [Answer(events, index) for index in range(max(1, request.n))]
    for answer in answers:
        assert answer.finished.usage.completion_tokens == len(answer.token_ids)
    return [
        Outcome(tuple(answer.token_ids), answer.text, answer.finished.reason, answer.finished.stop_match)
        for answer in answers
    ]


def outcomes_together(server: LocalServer, requests: Sequence[pb.GenerateRequest], seed: int) -> list[list[Outcome]]:
    """The outcomes of all, sent at once in an order that the seed decides."""
    order = random.Random(seed).sample(range(len(requests)), len(requests))
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = {number: pool.submit(outcomes, server, requests[number]) for number in order}
        return [futures[number].result() for number in range(len(requests))]
