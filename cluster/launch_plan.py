"""From a configuration, a model and a machine to the settings of every process: all that was `auto` is decided here.

Pure: nothing is started, opened or looked up.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from airside.cluster.config.schema import Config
from airside.proto.bus_keys import ClientKeys, ServerKeys
from airside.proto.settings import ControllerSettings, GatewaySettings, VisionWorkerSettings, WorkerSettings
from airside.workers.model_config import (
    CheckpointError,
    ModelConfig,
    TensorParallelSizeError,
    check_block_size,
    check_tensor_parallel_size,
)

DTYPES = ("bfloat16", "float16", "float32")
STEP_TOKENS = 2048
CPU_STEP_TOKENS = 512
"""Of a CPU, where prompts may come in chunks: with more, a layer's activations leave the caches."""
CPU_MIXED_TOKENS = 32
"""A step of so many takes two to three times as long as one decode alone, which reads the weights, too. With more,
those who decode wait in proportion; with fewer, the weights are read more often for each prompt."""
ENDPOINT_LENGTH_MAX = 100
"""Of an ipc path: the system's limit for socket paths is 107 bytes."""


class LaunchError(ValueError):
    """The configuration does not fit the model or the machine; the message names the key and what would work."""


@dataclass(frozen=True, slots=True)
class Run:
    """One life of a server: its name and its private directory."""

    run_id: str
    directory: Path

    @property
    def endpoint(self) -> str:
        """Where the controller binds the bus."""
        return f"ipc://{self.directory / 'bus'}"

    @property
    def segment_prefix(self) -> str:
        """What the names of this run's shared-memory segments start with."""
        return f"airside-{self.run_id}-"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the processes run on."""

    node: str
    num_cores: int
    num_gpus: int
    has_cuda_kernels: bool = False
    packed_cache: Path | None = None  # where packed weights may be kept; None: nowhere


@dataclass(frozen=True, slots=True)
class Network:
    """The bus between nodes: where the controller listens, and the keys of the run."""

    endpoint: str
    server: ServerKeys
    client: ClientKeys


class LaunchPlan:
    """The settings of every process of a run.

    Args:
        config: checked configuration.
        model: facts of the checkpoint.
        model_path: where the checkpoint is, a folder or a .gguf file.
        run: the run the processes belong to.
        machine: what they run on.
        port: of the gRPC server; `server.grpc.port` unless that is 0.
    Raises:
        LaunchError: the configuration does not fit the model or the machine.
    """

    def __init__(
        self, config: Config, model: ModelConfig, model_path: Path, run: Run, machine: Machine, port: int
    ) -> None:
        if len(run.endpoint) > ENDPOINT_LENGTH_MAX:
            raise LaunchError(f"the run directory's path is too long for a socket: {run.directory}")
        self.config = config
        self.run = run
        self.port = port
        self.takes_images = model.image_token_id is not None
        self._model = model
        self._model_path = str(model_path)
        self._machine = machine
        self._network: Network | None = None
        self.device = _device(config, machine)
        self.dtype = config.model.dtype or (model.dtype if model.dtype in DTYPES else "bfloat16")
        self._step_tokens = _step_tokens(config, model, self.device)
        self.max_model_len = _max_model_len(config, model, self._step_tokens)
        _check_ranks(config, model, machine, self.device)
        _check_blocks(config, model)
        _check_quantization(config, model_path, self.device)
        _check_drafts(config, model)
        _check_atomic_images(self._step_tokens, model)

    @property
    def placement(self) -> str:
        """Of the vision workers: "STRICT_PACK" also where a Ray of our own has but one node."""
        cluster = self.config.cluster
        return "STRICT_PACK" if cluster.ray_address == "local" or not self.takes_images else cluster.placement

    def over(self, network: Network) -> LaunchPlan:
        """The same plan with a bus that other nodes can reach."""
        plan = copy.copy(self)
        plan._network = network
        return plan

    @property
    def vision_replicas(self) -> int:
        """Vision workers at the start; 0 for a text model."""
        return self.config.vision.autoscaling_config.min_replicas if self.takes_images else 0

    @property
    def num_cpus(self) -> int:
        """CPUs that a Ray of our own must offer so that everything starts: ranks and the first vision workers."""
        vision = max(1, self.vision_replicas) * self.config.vision.actor_options.num_cpus if self.takes_images else 0
        return max(self._machine.num_cores, math.ceil(self.config.engine.tensor_parallel_size + vision))

    @property
    def resources(self) -> dict[str, float]:
        """Custom resources that a Ray of our own must offer so that the first vision workers start."""
        wanted = self.config.vision.actor_options.resources
        return {name: amount * max(1, self.vision_replicas) for name, amount in wanted.items()}

    def controller(self) -> ControllerSettings:
        """For the controller."""
        engine, vision = self.config.engine, self.config.vision
        settings = ControllerSettings(
            endpoint=self.run.endpoint,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=self._step_tokens,
            max_num_mixed_tokens=engine.max_num_mixed_tokens or (CPU_MIXED_TOKENS if self.device == "cpu" else 0),
            max_model_len=self.max_model_len,
            tensor_parallel_size=engine.tensor_parallel_size,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            prefill_first=engine.scheduling == "prefill_first",
            strict_fifo=engine.strict_fifo,
            preemption=engine.preemption,
            victim_rule=engine.victim_rule,
            enable_prefix_caching=engine.enable_prefix_caching,
            async_scheduling=engine.async_scheduling,
            draft_method=engine.drafts.method,
            max_draft_tokens=engine.drafts.max_tokens,
            tail_tokens=self._model.tail_tokens,
            max_queued_requests=engine.limits.max_queued_requests,
            max_queued_tokens=engine.limits.max_queued_tokens,
            vision_target=self.vision_replicas,
            vision_replicas_max=vision.autoscaling_config.max_replicas,
            image_job_timeout_s=vision.job_timeout_s,
            image_bytes_max=vision.limits.max_waiting_bytes,
            pixel_cache_bytes=vision.cache.pixels,
            image_file_bytes_max=vision.limits.max_bytes,
            fetch_timeout_s=vision.media.timeout_s,
            image_token_id=self._model.image_token_id,
            image_mark_id=self._model.pictures.mark_id,
            atomic_images=self._model.pictures.num_atomic > 0,
            vocab_size=self._model.vocab_size,
            step_timeout_s=engine.step_timeout_s,
            silence_timeout_s=self.config.cluster.silence_timeout_s,
            node=self._machine.node,
            log_level=self.config.observability.log_level,
        )
        if self._network is None:
            return settings
        return dataclasses.replace(
            settings,
            network_endpoint=self._network.endpoint,
            network_secret=self._network.server.secret,
            network_client=self._network.server.client,
        )

    def gateways(self) -> list[GatewaySettings]:
        """For all gateways; more than one share the port."""
        server = self.config.server
        grpc = server.grpc
        return [
            GatewaySettings(
                endpoint=self.run.endpoint,
                name=f"gateway-{index}",
                host=grpc.host,
                port=self.port,
                model_path=self._model_path,
                served_name=self.config.model.served_name,
                architecture=self._model.architecture,
                device=self.device,
                dtype=self.dtype,
                tensor_parallel_size=self.config.engine.tensor_parallel_size,
                max_model_len=self.max_model_len,
                max_images_per_prompt=self.config.vision.limits.max_images_per_prompt,
                max_image_bytes=self.config.vision.limits.max_bytes,
                max_message_bytes=grpc.max_message,
                reflection=grpc.reflection,
                grammar_timeout_s=server.grammar.timeout_s,
                grammar_bytes_max=server.grammar.max_bytes,
                sequences_max=self.config.engine.limits.max_sequences_per_request,
                logprobs_max=self.config.engine.limits.max_logprobs,
                allow_urls=self.config.vision.media.allow_urls,
                metrics_host=server.metrics.host,
                metrics_port=server.metrics.port + index if server.metrics.port else None,
                metrics_of_engine=index == 0,  # so that sums over all gateways count the engine once
                image_mark_id=self._model.pictures.mark_id,
                image_mark_before=self._model.pictures.mark_text[0],
                image_mark_after=self._model.pictures.mark_text[1],
                takes_pixel_ranges=self._model.pictures.takes_pixel_ranges,
                reuse_port=grpc.gateways > 1,
                stop_grace_s=server.shutdown_timeout_s,
                node=self._machine.node,
                log_level=self.config.observability.log_level,
            )
            for index in range(grpc.gateways)
        ]

    def workers(self, group: int) -> list[WorkerSettings]:
        """For all ranks of one launch of the worker group. Each launch meets at a file of its own."""
        engine = self.config.engine
        size = engine.tensor_parallel_size
        return [
            WorkerSettings(
                endpoint=self.run.endpoint,
                name=f"worker-{rank}",
                rank=rank,
                world_size=size,
                group=group,
                rendezvous=f"file://{self.run.directory / f'rendezvous-{group}'}",
                model_path=self._model_path,
                dtype=self.dtype,
                device=self.device,
                block_size=engine.block_size,
                max_model_len=self.max_model_len,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=self._step_tokens,
                kv_cache_bytes=engine.kv_cache_memory,
                num_kv_blocks_max=None,
                num_threads=self._num_threads,
                draft_method=engine.drafts.method,
                max_draft_tokens=engine.drafts.max_tokens,
                quantization=self.config.model.quantization,
                packed_cache=self._packed_cache,
                embedding_cache_bytes=self.config.vision.cache.embeddings,
                node=self._machine.node,
                log_level=self.config.observability.log_level,
            )
            for rank in range(size)
        ]

    def vision_worker(self, number: int) -> VisionWorkerSettings:
        """For one on the ranks' node. Numbers are never used twice in a run, and neither are segment names."""
        vision = self.config.vision
        name = f"vision-{number}"
        return VisionWorkerSettings(
            endpoint=self.run.endpoint,
            name=name,
            model_path=self._model_path,
            segment=self.run.segment_prefix + name,
            segment_bytes=vision.arena,
            max_bytes=vision.limits.max_bytes,
            max_pixels=vision.limits.max_pixels,
            max_aspect=vision.limits.max_aspect,
            background=vision.background,
            allow_urls=vision.media.allow_urls,
            allowed_domains=vision.media.allowed_domains,
            max_redirects=vision.media.max_redirects,
            fetch_timeout_s=vision.media.timeout_s,
            shares_memory=vision.shared_memory == "auto",
            node=self._machine.node,
            log_level=self.config.observability.log_level,
        )

    def remote_vision_worker(self, number: int) -> VisionWorkerSettings | None:
        """For the same one if it starts on another node, where `node` is to be filled in; None: it cannot."""
        if self._network is None:
            return None
        return dataclasses.replace(
            self.vision_worker(number),
            endpoint=self._network.endpoint,
            network_server=self._network.client.server,
            network_secret=self._network.client.secret,
            shares_memory=False,
        )

    @property
    def _num_threads(self) -> int:
        if self.config.engine.num_threads is not None:
            return self.config.engine.num_threads
        if self.device != "cpu":
            return 1
        return max(1, self._machine.num_cores // self.config.engine.tensor_parallel_size)

    @property
    def _packed_cache(self) -> str:
        """The folder; "" where there is none, or it is not wanted."""
        folder = self._machine.packed_cache
        return str(folder) if self.config.model.packed_cache and folder is not None else ""


def _device(config: Config, machine: Machine) -> str:
    usable = machine.num_gpus > 0 and machine.has_cuda_kernels
    device = config.engine.device or ("cuda" if usable else "cpu")
    if device == "cuda" and not machine.num_gpus:
        raise LaunchError("engine.device is cuda, but this machine has no NVIDIA GPU; set it to cpu or auto")
    if device == "cuda" and not machine.has_cuda_kernels:
        raise LaunchError("engine.device is cuda, but Airside was built without CUDA kernels; set it to cpu or auto")
    return device


def _step_tokens(config: Config, model: ModelConfig, device: str) -> int:
    wanted = CPU_STEP_TOKENS if device == "cpu" and config.engine.enable_chunked_prefill else STEP_TOKENS
    return config.engine.max_num_batched_tokens or max(wanted, model.pictures.num_atomic)


def _max_model_len(config: Config, model: ModelConfig, budget: int) -> int:
    longest = model.max_position_embeddings
    wanted = config.model.max_model_len or longest
    if wanted > longest:
        raise LaunchError(f"model.max_model_len is {wanted}, but the model has {longest} positions")
    if not config.engine.enable_chunked_prefill and budget < wanted:
        raise LaunchError(
            f"engine.max_num_batched_tokens ({budget}) must hold a whole prompt of model.max_model_len ({wanted}) "
            "when engine.enable_chunked_prefill is false; raise the one, lower the other, or allow chunks"
        )
    return wanted


def _check_ranks(config: Config, model: ModelConfig, machine: Machine, device: str) -> None:
    size = config.engine.tensor_parallel_size
    try:
        check_tensor_parallel_size(model, size)
    except TensorParallelSizeError as error:
        raise LaunchError(f"engine.{error}") from error
    if device == "cuda" and size > machine.num_gpus:
        raise LaunchError(f"engine.tensor_parallel_size is {size}, but this machine has {machine.num_gpus} GPUs")


def _check_blocks(config: Config, model: ModelConfig) -> None:
    try:
        check_block_size(model, config.engine.block_size)
    except CheckpointError as error:
        raise LaunchError(f"engine.{error}") from error


def _check_quantization(config: Config, model_path: Path, device: str) -> None:
    quantization = config.model.quantization
    if quantization == "none":
        return
    if device != "cpu":
        raise LaunchError(
            f"model.quantization is {quantization}, but engine.device is {device}, which has no kernels for it; "
            "set the one to none or the other to cpu"
        )
    if quantization == "gguf" and model_path.suffix != ".gguf":
        raise LaunchError(
            f"model.quantization is gguf, but {model_path} is not a .gguf file; set it to int8 or none, or "
            "model.source to a .gguf file"
        )


def _check_atomic_images(budget: int, model: ModelConfig) -> None:
    if model.pictures.num_atomic > budget:
        raise LaunchError(
            f"engine.max_num_batched_tokens is {budget}, but the {model.pictures.num_atomic} tokens of a picture of "
            f"this {model.architecture} checkpoint attend to one another and come in one step; set it to "
            f"{model.pictures.num_atomic} or more"
        )


def _check_drafts(config: Config, model: ModelConfig) -> None:
    if config.engine.drafts.method == "mtp" and not model.num_draft_layers:
        raise LaunchError(
            f"engine.drafts.method is mtp, but this {model.architecture} checkpoint has no draft head; "
            "set it to ngram or none"
        )
