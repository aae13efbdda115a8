"""From a configuration, a model and a machine to the settings of every process."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from airside.cluster.config.schema import Config
from airside.cluster.launch_plan import LaunchError, LaunchPlan, Machine, Network, Run
from airside.cluster.runs import up
from airside.proto.bus_keys import make_keys
from airside.proto.channel import Hub
from airside.workers.model_config import ModelConfig, PictureTokens, RopeConfig, ShortConvConfig

RUN = Run("0a1b2c3d", Path("/run/user/1/airside/0a1b2c3d"))
LAPTOP = Machine(node="here", num_cores=2, num_gpus=0)


def model(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_ids": (2,),
        "dtype": "float32",
    }
    return ModelConfig(**{**values, **changes})


def plan(config: dict[str, Any] | None = None, run: Run = RUN, machine: Machine = LAPTOP, **facts: Any) -> LaunchPlan:
    return LaunchPlan(Config(**(config or {})), model(**facts), Path("/models/m"), run, machine, port=50051)


def test_what_is_auto_is_decided() -> None:
    (rank,) = plan().workers(group=0)
    assert (rank.dtype, rank.device, rank.max_model_len, rank.num_threads) == ("float32", "cpu", 4096, 2)
    assert rank.kv_cache_bytes is None


def test_steps_are_small_on_a_cpu_so_that_answers_come_evenly() -> None:
    on_cpu = plan().controller()
    assert (on_cpu.max_num_batched_tokens, on_cpu.max_num_mixed_tokens) == (512, 32)
    gpu = Machine(node="here", num_cores=8, num_gpus=1, has_cuda_kernels=True)
    on_gpu = plan(machine=gpu).controller()
    assert (on_gpu.max_num_batched_tokens, on_gpu.max_num_mixed_tokens) == (2048, 0)
    chosen = plan({"engine": {"max_num_batched_tokens": 100, "max_num_mixed_tokens": 50}})
    assert (chosen.controller().max_num_batched_tokens, chosen.controller().max_num_mixed_tokens) == (100, 50)
    assert chosen.workers(group=0)[0].max_num_batched_tokens == 100


def test_an_unknown_dtype_of_the_checkpoint_becomes_bfloat16_and_the_configured_one_wins() -> None:
    assert plan(dtype="float8").dtype == "bfloat16"
    assert plan({"model": {"dtype": "float16"}}).dtype == "float16"


def test_all_processes_meet_at_one_private_socket() -> None:
    made = plan({"engine": {"tensor_parallel_size": 2}}, image_token_id=5)
    settings = [made.controller(), *made.gateways(), *made.workers(0), made.vision_worker(0)]
    assert {each.endpoint for each in settings} == {"ipc:///run/user/1/airside/0a1b2c3d/bus"}
    assert {each.node for each in settings} == {"here"}


def test_ranks_share_the_cores_and_meet_at_a_file_of_their_launch() -> None:
    made = plan({"engine": {"tensor_parallel_size": 2}})
    first, second = made.workers(group=3)
    assert (first.rank, second.rank, second.world_size, second.group) == (0, 1, 2, 3)
    assert (first.name, second.name) == ("worker-0", "worker-1")
    assert first.num_threads == second.num_threads == 1
    assert first.rendezvous == second.rendezvous
    assert first.rendezvous not in {rank.rendezvous for rank in made.workers(group=4)}


def test_gateways_share_the_port_only_when_there_are_several() -> None:
    assert [gateway.reuse_port for gateway in plan().gateways()] == [False]
    several = plan({"server": {"grpc": {"gateways": 2}}}).gateways()
    assert [gateway.reuse_port for gateway in several] == [True, True]
    assert len({gateway.name for gateway in several}) == 2


def test_vision_workers_have_segments_of_their_own_run() -> None:
    made = plan(image_token_id=5)
    assert made.vision_worker(7).segment == "airside-0a1b2c3d-vision-7"
    assert made.vision_worker(7).segment.startswith(made.run.segment_prefix)
    assert made.controller().vision_target == made.vision_replicas == 1
    assert made.controller().vision_replicas_max == 4


def test_a_text_model_has_no_vision_workers() -> None:
    assert plan().vision_replicas == 0
    assert plan().controller().vision_target == 0


def test_each_gateway_serves_metrics_and_the_first_those_of_the_engine_too() -> None:
    def served(port: int) -> list[tuple[int | None, bool]]:
        made = plan({"server": {"grpc": {"gateways": 3}, "metrics": {"port": port}}})
        return [(gateway.metrics_port, gateway.metrics_of_engine) for gateway in made.gateways()]

    assert served(9100) == [(9100, True), (9101, False), (9102, False)]
    assert served(0) == [(None, True), (None, False), (None, False)]


def test_our_own_ray_has_room_for_what_starts_first() -> None:
    vision = {"autoscaling_config": {"min_replicas": 3}, "actor_options": {"num_cpus": 0.5, "resources": {"slot": 2.0}}}
    made = plan({"engine": {"tensor_parallel_size": 2}, "vision": vision}, image_token_id=5)
    assert made.num_cpus == 4  # 2 ranks and 1.5 for vision
    assert made.resources == {"slot": 6.0}
    vision["autoscaling_config"] = {"min_replicas": 0}  # the first one comes with the first picture
    made = plan({"engine": {"tensor_parallel_size": 2}, "vision": vision}, image_token_id=5)
    assert (made.vision_replicas, made.num_cpus, made.resources) == (0, 3, {"slot": 2.0})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"engine": {"tensor_parallel_size": 3}}, "engine.tensor_parallel_size 3 .* sizes that work: 1, 2, 4"),
        ({"model": {"max_model_len": 5000}}, "model.max_model_len is 5000, but the model has 4096"),
        ({"engine": {"device": "cuda"}}, "engine.device is cuda, but this machine has no NVIDIA GPU"),
        ({"engine": {"drafts": {"method": "mtp"}}}, "engine.drafts.method is mtp, but this LlamaForCausalLM .* ngram"),
        ({"engine": {"enable_chunked_prefill": False}}, r"engine.max_num_batched_tokens \(2048\) must hold"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(config)


def test_blocks_hold_what_convolutions_look_back_on() -> None:
    short_conv = ShortConvConfig(layers=(0,), kernel_size=10, bias=False)
    assert plan({"engine": {"block_size": 16}}, short_conv=short_conv)
    with pytest.raises(LaunchError, match=r"^engine.block_size 8 is too small .* set engine.block_size to 9 or more"):
        plan({"engine": {"block_size": 8}}, short_conv=short_conv)


def test_cuda_needs_gpus_and_kernels() -> None:
    gpus = Machine(node="here", num_cores=8, num_gpus=1)
    assert plan(machine=gpus).device == "cpu"
    built = Machine(node="here", num_cores=8, num_gpus=1, has_cuda_kernels=True)
    assert plan(machine=built).device == "cuda"
    with pytest.raises(LaunchError, match="this machine has 1 GPUs"):
        plan({"engine": {"tensor_parallel_size": 2}}, machine=built)


def test_a_run_directory_whose_sockets_cannot_exist_is_refused() -> None:
    with pytest.raises(LaunchError, match="too long"):
        plan(run=Run("x", Path("/" + "d" * 110)))


def test_the_controller_is_told_the_vocabulary_and_what_counts_as_hung() -> None:
    settings = plan().controller()
    assert (settings.vocab_size, settings.step_timeout_s, settings.silence_timeout_s) == (512, 120.0, 12.0)
    patience = {"engine": {"step_timeout_s": 7.5}, "cluster": {"silence_timeout_s": 30.0}}
    settings = plan(patience).controller()
    assert (settings.step_timeout_s, settings.silence_timeout_s) == (7.5, 30.0)


def test_drafts_and_scheduling_reach_the_processes_that_need_them() -> None:
    made = plan()
    settings = made.controller()
    assert (settings.enable_prefix_caching, settings.async_scheduling, settings.victim_rule) == (
        True,
        True,
        "least_waste",
    )
    assert (settings.draft_method, settings.max_draft_tokens, settings.tail_tokens) == ("none", 4, 0)
    engine = {"enable_prefix_caching": False, "async_scheduling": False, "victim_rule": "last"}
    made = plan({"engine": engine | {"drafts": {"method": "mtp", "max_tokens": 2}}}, num_draft_layers=1)
    settings = made.controller()
    assert (settings.enable_prefix_caching, settings.async_scheduling, settings.victim_rule) == (False, False, "last")
    assert (settings.draft_method, settings.max_draft_tokens) == ("mtp", 2)
    assert {(rank.draft_method, rank.max_draft_tokens) for rank in made.workers(0)} == {("mtp", 2)}


def test_gateways_are_told_what_requests_may_ask_for() -> None:
    (gateway,) = plan().gateways()
    assert (gateway.sequences_max, gateway.logprobs_max) == (16, 20)
    assert (gateway.grammar_timeout_s, gateway.grammar_bytes_max) == (5.0, 256 * 1024)
    limits = {"max_sequences_per_request": 2, "max_logprobs": 0}
    grammar = {"timeout_s": 0.5, "max_bytes": "1KiB"}
    (gateway,) = plan({"engine": {"limits": limits}, "server": {"grammar": grammar}}).gateways()
    assert (gateway.sequences_max, gateway.logprobs_max) == (2, 0)
    assert (gateway.grammar_timeout_s, gateway.grammar_bytes_max) == (0.5, 1024)


def test_pictures_that_come_whole_must_fit_a_step() -> None:
    facts = {"image_token_id": 5, "pictures": PictureTokens(6, ("\n", "\n\n"), 256)}
    made = plan({"engine": {"max_num_batched_tokens": 256}}, **facts)
    assert (made.controller().image_mark_id, made.controller().atomic_images) == (6, True)
    [gateway] = made.gateways()
    assert (gateway.image_mark_id, gateway.image_mark_before, gateway.image_mark_after) == (6, "\n", "\n\n")
    with pytest.raises(LaunchError, match=r"engine\.max_num_batched_tokens is 255, .* set it to 256 or more"):
        plan({"engine": {"max_num_batched_tokens": 255}}, **facts)
    large = {"image_token_id": 5, "pictures": PictureTokens(6, ("\n", "\n\n"), 700)}
    assert plan(**large).controller().max_num_batched_tokens == 700
    assert not gateway.takes_pixel_ranges
    [scaling] = plan(image_token_id=5, pictures=PictureTokens(takes_pixel_ranges=True)).gateways()
    assert scaling.takes_pixel_ranges
    other = plan(image_token_id=5)
    assert (other.controller().image_mark_id, other.controller().atomic_images) == (None, False)


def spread_over(placement: str, ray_address: str = "auto", **facts: Any) -> LaunchPlan:
    config = {"cluster": {"placement": placement, "ray_address": ray_address}}
    return plan(config, **({"image_token_id": 5} | facts))


def test_a_vision_worker_elsewhere_comes_over_the_network_with_its_keys() -> None:
    server, client = make_keys()
    made = spread_over("SPREAD").over(Network("tcp://10.0.0.1:7000", server, client))
    controller, here, there = made.controller(), made.vision_worker(3), made.remote_vision_worker(3)
    assert (controller.network_endpoint, controller.network_keys) == ("tcp://10.0.0.1:7000", server)
    assert controller.endpoint == here.endpoint == made.run.endpoint
    assert (here.shares_memory, here.network_keys) == (True, None)
    assert there is not None
    assert (there.endpoint, there.shares_memory, there.network_keys) == ("tcp://10.0.0.1:7000", False, client)
    assert (there.name, there.segment, there.model_path) == (here.name, here.segment, here.model_path)
    assert client.secret not in controller.to_json()
    near = [*made.gateways(), *made.workers(0), here]
    assert not any(secret in each.to_json() for each in near for secret in (server.secret, client.secret))


def test_without_a_network_nobody_can_be_elsewhere() -> None:
    made = spread_over("SPREAD")
    assert made.remote_vision_worker(0) is None
    assert (made.controller().network_endpoint, made.controller().network_secret) == ("", "")


def test_placement_is_for_vision_workers_of_a_ray_that_was_joined() -> None:
    assert plan(image_token_id=5).placement == "STRICT_PACK"
    assert spread_over("PACK").placement == "PACK"
    assert spread_over("PACK", "local").placement == "STRICT_PACK"
    assert spread_over("SPREAD", image_token_id=None).placement == "STRICT_PACK"


def test_shared_memory_can_be_off_on_one_node() -> None:
    off = plan({"vision": {"shared_memory": "off"}}, image_token_id=5).vision_worker(0)
    assert (off.shares_memory, off.endpoint) == (False, RUN.endpoint)


def test_an_address_that_is_none_of_this_machine_is_told_with_the_remedy() -> None:
    elsewhere = up._network("192.0.2.77")  # for documentation alone (RFC 5737)
    with (
        pytest.raises(up.CannotStart, match=r"port on 192\.0\.2\.77, .*; start Ray here with another --node-ip"),
        elsewhere,
    ):
        pass


def test_the_port_between_nodes_is_the_controllers_alone_also_while_there_is_none(tmp_path: Path) -> None:
    with up._network("127.0.0.1") as network:
        host, port = network.endpoint.removeprefix("tcp://").split(":")
        for _ in range(2):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((host, int(port)))
            with Hub(f"ipc://{tmp_path}/bus") as hub:
                hub.listen(network.endpoint, network.server)
    with socket.socket() as other:
        other.bind((host, int(port)))


def test_quantised_weights_are_for_the_cpu_and_blocks_for_gguf_files() -> None:
    (rank,) = plan({"model": {"quantization": "int8"}}).workers(group=0)
    assert (rank.quantization, plan().workers(group=0)[0].quantization) == ("int8", "none")
    gpu = Machine(node="here", num_cores=2, num_gpus=1, has_cuda_kernels=True)
    with pytest.raises(LaunchError, match=r"^model.quantization is int8, but engine.device is cuda.* none .* cpu"):
        plan({"model": {"quantization": "int8"}}, machine=gpu)
    with pytest.raises(LaunchError, match=r"^model.quantization is gguf, but /models/m is not a .gguf file; set it"):
        plan({"model": {"quantization": "gguf"}})
    blocks = Config(model={"quantization": "gguf"})
    (rank,) = LaunchPlan(blocks, model(), Path("/models/m.gguf"), RUN, LAPTOP, port=50051).workers(group=0)
    assert rank.quantization == "gguf"


def test_packed_weights_are_kept_where_the_machine_has_a_place_unless_it_is_switched_off() -> None:
    machine = dataclasses.replace(LAPTOP, packed_cache=Path("/home/me/.cache/airside/packed"))
    (rank,) = plan(machine=machine).workers(group=0)
    assert rank.packed_cache == "/home/me/.cache/airside/packed"
    (off,) = plan({"model": {"packed_cache": False}}, machine=machine).workers(group=0)
    (nowhere,) = plan().workers(group=0)
    assert off.packed_cache == nowhere.packed_cache == ""
