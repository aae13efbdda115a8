"""The terms of a request: all of it but its prompt, checked and filled in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from airside.controller.gateway import request_checks as checks
from airside.controller.gateway.prompt import Prompt
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto.messages import AddRequest
from airside.proto.settings import GatewaySettings

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """Valid for this model. The grammar is not checked here: see `grammar_check.py`."""

    request_id: str
    user: str
    cache_salt: str
    n: int
    priority: int
    arrival: float  # unix time
    deadline: float | None  # unix time
    sampling: checks.SamplingValues
    stop: checks.StopValues
    logprobs: checks.LogprobValues
    drafts: checks.DraftValues
    grammar: str = ""

    def seed(self, index: int) -> int:
        """The seed of continuation `index`: the request's for the first, else mixed from that one and the index.

        The mix is SplitMix64's (Steele et al. 2014, doi 10.1145/2660193.2660195): output `index` of a generator whose
        state is the request's seed. So a continuation can be repeated alone, by the seed that `accepted` says.
        """
        if index == 0:
            return self.sampling.seed
        z = (self.sampling.seed + index * 0x9E3779B97F4A7C15) & _SEED_MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
        return z ^ (z >> 31)

    def accepted(self, num_prompt_tokens: int) -> pb.Accepted:
        """The event, but for the place in the queue, which is the controller's to say."""
        seeds = [self.seed(index) for index in range(self.n)]
        return pb.Accepted(
            request_id=self.request_id,
            seed=seeds[0],
            prompt_tokens=num_prompt_tokens,
            seeds=seeds if self.n > 1 else (),
        )

    def add_request(self, seq_id: int, index: int, prompt: Prompt) -> AddRequest:
        """Continuation `index` of the prompt, as the controller takes it.

        All n go under the one request id and arrival. Only the first asks for the prompt's log-probabilities, which are
        the same for all.
        """
        sampling = dataclasses.asdict(self.sampling) | {"seed": self.seed(index)}
        return AddRequest(
            seq_id=seq_id,
            request_id=self.request_id,
            token_ids=np.asarray(prompt.token_ids, "<i4").tobytes(),
            image_positions=prompt.image_positions,
            arrival=self.arrival,
            priority=self.priority,
            deadline=self.deadline,
            max_tokens=self.stop.max_tokens,
            min_tokens=self.stop.min_tokens,
            stop_token_ids=self.stop.token_ids,
            user=self.user,
            cache_salt=self.cache_salt,
            image_hashes=prompt.image_hashes,
            image_urls=prompt.image_urls if any(prompt.image_urls) else [],
            image_min_pixels=prompt.min_pixels,
            image_max_pixels=prompt.max_pixels,
            logprobs=self.logprobs.logprobs,
            prompt_logprobs=self.logprobs.prompt_logprobs if index == 0 else -1,
            grammar=self.grammar,
            drafts_max=self.drafts.drafts_max,
            golden_tokens=np.asarray(self.drafts.golden_tokens, "<i4").tobytes(),
            golden_mode=self.drafts.golden_mode,
            golden_acceptance=self.drafts.golden_acceptance,
            **sampling,
        )


class TermsReader:
    """Reads the terms of requests for one model.

    Args:
        settings: of the gateway: its limits, and its sampling defaults over those of the checkpoint.
        model: the text side.
    """

    def __init__(self, settings: GatewaySettings, model: TextModel) -> None:
        self._model = model
        self._sequences_max = settings.sequences_max
        self._logprobs_max = settings.logprobs_max
        self._defaults = model.defaults.overridden(settings.generation_defaults)

    def read(
        self,
        message: pb.GenerateRequest | pb.ChatRequest,
        max_model_len: int,
        arrival: float,
        deadline: float | None = None,
    ) -> Terms:
        """The request's terms.

        Args:
            message: the request; its prompt is not looked at.
            max_model_len: tokens that the context holds.
            arrival: unix time; as is `deadline`.

        Raises:
            RequestError: a field's value cannot be used.
        """
        model = self._model
        is_structured = message.structure.WhichOneof("kind") is not None
        sampling = checks.check_sampling(message.sampling, self._defaults, model.vocab_size)
        stop = checks.check_stop(message.stop, model.end_ids, model.vocab_size, max_model_len, is_structured)
        sampling = _with_end_tokens(sampling, set(stop.token_ids).intersection(model.end_ids))
        picture_ids = model.picture_ids
        checks.check_some_token_is_left(sampling, stop, picture_ids)
        return Terms(
            request_id=checks.check_request_id(message.request_id),
            user=checks.check_label("user", message.user),
            cache_salt=checks.check_label("cache_salt", message.cache_salt),
            n=checks.check_num_sequences(message, self._sequences_max),
            priority=message.priority,
            arrival=arrival,
            deadline=deadline,
            sampling=sampling,
            stop=stop,
            logprobs=checks.check_logprobs(message.output, self._logprobs_max),
            drafts=checks.check_drafts(message.drafts, model.vocab_size, picture_ids, max_model_len, is_structured),
        )


def _with_end_tokens(sampling: checks.SamplingValues, end_ids: set[int]) -> checks.SamplingValues:
    """Allowed tokens are restricted to some: then those that end this text are allowed too."""
    if not sampling.allowed_token_ids:
        return sampling
    return dataclasses.replace(sampling, allowed_token_ids=sorted({*sampling.allowed_token_ids, *end_ids}))
