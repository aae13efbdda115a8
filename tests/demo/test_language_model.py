"""GGUF to Hugging Face: names, the order of rotary dimensions, and the tokenizer, on a tiny file written here."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from airside.cluster.demo_model.language_model import LanguageModel

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"]
ORDINARY = ["1", "2", "a", "b", "Ċ", "Ġ", "ĊĊ", "ab", "Ġa"]


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's order, row by row: (0, half), (1, half + 1), ... of each head."""
    half = HEAD_DIM // 2
    order = [head * HEAD_DIM + i + side * half for head in range(num_heads) for i in range(half) for side in (0, 1)]
    return weight[order]


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {
        "q": random.normal(size=(HEADS * HEAD_DIM, HIDDEN)).astype(np.float32),
        "k": random.normal(size=(KV_HEADS * HEAD_DIM, HIDDEN)).astype(np.float32),
        "v": random.normal(size=(KV_HEADS * HEAD_DIM, HIDDEN)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> LanguageModel:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(SPECIAL + ORDINARY))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(SPECIAL + ORDINARY)
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(ORDINARY))
    writer.add_token_merges(["Ċ Ċ", "a b", "Ġ a"])
    writer.add_tensor("blk.0.attn_q.weight", interleave(weights["q"], HEADS))
    writer.add_tensor("blk.0.attn_k.weight", interleave(weights["k"], KV_HEADS))
    writer.add_tensor("blk.0.attn_v.weight", weights["v"])
    quantised = gguf.quantize(weights["q"], gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_output.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return LanguageModel(path)


@pytest.fixture(scope="module")
def tokenizer(language_model: LanguageModel) -> Tokenizer:
    return language_model.tokenizer()


def test_query_and_key_rows_come_back_in_two_halves(
    language_model: LanguageModel, weights: dict[str, np.ndarray]
) -> None:
    tensors = dict(language_model.tensors())
    for part in ("q", "k", "v"):
        expected = torch.from_numpy(weights[part]).to(torch.bfloat16)
        assert torch.equal(tensors[f"layers.0.self_attn.{part}_proj.weight"], expected), part


def test_quantised_tensors_come_back_as_bfloat16_near_the_original(
    language_model: LanguageModel, weights: dict[str, np.ndarray]
) -> None:
    tensor = dict(language_model.tensors())["layers.0.self_attn.o_proj.weight"]
    assert tensor.dtype is torch.bfloat16
    assert tensor.shape == weights["q"].shape
    step = float(np.ptp(weights["q"])) / 15  # Q4_1 keeps sixteen levels per block
    assert float((tensor.float() - torch.from_numpy(weights["q"])).abs().max()) < step


def test_image_tokens_take_the_ids_of_unused_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("<image>") == SPECIAL.index("<repo_name>")
    assert tokenizer.token_to_id("<fake_token_around_image>") == SPECIAL.index("<reponame>")
    assert tokenizer.token_to_id("<global-img>") == SPECIAL.index("<filename>")
    assert tokenizer.token_to_id("<repo_name>") is None
    assert tokenizer.encode("<|im_start|>ab<image>").ids == [1, len(SPECIAL) + ORDINARY.index("ab"), 3]


def test_digits_are_cut_off_before_white_space_is(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("\n\n12").tokens == ["ĊĊ", "1", "2"]
    assert tokenizer.encode("ab a1").tokens == ["ab", "Ġa", "1"]
    assert tokenizer.decode(tokenizer.encode("ab a\n\n12 b").ids) == "ab a\n\n12 b"
