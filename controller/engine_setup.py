"""What the engine core is told: its limits, and the requests that come in over the bus."""

from __future__ import annotations

from airside._core import Engine, EngineConfig, Request
from airside.proto.messages import AddRequest
from airside.proto.settings import ControllerSettings


def make_engine(settings: ControllerSettings, num_blocks: int) -> Engine:
    """An engine over this many KV blocks. Raises ValueError on limits that make no sense together."""
    return Engine(
        EngineConfig(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            prefill_first=settings.prefill_first,
            strict_fifo=settings.strict_fifo,
            preemption=settings.preemption,
            image_token_id=settings.image_token_id,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            vocab_size=settings.vocab_size,
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
    )
