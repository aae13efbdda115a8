"""What each process is told when it is started: one frozen dataclass per process, as JSON on its command line.

Under Ray it is an argument of the actor, which no list of processes shows: only there it may hold keys.

The YAML file is checked once, in `cluster/`; these are the parts of it that a process needs, with everything that
was `auto` decided.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Self

from airside.proto.bus_keys import ClientKeys, ServerKeys


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of all settings."""

    def to_json(self) -> str:
        """One line of JSON, read back by `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises TypeError on unknown or missing keys."""
        values: dict[str, Any] = json.loads(text)  # Any: JSON
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ControllerSettings(Settings):
    """For `airside.controller`: the engine core's limits and the bus."""

    endpoint: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    tensor_parallel_size: int
    enable_chunked_prefill: bool
    prefill_first: bool
    strict_fifo: bool
    preemption: str  # "recompute" | "stop"
    max_queued_requests: int
    max_queued_tokens: int
    vision_target: int  # vision workers to ask for at first; 0 for a text model
    vision_replicas_max: int  # the most that may be asked for
    image_token_id: int | None
    image_job_attempts_max: int = 3
    node: str = "local"
    log_level: str = "info"
    vocab_size: int | None = None  # token ids are below it; None: they are not checked
    step_timeout_s: float = 120.0  # a step in flight for longer has lost its ranks
    silence_timeout_s: float = 12.0  # a peer not heard of for longer is lost
    enable_prefix_caching: bool = True
    async_scheduling: bool = True  # plan a step while the one before it is computed
    victim_rule: str = "least_waste"  # "least_waste" | "most_output" | "last": whose blocks are taken
    draft_method: str = "none"  # "none" | "ngram" | "mtp"
    max_draft_tokens: int = 0  # per sequence and step
    tail_tokens: int = 0  # tokens before each row that the model looks back on (n-gram embeddings)
    image_job_timeout_s: float = 20.0  # a vision worker with one picture in hand for longer hangs
    image_bytes_max: int = 512 * 2**20  # of files that wait for their pixels; more pictures are refused
    pixel_cache_bytes: int = 256 * 2**20  # of tensors kept for the next request with the same picture
    image_file_bytes_max: int = 20 * 2**20  # of one picture that is fetched
    fetch_timeout_s: float = 5.0  # of one picture, redirects included
    image_mark_id: int | None = None  # stands for an image in a request; None: the image token
    max_num_mixed_tokens: int = 0  # of a step in which sequences decode; 0: as of any
    atomic_images: bool = False  # an image's tokens that follow one another come in one step
    network_endpoint: str = ""  # "tcp://host:port", for vision workers on other nodes; "": there are none
    network_secret: str = field(default="", repr=False)  # the two of `ServerKeys`
    network_client: str = ""

    @property
    def network_keys(self) -> ServerKeys:
        """For the network endpoint."""
        return ServerKeys(self.network_secret, self.network_client)


@dataclass(frozen=True, slots=True)
class WorkerSettings(Settings):
    """For `airside.workers`: one rank of the model."""

    endpoint: str
    name: str
    rank: int
    world_size: int
    group: int
    rendezvous: str  # torch.distributed init_method, e.g. "tcp://127.0.0.1:port" or "file:///path"; unused at size 1
    model_path: str  # a checkpoint folder, or a .gguf file
    dtype: str  # "bfloat16" | "float16" | "float32"
    device: str  # "cpu" | "cuda"
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int | None  # None: decide from the memory at hand
    num_kv_blocks_max: int | None  # an upper bound, for tests and small models
    num_threads: int
    node: str = "local"
    log_level: str = "info"
    draft_method: str = "none"  # "mtp": the checkpoint's draft head is loaded
    max_draft_tokens: int = 0
    embedding_cache_bytes: int = 256 * 2**20  # of pictures' embeddings
    quantization: str = "none"  # "none" | "int8" | "gguf": how the decoder's linear layers hold their weights
    packed_cache: str = ""  # the folder of packed weights from earlier starts; "": none are read or written


@dataclass(frozen=True, slots=True)
class VisionWorkerSettings(Settings):
    """For `airside.vision_workers`: one image preprocessing process."""

    endpoint: str
    name: str
    model_path: str
    segment: str  # name of the shared-memory segment it creates
    segment_bytes: int
    max_bytes: int
    max_pixels: int
    max_aspect: float
    background: str = "#ffffff"
    nice: int = 19  # behind everybody else
    node: str = "local"
    log_level: str = "info"
    allow_urls: bool = False
    allowed_domains: list[str] = field(default_factory=list)
    max_redirects: int = 0
    fetch_timeout_s: float = 5.0  # of one picture, redirects included
    shares_memory: bool = True  # with the ranks; else tensors travel over the bus, and `segment` is but a name
    network_server: str = ""  # the two of `ClientKeys`, where the endpoint is of TCP; "": it is not
    network_secret: str = field(default="", repr=False)

    @property
    def network_keys(self) -> ClientKeys | None:
        """For an endpoint of TCP."""
        return ClientKeys(self.network_server, self.network_secret) if self.network_server else None


@dataclass(frozen=True, slots=True)
class GatewaySettings(Settings):
    """For `airside.controller.gateway`: the gRPC server and the text side of the model."""

    endpoint: str
    name: str
    host: str
    port: int
    model_path: str
    served_name: str
    architecture: str
    device: str
    dtype: str
    tensor_parallel_size: int
    max_model_len: int
    max_images_per_prompt: int
    max_image_bytes: int
    max_message_bytes: int
    reflection: bool
    reuse_port: bool = False
    node: str = "local"
    log_level: str = "info"
    generation_defaults: dict[str, float] = field(default_factory=dict)
    stop_grace_s: float = 10.0  # how long open streams may go on after a SIGTERM
    grammar_timeout_s: float = 5.0  # to check a grammar in; it is refused when that takes longer
    grammar_bytes_max: int = 256 * 1024
    sequences_max: int = 16  # `n` of one request
    logprobs_max: int = 20  # alternatives
    allow_urls: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # None: no metrics are served
    metrics_of_engine: bool = True  # those of the whole server among them
    image_mark_id: int | None = None  # stands for an image in a prompt; None: the image token
    image_mark_before: str = ""  # what a prompt's text gets before each mark
    image_mark_after: str = ""
    takes_pixel_ranges: bool = False  # a request may say within how many pixels a picture is scaled
