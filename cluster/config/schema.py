"""The YAML file's blocks as frozen models: every key, its default, its limits and its meaning.

A value of `auto` is None here; `launch_plan.py` decides it once the model and the machine are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from airside.cluster.config.byte_size import format_bytes, parse_bytes
from airside.vision_workers.fetch.guard import normalize_entry


def _none_to_auto(value: object) -> object:
    return "auto" if value is None else value


def _auto_or_count(value: object) -> int | None:
    if value == "auto" or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError('must be "auto" or a whole number of at least 1')
    return value


def _auto_or_choice(*choices: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value is not None and value not in ("auto", *choices):
            raise ValueError(f"must be one of auto, {', '.join(choices)}")
        return None if value == "auto" else value

    return check


def _auto_or_bytes(value: object) -> int | None:
    return None if value == "auto" or value is None else parse_bytes(value)


def _off_for_false(value: object) -> object:
    """YAML 1.1 reads a bare `off` as a boolean."""
    return "off" if value is False else value


def _ray_address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if value in ("local", "auto") or (host and colon and port.isdigit()):
        return value
    raise ValueError('must be "local", "auto" or "host:port"')


MIB = 2**20
PORT_MAX = 65_535

_BYTES_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string", "examples": ["64MiB"]}, {"type": "integer", "minimum": 1}]
}
_AUTO_SCHEMA: dict[str, Any] = {"const": "auto"}

Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str, when_used="json"),
    WithJsonSchema(_BYTES_SCHEMA),
]
AutoBytes = Annotated[
    int | None,
    BeforeValidator(_auto_or_bytes),
    PlainSerializer(lambda n: "auto" if n is None else format_bytes(n), return_type=str, when_used="json"),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, *_BYTES_SCHEMA["anyOf"]]}),
]
AutoCount = Annotated[
    int | None,
    BeforeValidator(_auto_or_count),
    PlainSerializer(_none_to_auto, when_used="json"),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, {"type": "integer", "minimum": 1}]}),
]
RayAddress = Annotated[str, AfterValidator(_ray_address)]
Count = Annotated[int, Field(ge=1)]
AutoDtype = Annotated[
    str | None,
    BeforeValidator(_auto_or_choice("bfloat16", "float16", "float32")),
    PlainSerializer(_none_to_auto, when_used="json"),
    WithJsonSchema({"enum": ["auto", "bfloat16", "float16", "float32"]}),
]
AutoDevice = Annotated[
    str | None,
    BeforeValidator(_auto_or_choice("cuda", "cpu")),
    PlainSerializer(_none_to_auto, when_used="json"),
    WithJsonSchema({"enum": ["auto", "cuda", "cpu"]}),
]


class Block(BaseModel):
    """Base of all blocks: unknown keys are errors, values are not converted from other types, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class ModelBlock(Block):
    """Which model is served, and how its weights are held."""

    source: str = Field(
        default="demo", min_length=1, description='"demo", a checkpoint folder, a .gguf file or a Hugging Face id'
    )
    served_name: str = Field(default="default", min_length=1, description="the name that clients see")
    dtype: AutoDtype = Field(
        default=None, description="of weights and activations; auto: as the checkpoint stores them"
    )
    quantization: Literal["none", "int8", "gguf"] = Field(
        default="none",
        description="of the decoder's linear layers, on the CPU; none: weights in dtype; int8: 8-bit weights and "
        "activations, made while loading; gguf: the blocks of the .gguf file as they are",
    )
    packed_cache: bool = Field(
        default=True,
        description="keep the weights on disk as the CPU's kernels read them, under ~/.cache/airside/packed, and start "
        "from there",
    )
    max_model_len: AutoCount = Field(
        default=None, description="prompt and output tokens of one request; auto: all the model has"
    )


class EngineLimits(Block):
    """What may wait, and what one request may ask for; more is refused at once."""

    max_queued_requests: Count = Field(default=256, description="requests that wait for their first step")
    max_queued_tokens: Count = Field(default=200_000, description="prompt tokens of those requests together")
    max_sequences_per_request: Count = Field(default=16, description="continuations of one prompt: n")
    max_logprobs: int = Field(default=20, ge=0, description="alternatives shown with each token's log-probability")


class DraftsBlock(Block):
    """Tokens that are guessed and then verified several at a time. Outputs are the same with and without."""

    method: Literal["none", "ngram", "mtp"] = Field(
        default="none",
        description="none; ngram: what followed the last tokens before; mtp: the checkpoint's own draft head",
    )
    max_tokens: int = Field(default=4, ge=1, le=32, description="draft tokens of one sequence in one step")


class EngineBlock(Block):
    """The model's processes and how their steps are scheduled."""

    device: AutoDevice = Field(
        default=None, description="where the model runs; auto: CUDA when there is a GPU, else the CPU"
    )
    tensor_parallel_size: Count = Field(default=1, description="worker ranks that split the model")
    num_threads: AutoCount = Field(
        default=None, description="threads of each rank; auto on the CPU: cores / ranks, else 1"
    )
    max_num_seqs: Count = Field(default=64, description="sequences computed in one step")
    max_num_batched_tokens: AutoCount = Field(
        default=None, description="tokens computed in one step; auto: 512 on the CPU with chunks, else 2048"
    )
    max_num_mixed_tokens: AutoCount = Field(
        default=None,
        description="tokens computed in one step in which outputs go on, theirs included, so that these come evenly; "
        "prompts get half of it at the least; auto: 32 on the CPU, else as many as in any step",
    )
    kv_cache_memory: AutoBytes = Field(default=None, description="per rank; auto: decided from the memory that is free")
    block_size: Literal[8, 16, 32, 64, 128] = Field(default=16, description="tokens in one block of the KV cache")
    enable_chunked_prefill: bool = Field(default=True, description="compute long prompts over several steps")
    scheduling: Literal["mixed", "prefill_first"] = Field(
        default="mixed",
        description="mixed: prompts and outputs share a step; prefill_first: a step is all prompt or all output",
    )
    strict_fifo: bool = Field(default=False, description="nobody passes a request that waits for its images")
    preemption: Literal["recompute", "stop"] = Field(
        default="recompute", description="what happens to a request that loses its KV blocks: computed again, or ended"
    )
    victim_rule: Literal["least_waste", "most_output", "last"] = Field(
        default="least_waste",
        description="who loses blocks: least_waste: the least to compute again per block; most_output: the most "
        "tokens made; last: the last in order",
    )
    enable_prefix_caching: bool = Field(default=True, description="compute equal beginnings of prompts once")
    async_scheduling: bool = Field(default=True, description="plan a step while the one before it is computed")
    drafts: DraftsBlock = Field(default=DraftsBlock(), description="draft tokens")
    step_timeout_s: float = Field(
        default=120.0, gt=0, description="a step that takes longer counts as hung, and its ranks start again"
    )
    limits: EngineLimits = Field(default=EngineLimits(), description="what may wait, and what one request may ask for")


class ActorOptions(Block):
    """What Ray reserves for one vision worker."""

    num_cpus: float = Field(default=1.0, ge=0, description="CPUs reserved for each vision worker")
    resources: dict[str, float] = Field(default={}, description="custom Ray resources reserved for each vision worker")


class VisionLimits(Block):
    """Which images are refused."""

    max_images_per_prompt: Count = Field(default=16, description="images in one request")
    max_bytes: Bytes = Field(default=20 * MIB, description="size of one image file")
    max_pixels: Count = Field(default=64_000_000, description="width times height of one image")
    max_aspect: float = Field(default=200.0, ge=1, description="the longer side divided by the shorter")
    max_waiting_bytes: Bytes = Field(
        default=512 * MIB, description="image files of all requests that wait for their pixels; more is refused for now"
    )


class AutoscalingBlock(Block):
    """How many vision workers there are. `airside scale vision` overrides it."""

    min_replicas: int = Field(default=1, ge=0, description="the fewest, and as many at the start")
    max_replicas: Count = Field(default=4, description="the most, also for `airside scale vision`")
    target_media_wait_ms: float = Field(
        default=50.0, gt=0, description="the wait of a picture for a vision worker above which there are too few"
    )
    upscale_delay_s: float = Field(default=3.0, ge=0, description="for so long before some are added")
    downscale_delay_s: float = Field(default=60.0, ge=0, description="fewer would do for so long before some go")

    @model_validator(mode="after")
    def _min_within_max(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) must not exceed max_replicas ({self.max_replicas})")
        return self


class VisionCache(Block):
    """What is kept of pictures for the next request with the same one."""

    pixels: Bytes = Field(
        default=128 * MIB, description="tensors, in shared memory or as they were sent; a part of the arenas"
    )
    embeddings: Bytes = Field(default=128 * MIB, description="embeddings in each worker rank")


class MediaBlock(Block):
    """Pictures that the server fetches itself."""

    allow_urls: bool = Field(default=False, description="whether requests may name pictures by URL")
    allowed_domains: list[Annotated[str, AfterValidator(normalize_entry)]] = Field(
        default=[],
        description="hosts that may be fetched from; *.example.org: all below. Empty: none. Private addresses must be "
        "listed as such, beside the names that stand for them",
    )
    max_redirects: int = Field(default=0, ge=0, le=10, description="redirects that are followed, each checked again")
    timeout_s: float = Field(default=5.0, gt=0, description="time to fetch one picture, redirects included")


class VisionBlock(Block):
    """The image preprocessing workers. Unused by text models."""

    autoscaling_config: AutoscalingBlock = Field(default=AutoscalingBlock(), description="how many there are")
    actor_options: ActorOptions = Field(default=ActorOptions(), description="what Ray reserves for each")
    arena: Bytes = Field(default=256 * MIB, description="room of each vision worker for pixels in flight")
    shared_memory: Annotated[Literal["auto", "off"], BeforeValidator(_off_for_false)] = Field(
        default="auto",
        description="how pixels get to the model's ranks; auto: in /dev/shm on their node, over the bus from others; "
        "off: always over the bus, as where containers have no /dev/shm",
    )
    cache: VisionCache = Field(default=VisionCache(), description="what is kept of pictures")
    job_timeout_s: float = Field(
        default=20.0, gt=0, description="a vision worker with one picture for longer counts as hung, and is replaced"
    )
    limits: VisionLimits = Field(default=VisionLimits(), description="which images are refused")
    background: str = Field(
        default="#ffffff", pattern=r"^#[0-9a-fA-F]{6}$", description="colour behind transparent pixels"
    )
    media: MediaBlock = Field(default=MediaBlock(), description="pictures that the server fetches itself")


class GrpcBlock(Block):
    """The public gRPC server."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on; there is no authentication")
    port: int = Field(default=50051, ge=0, le=PORT_MAX, description="0: any free port, printed when ready")
    gateways: Count = Field(default=1, description="gateway processes that share the port")
    max_message: Bytes = Field(default=64 * MIB, description="the largest request")
    reflection: bool = Field(default=True, description="let tools such as grpcurl discover the API")


class GrammarBlock(Block):
    """Limits of the grammars and schemas that requests bring."""

    timeout_s: float = Field(default=5.0, gt=0, description="time to check one in; it is refused when it takes longer")
    max_bytes: Bytes = Field(default=256 * 1024, description="size of one")


class MetricsBlock(Block):
    """Prometheus metrics over HTTP."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=9090, ge=0, le=PORT_MAX, description="of the first gateway; the next follow; 0: none")


class ServerBlock(Block):
    """How clients reach the server, what they may bring, and how it stops."""

    grpc: GrpcBlock = Field(default=GrpcBlock(), description="the gRPC server")
    grammar: GrammarBlock = Field(default=GrammarBlock(), description="limits of structured output")
    metrics: MetricsBlock = Field(default=MetricsBlock(), description="the metrics server")
    shutdown_timeout_s: float = Field(
        default=30.0, ge=0, description="time that running requests get to end on a shutdown"
    )

    @model_validator(mode="after")
    def _metrics_ports_exist(self) -> Self:
        last = self.metrics.port + self.grpc.gateways - 1
        if self.metrics.port and last > PORT_MAX:
            raise ValueError(f"metrics.port ({self.metrics.port}) of the last gateway would be {last}, over {PORT_MAX}")
        return self


class ClusterBlock(Block):
    """The Ray cluster that runs the processes."""

    ray_address: RayAddress = Field(
        default="local", description="local: a Ray of its own; auto or host:port: join that one"
    )
    placement: Literal["STRICT_PACK", "PACK", "SPREAD"] = Field(
        default="STRICT_PACK",
        description="nodes of a joined Ray that vision workers run on; STRICT_PACK: this one, as everything else does; "
        "PACK: others once this one has no room; SPREAD: all. Others must have the checkpoint at the same path, and "
        "reach this one by TCP, whatever the port. A Ray of its own has one node",
    )
    startup_timeout_s: float = Field(
        default=120.0, gt=0, description="time to become ready, waiting for resources included"
    )
    silence_timeout_s: float = Field(
        default=12.0, ge=3, description="a process not heard of for longer counts as hung, and starts again"
    )


class ObservabilityBlock(Block):
    """Logs."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="of every process")


class Config(Block):
    """A whole configuration file. Every block may be left out."""

    model: ModelBlock = Field(default=ModelBlock(), description="which model is served")
    engine: EngineBlock = Field(default=EngineBlock(), description="the model's processes and scheduling")
    vision: VisionBlock = Field(default=VisionBlock(), description="the image preprocessing workers")
    server: ServerBlock = Field(default=ServerBlock(), description="how clients reach the server")
    cluster: ClusterBlock = Field(default=ClusterBlock(), description="the Ray cluster")
    observability: ObservabilityBlock = Field(default=ObservabilityBlock(), description="logs")
