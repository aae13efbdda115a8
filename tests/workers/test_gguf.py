"""A llama.cpp file against what transformers reads from it, and against the checkpoint it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from airside.workers.layers import inverse_frequencies
from airside.workers.model_config import CheckpointError, RopeConfig, load_model_config
from airside.workers.weights.gguf_file import GgufFile, gguf_name, hugging_face_name
from tests.workers.step_plans import Track, lone_runner, plan_step, scattered_blocks

HEADS, KV_HEADS = 8, 2


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of a projection's rows: the two halves of each head, alternating."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


@pytest.fixture(scope="session")
def gguf_path(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied checkpoint as a Q8_0 file, written as llama.cpp's converter would."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(512)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(llama_path / "model.safetensors").items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        target = gguf_name(name)
        assert target is not None
        if array.ndim == 1:
            writer.add_tensor(target, array)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(target, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def transformers_weights(path: Path) -> dict[str, torch.Tensor]:
    config = LlamaConfig(**{k: v for k, v in load_gguf_checkpoint(path)["config"].items() if k != "model_type"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors: dict[str, torch.Tensor] = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    return tensors


def test_every_tensor_is_what_transformers_dequantises(gguf_path: Path) -> None:
    source = GgufFile(gguf_path, torch.float32, torch.device("cpu"))
    expected = transformers_weights(gguf_path)
    assert len(expected) == 2 + 2 * 9
    for name, tensor in expected.items():
        assert torch.equal(source.read(name, tuple(tensor.shape)), tensor), name


def test_the_tensors_are_those_of_the_original_up_to_quantisation(gguf_path: Path, llama_path: Path) -> None:
    source = GgufFile(gguf_path, torch.float32, torch.device("cpu"))
    for name, tensor in load_file(llama_path / "model.safetensors").items():
        torch.testing.assert_close(source.read(name, tuple(tensor.shape)), tensor, atol=3e-3, rtol=0)


def test_the_config_is_that_of_the_original(gguf_path: Path, llama_path: Path) -> None:
    gguf, original = load_model_config(gguf_path), load_model_config(llama_path)
    for field in ("architecture", "vocab_size", "num_kv_heads", "head_dim", "tie_word_embeddings", "eos_token_ids"):
        assert getattr(gguf, field) == getattr(original, field)
    assert gguf.rope.theta == original.rope.theta
    assert gguf.rms_norm_eps == pytest.approx(original.rms_norm_eps)


def header(path: Path, *fields: Callable[[GGUFWriter], None]) -> Path:
    """A file that says what a model is like, without its weights."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(16)
    for add in fields:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rotary_embedding_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    def frequencies(name: str, *fields: Callable[[GGUFWriter], None]) -> torch.Tensor:
        config = load_model_config(header(tmp_path / name, *fields))
        return inverse_frequencies(config.rope, config.head_dim)

    plain = frequencies("plain.gguf")
    assert torch.equal(plain, inverse_frequencies(RopeConfig(), 16))
    untyped = frequencies("untyped.gguf", lambda writer: writer.add_rope_scaling_factor(4.0))
    assert torch.equal(untyped, plain / 4)
    none = RopeScalingType.NONE
    off = frequencies(
        "off.gguf",
        lambda writer: writer.add_rope_scaling_type(none),
        lambda writer: writer.add_rope_scaling_factor(4.0),
    )
    assert torch.equal(off, plain)
    divisors = np.arange(1, 9, dtype=np.float32)
    listed = frequencies("listed.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    assert torch.equal(listed, plain / torch.from_numpy(divisors))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (lambda writer: writer.add_rope_scaling_type(RopeScalingType.YARN), "rope scaling yarn is not supported"),
        (lambda writer: writer.add_rope_dimension_count(8), "a part of each head is not supported"),
        (lambda writer: writer.add_key_length(15), "head_dim 15 is odd"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, field: Callable[[GGUFWriter], None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(header(tmp_path / "odd.gguf", field))


def test_a_gguf_file_is_served(gguf_path: Path) -> None:
    config = LlamaConfig(**{k: v for k, v in load_gguf_checkpoint(gguf_path)["config"].items() if k != "model_type"})
    model = LlamaForCausalLM(config)
    model.load_state_dict(transformers_weights(gguf_path), strict=False)
    model.tie_weights()
    prompt = list(range(50, 90))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].argmax().item()

    runner = lone_runner(gguf_path, 16)
    result = runner.execute(plan_step(0, [Track(1, prompt, scattered_blocks(1, 16)[0])], [len(prompt)]))
    assert result is not None
    assert np.frombuffer(result.sampled, np.int32).tolist() == [expected]


def test_a_rank_reads_its_rows_and_columns(gguf_path: Path) -> None:
    source = GgufFile(gguf_path, torch.float32, torch.device("cpu"))
    name, shape = "model.layers.1.self_attn.q_proj.weight", (128, 128)
    whole = source.read(name, shape)
    assert torch.equal(source.read(name, shape, slice(64, 128), slice(0, 32)), whole[64:128, :32])


def test_what_is_not_there_is_named(gguf_path: Path, tmp_path: Path) -> None:
    source = GgufFile(gguf_path, torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(output\.weight\) is missing in .*tiny\.gguf"):
        source.read("lm_head.weight", (512, 128))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUG" + bytes(60))
    with pytest.raises(CheckpointError, match=r"broken\.gguf cannot be read"):
        load_model_config(broken)


def test_names_go_both_ways(gguf_path: Path) -> None:
    names = [name for name, _ in GgufFile(gguf_path, torch.float32, torch.device("cpu")).tensors()]
    assert len(names) > 10
    assert [hugging_face_name(gguf_name(name) or "") for name in names] == names
    with pytest.raises(KeyError):
        hugging_face_name("blk.0.ssm_in.weight")
