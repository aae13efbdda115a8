"""Configuration files: every problem at once and in its place, the nearest right name, and who overrides whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from airside.cluster.config.byte_size import format_bytes, parse_bytes
from airside.cluster.config.file import ConfigError, load_config
from airside.cluster.config.schema import Config

MIB = 2**20


def write(folder: Path, text: str) -> Path:
    path = folder / "a.yaml"
    path.write_text(text)
    return path


def problems(path: Path, environment: dict[str, str] | None = None, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment or {}, overrides)
    return str(caught.value).replace(f"{path}:", "line ").splitlines()


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "# nothing\n"), {})
    assert config == Config()
    assert config.engine.max_num_seqs == 64
    assert config.vision.arena == 256 * MIB
    assert config.model.dtype is None


def test_every_gateway_has_a_port_for_metrics_or_none_has(tmp_path: Path) -> None:
    text = "server:\n  grpc: {{gateways: 3}}\n  metrics: {{port: {}}}\n"
    assert problems(write(tmp_path, text.format(65534))) == [
        "line 1: server: metrics.port (65534) of the last gateway would be 65536, over 65535"
    ]
    assert load_config(write(tmp_path, text.format(65533)), {}).server.metrics.port == 65533
    assert load_config(write(tmp_path, text.format(0)), {}).server.metrics.port == 0


def test_every_problem_is_named_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model:\n  sorce: demo\n  dtype: int8\nengine:\n  max_num_seqs: '8'\n  kv_cache_memory: 12potatoes\n"
        "  enable_chunked_prefill: 1\nvision:\n  autoscaling_config: {min_replicas: 9}\n",
    )
    assert problems(path) == [
        "line 2: model.sorce: unknown key; did you mean source?",
        "line 3: model.dtype: must be one of auto, bfloat16, float16, float32",
        "line 5: engine.max_num_seqs: input should be a valid integer, not '8'",
        'line 6: engine.kv_cache_memory: must be a number of bytes with a unit, such as "64MiB"',
        "line 7: engine.enable_chunked_prefill: input should be a valid boolean, not 1",
        "line 9: vision.autoscaling_config: min_replicas (9) must not exceed max_replicas (4)",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine:\n  max_num_seq: 8\n", "line 2: engine.max_num_seq: unknown key; did you mean max_num_seqs?"),
        (
            "engine:\n  max_images_per_prompt: 3\n",
            "line 2: engine.max_images_per_prompt: unknown key; did you mean vision.limits.max_images_per_prompt?",
        ),
        (
            "zebra: 3\n",
            "line 1: zebra: unknown key; known here: model, engine, vision, server, cluster, observability",
        ),
        ("engine:\n  block_size: 16\n  block_size: 32\n", "line 3: engine.block_size: is given twice, first on line 2"),
        ("engine: 5\n", "line 1: engine: must be a block of keys, not 5"),
        ("- engine\n", "line 1: must be a mapping of blocks"),
        ("engine:\n  a: [1\n", "line 3: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("cluster: {ray_address: nowhere}\n", 'line 1: cluster.ray_address: must be "local", "auto" or "host:port"'),
        (
            "engine: {drafts: {method: eagle}}\n",
            "line 1: engine.drafts.method: input should be 'none', 'ngram' or 'mtp', not 'eagle'",
        ),
        ("engine: {drafts: {max_tokens: 0}}\n", "line 1: engine.drafts.max_tokens: input should be greater than "),
        ("engine: {victim_rule: first}\n", "line 1: engine.victim_rule: input should be 'least_waste', "),
        ("server: {grammar: {timeout_s: 0}}\n", "line 1: server.grammar.timeout_s: input should be greater than 0"),
        ("engine: {limits: {max_logprobs: -1}}\n", "line 1: engine.limits.max_logprobs: input should be greater "),
        (
            "cluster: {placement: pack}\n",
            "line 1: cluster.placement: input should be 'STRICT_PACK', 'PACK' or ",
        ),
        ("vision: {shared_memory: on}\n", "line 1: vision.shared_memory: input should be 'auto' or 'off', not True"),
        ("engine:\n  tensor_parallel_size: true\n", "line 2: engine.tensor_parallel_size: input should be a valid "),
    ],
)
def test_one_problem(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems(write(tmp_path, text))
    assert found.startswith(problem)


def test_a_missing_file_is_a_problem_too(tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "none.yaml")
    assert "cannot be read" in found


def test_a_block_whose_keys_are_all_commented_out_is_empty(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "engine:\n#  block_size: 32\nvision:\n"), {}) == Config()


@pytest.mark.parametrize("text", ["off", "'off'", "auto"])
def test_off_may_be_bare(tmp_path: Path, text: str) -> None:
    config = load_config(write(tmp_path, f"vision: {{shared_memory: {text}}}\n"), {})
    assert config.vision.shared_memory == text.strip("'")
    assert load_config(write(tmp_path, ""), {}, [f"vision.shared_memory={text}"]) == config


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {max_num_seqs: 2, block_size: 32, max_num_batched_tokens: 100}\n")
    environment = {"AIRSIDE_ENGINE__MAX_NUM_SEQS": "3", "AIRSIDE_ENGINE__BLOCK_SIZE": "64"}
    config = load_config(path, environment, ["engine.max_num_seqs=4", "vision.actor_options.resources={slot: 2}"])
    assert config.engine.max_num_seqs == 4
    assert config.engine.block_size == 64
    assert config.engine.max_num_batched_tokens == 100
    assert config.engine.tensor_parallel_size == 1
    assert config.vision.actor_options.resources == {"slot": 2.0}


def test_problems_of_other_layers_name_the_layer(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {block_size: 16}\n")
    environment = {"AIRSIDE_ENGINE__BLOCK_SIZE": "17", "AIRSIDE_ENGIN__X": "1", "AIRSIDE_CUDA": "ON", "HOME": "/"}
    found = problems(path, environment, ("engine.max_num_seqs=x", "nonsense"))
    assert len(found) == 4
    assert any(line.startswith("environment AIRSIDE_ENGINE__BLOCK_SIZE: engine.block_size:") for line in found)
    assert any(
        line.startswith("environment AIRSIDE_ENGIN__X: engin: unknown key; did you mean engine?") for line in found
    )
    assert any(line.startswith("--set engine.max_num_seqs=x: engine.max_num_seqs:") for line in found)
    assert "--set nonsense: must be block.key=value" in found


def test_what_is_shown_can_be_read_back(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "engine: {kv_cache_memory: 1.5GiB}\n"), {}, ["server.grpc.max_message=12MB"])
    shown = yaml.safe_dump(config.model_dump(mode="json"))
    assert "kv_cache_memory: 1536MiB" in shown
    assert load_config(write(tmp_path, shown), {}) == config


def test_every_key_has_a_description() -> None:
    def check(node: dict[str, object], at: str) -> None:
        for name, value in node.get("properties", {}).items():  # type: ignore[attr-defined]
            assert value.get("description"), f"{at}.{name}"

    schema = Config.model_json_schema()
    for name, node in {"": schema, **schema["$defs"]}.items():
        check(node, name)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("64MiB", 64 * MIB), ("1.5 GB", 1_500_000_000), ("4096", 4096), (7, 7), ("2kib", 2048)]
)
def test_byte_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "12 potatoes", 0, True, 1.5, None, "0.2B"])
def test_not_byte_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_bytes(text)
