"""Decoders with quantised weights: near the others, and the same bits alone and among others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from airside.workers.model_config import CheckpointError
from airside.workers.weights.gguf_blocks import q4_1_of_q4_k
from airside.workers.weights.gguf_file import GgufFile, gguf_name
from airside.workers.weights.open_weights import open_weights
from airside.workers.weights.weight_source import MatrixPart
from tests.checkpoints import make_lfm2
from tests.workers.rows import CPU, Rig, Row

RNG = np.random.default_rng(5)
TOKENS = [RNG.integers(1, 511, length).tolist() for length in (23, 9, 1, 30)]
BLOCKS = [order.tolist() for order in np.split(np.random.default_rng(0).permutation(64), 4)]
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0"]


def write_gguf(path: Path, checkpoint: Path, kind: str) -> Path:
    """The tiny Llama with its matrices in that type, the embedding in Q8_0."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(512)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        target = gguf_name(name)
        assert target is not None
        array = tensor.numpy()
        if array.ndim == 1:
            writer.add_tensor(target, array)
        else:
            ggml = GGMLQuantizationType["Q8_0" if "embed" in name or "v_proj" in name else kind]
            writer.add_tensor(target, quantize(array, ggml), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_logits(rig: Rig) -> torch.Tensor:
    return torch.cat([rig.in_chunks(*each, 64) for each in zip(TOKENS, BLOCKS, strict=True)])


def assert_same_alone_and_among_others(rig: Rig) -> None:
    rows = [
        Row(tokens, 0, len(tokens), blocks, slot)
        for slot, (tokens, blocks) in enumerate(zip(TOKENS, BLOCKS, strict=True))
    ]
    together = rig.step(rows)
    for slot, (tokens, blocks) in enumerate(zip(TOKENS, BLOCKS, strict=True)):
        for chunk in (64, 5, 1):
            assert torch.equal(rig.in_chunks(tokens, blocks, chunk, slot), together[slot])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", ["llama_path", "untied_llama_path", "odd_vocabulary_path"])
def test_int8_is_near_and_its_rows_are_their_own(checkpoint: str, dtype: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(checkpoint)
    rig, plain = Rig(path, dtype=dtype, quantization="int8"), Rig(path, dtype=dtype)
    exact, quantised = all_logits(plain), all_logits(rig)
    assert not torch.equal(quantised, exact)
    assert (quantised - exact).norm() / exact.norm() < 0.05
    assert_same_alone_and_among_others(rig)


def test_int8_of_a_model_with_short_convolutions(tmp_path: Path) -> None:
    path = make_lfm2(tmp_path)
    rig = Rig(path, quantization="int8")
    exact, quantised = Rig(path).in_chunks(TOKENS[0], BLOCKS[0], 64), rig.in_chunks(TOKENS[0], BLOCKS[0], 64)
    assert 0 < (quantised - exact).norm() / exact.norm() < 0.1  # gates multiply what errs


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file_are_near_what_they_stand_for(llama_path: Path, tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama_path, kind)
    rig, plain = Rig(path, quantization="gguf"), Rig(path)
    exact, kept = all_logits(plain), all_logits(rig)
    assert 0 < (kept - exact).norm() / exact.norm() < 0.05
    assert_same_alone_and_among_others(rig)


@pytest.mark.parametrize("columns", [slice(64, 128), slice(40, 80)])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"])
def test_parts_of_a_matrix(llama_path: Path, tmp_path: Path, name: str, columns: slice) -> None:
    """Two ranks' rows and columns; columns that cut a block are multiplied in the model's dtype."""
    path = write_gguf(tmp_path / "tiny.gguf", llama_path, "Q4_1")
    source = GgufFile(path, torch.float32, CPU, keeps_blocks=True)
    full = f"model.layers.1.{name}.weight"
    shape = tuple(load_file(llama_path / "model.safetensors")[full].shape)
    assert len(shape) == 2
    part = MatrixPart(full, shape, slice(shape[0] // 2, shape[0]), columns)
    x, bias = torch.randn(3, columns.stop - columns.start), torch.randn(shape[0])
    linear = source.linear([part, part], bias)
    half = x @ source.read(full, shape, part.rows, part.columns).T
    torch.testing.assert_close(linear(x), torch.cat([half, half], 1) + bias, atol=0.1, rtol=0.02)


def test_blocks_need_a_gguf_file(llama_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a .gguf file; set model.quantization to int8 or none"):
        open_weights(llama_path, torch.float32, CPU, "gguf")


def test_q4_k_becomes_q4_1_almost_exactly() -> None:
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (6, 3 * 144), dtype=np.uint8)
    halves = rng.uniform(1e-4, 1e-2, (6, 3, 2)).astype(np.float16)  # d and dmin of each super-block
    rows.reshape(6, 3, 144)[:, :, :4] = halves.view(np.uint8)
    exact = dequantize(rows, GGMLQuantizationType.Q4_K)
    kept = dequantize(q4_1_of_q4_k(rows), GGMLQuantizationType.Q4_1)
    # A value is the difference of two products, each rounded to 11 bits.
    assert np.abs(kept - exact).max() < 2.0**-11 * (15 + 1) * 63 * 1e-2
    assert np.abs(kept - exact).mean() < 5e-4 * np.abs(exact).mean()
