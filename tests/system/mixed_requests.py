"""Requests that combine, at random, all that one can ask for: the material of `test_storm.py` and `test_memory.py`."""

from __future__ import annotations

import io
import random

from PIL import Image

from airside.proto import airside_pb2 as pb

_VOCAB_SIZE = 512
_BEGINNING = [random.Random(7).randrange(60, _VOCAB_SIZE) for _ in range(64)]
_SCHEMA = """{
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "s": {"type": "string", "maxLength": 8}},
    "required": ["n", "s"]
}"""
STRUCTURES = [
    pb.Structure(regex="(red|blue){2,6}!"),
    pb.Structure(json_schema=_SCHEMA),
    pb.Structure(choice=pb.Choice(texts=["a small circle", "a small square 👨‍👩‍👧‍👦 x", "nothing"])),
    pb.Structure(gbnf='root ::= "[" ("x" | root) "]"'),
    pb.Structure(regex="[a-z é👍]{10,60}"),
    pb.Structure(json_object=True),
]
_STOPS = ["e", "th", "red", "👍", "the ", "a small", "\n", "}", '"', "é", "👨‍👩", "bl", "ue"]


def mixed_request(seed: int, takes_images: bool) -> pb.GenerateRequest:
    """One of as many as there are seeds; each has an outcome of its own that depends on nothing else."""
    rng = random.Random(seed)
    request = pb.GenerateRequest(n=rng.choice([1, 1, 1, 2, 3]), priority=rng.choice([0, 0, 1, -1]))
    request.user = rng.choice(["", "a", "b"])
    request.cache_salt = rng.choice(["", "", "salt"])
    _set_prompt(request, rng, takes_images)
    _set_sampling(request.sampling, rng)
    _set_stop(request.stop, rng)
    if rng.random() < 0.4:
        request.structure.CopyFrom(rng.choice(STRUCTURES))
    elif rng.random() < 0.25:
        request.sampling.allowed_token_ids.extend([70, *rng.sample(range(60, _VOCAB_SIZE), rng.randrange(99))])
        request.stop.ClearField("token_ids")  # else min_tokens might leave none of them
    if rng.random() < 0.4:
        request.output.logprobs = rng.choice([0, 1, 5, 20])
    if rng.random() < 0.3:
        request.output.prompt_logprobs = rng.choice([0, 1, 5, 20])
    if rng.random() < 0.5:
        _set_drafts(request, rng)
    return request


def _set_prompt(request: pb.GenerateRequest, rng: random.Random, takes_images: bool) -> None:
    if takes_images and rng.random() < 0.3:
        for _ in range(rng.choice([1, 1, 2])):
            request.images.add(data=_noise(rng.randrange(6), rng.choice([20, 48, 64]), rng.choice([30, 48])))
        request.prompt = "<image>" * len(request.images) + "What is it?"
    elif rng.random() < 0.5:
        request.prompt = "The picture in the middle of the small red circle is"[: rng.randrange(3, 50)]
    else:
        own = [rng.randrange(60, _VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        request.token_ids.ids.extend(_BEGINNING[: rng.randrange(64)] + own)


def _set_sampling(sampling: pb.Sampling, rng: random.Random) -> None:
    sampling.temperature = rng.choice([0, 0, 0.7, 1, 1.5])
    sampling.seed = rng.randrange(2**63)
    if rng.random() < 0.3:
        sampling.top_k = rng.choice([1, 5, 40, _VOCAB_SIZE - 1, _VOCAB_SIZE, 10**6])
    if rng.random() < 0.3:
        sampling.top_p = rng.choice([1e-6, 0.5, 0.9, 1])
    if rng.random() < 0.2:
        sampling.min_p = rng.choice([0.01, 0.5, 1])
    if rng.random() < 0.4:
        sampling.repetition_penalty = rng.choice([0.5, 1.3, 10])
    if rng.random() < 0.4:
        sampling.presence_penalty = rng.choice([-2, 0.5, 2])
    if rng.random() < 0.4:
        sampling.frequency_penalty = rng.choice([-2, 0.5, 2])
    if rng.random() < 0.3:
        for token_id in rng.sample(range(_VOCAB_SIZE), rng.randrange(1, 20)):
            sampling.logit_bias[token_id] = rng.choice([-100, -3, 2, 8])


def _set_stop(stop: pb.Stop, rng: random.Random) -> None:
    stop.max_tokens = rng.randrange(1, 45)
    stop.ignore_eos = rng.random() < 0.6
    stop.include_stop = rng.random() < 0.4
    if rng.random() < 0.3:
        stop.min_tokens = rng.randrange(stop.max_tokens + 1)
    if rng.random() < 0.3:
        stop.token_ids.extend(rng.sample(range(_VOCAB_SIZE), rng.randrange(1, 64)))
    if rng.random() < 0.4:
        stop.strings.extend(rng.sample(_STOPS, rng.randrange(1, 5)))


def _set_drafts(request: pb.GenerateRequest, rng: random.Random) -> None:
    drafts = request.drafts
    drafts.max_tokens = rng.choice([0, 1, 4, 32, 10**6])
    if rng.random() < 0.5:
        drafts.golden.ids.extend(rng.randrange(60, _VOCAB_SIZE) for _ in range(rng.randrange(1, 40)))
        if rng.random() < 0.3 and not request.HasField("structure"):
            drafts.force_golden = True
        else:
            drafts.golden_acceptance = rng.choice([0, 0.5, 1])


def _noise(seed: int, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(buffer, "PNG")
    return buffer.getvalue()
