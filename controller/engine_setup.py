"""What the engine core and the vision ledger are told: limits, and the requests that come in over the bus."""

from __future__ import annotations

from airside._core import Engine, EngineConfig, Request
from airside.controller.vision.dispatch import VisionLimits
from airside.proto.messages import AddRequest
from airside.proto.settings import ControllerSettings


def make_engine(settings: ControllerSettings, num_blocks: int, num_state_slots: int) -> Engine:
    """An engine over this many KV blocks and state slots. Raises ValueError on limits that make no sense together."""
    return Engine(
        EngineConfig(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_mixed_tokens=settings.max_num_mixed_tokens,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            prefill_first=settings.prefill_first,
            strict_fifo=settings.strict_fifo,
            preemption=settings.preemption,
            victim_rule=settings.victim_rule,
            enable_prefix_caching=settings.enable_prefix_caching,
            async_scheduling=settings.async_scheduling,
            draft_method=settings.draft_method,
            max_draft_tokens=settings.max_draft_tokens,
            num_state_slots=num_state_slots,
            tail_tokens=settings.tail_tokens,
            image_token_id=settings.image_token_id,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            vocab_size=settings.vocab_size,
            image_mark_id=settings.image_mark_id,
            atomic_images=settings.atomic_images,
        )
    )


def make_request(message: AddRequest, client: int) -> Request:
    """The engine's view of a request from the front end with this number. Raises ValueError on malformed columns."""
    return Request(
        client=client,
        seq_id=message.seq_id,
        request_id=message.request_id,
        token_ids=message.token_ids,
        image_positions=message.image_positions,
        arrival=message.arrival,
        priority=message.priority,
        deadline=message.deadline,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=message.stop_token_ids,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        user=message.user,
        cache_salt=message.cache_salt,
        image_hashes=message.image_hashes,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=message.logit_bias,
        allowed_token_ids=message.allowed_token_ids,
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs,
        structured=bool(message.grammar),
        drafts_max=message.drafts_max,
        golden_tokens=message.golden_tokens,
        golden_mode=message.golden_mode,
        golden_acceptance=message.golden_acceptance,
    )


def vision_limits(settings: ControllerSettings) -> VisionLimits:
    """What images and vision workers are held to."""
    return VisionLimits(
        attempts_max=settings.image_job_attempts_max,
        job_s=settings.image_job_timeout_s,
        fetch_s=2 * settings.fetch_timeout_s + settings.image_job_timeout_s,  # twice its time, and patience
        bytes_max=settings.image_bytes_max,
        file_bytes_max=settings.image_file_bytes_max,
        cache_bytes=settings.pixel_cache_bytes,
    )
