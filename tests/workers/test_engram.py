"""N-gram embeddings against a plain computation over the whole sequence, whatever way it came about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from airside.workers.engram import NgramHashes, odd_constants, primes_up_to, sigmoid, sum_columns
from airside.workers.folded_tokens import DEAD, fold_text, fold_tokens
from airside.workers.model_config import CheckpointError, EngramConfig, load_model_config, tensor_parallel_sizes
from tests.checkpoints import IMAGE_TOKEN_ID, VOCAB_SIZE, add_engram, make_idefics3, make_llama
from tests.workers.ranks import start_ranks
from tests.workers.rows import Rig, Row, with_columns
from tests.workers.step_plans import Track, lone_runner, run_tracks, run_tracks_ahead

ENGRAM = {"layers": [0, 1], "table_size": 211, "num_heads": 2, "dim": 8, "max_ngram": 3, "seed": 7}
CONFIG = EngramConfig((0, 1), 211, 2, 8, 3, 7, "")
NUM_ROWS = sum(primes_up_to(211, 4))
TOKENS = np.random.default_rng(3).integers(60, 512, 40).tolist()
BLOCKS = [order.tolist() for order in np.split(np.random.default_rng(0).permutation(64), 4)]

Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("engram"), seed=4)
    add_engram(folder, 128, NUM_ROWS, ENGRAM)
    return folder


class PlainEngram:
    """One layer's memory, one position after the other, in float64 and integers of any size."""

    def __init__(self, path: Path, layer_id: int, folded: list[int]) -> None:
        def read(name: str) -> Array:
            return tensors[f"model.layers.{layer_id}.engram.{name}.weight"].double().numpy()

        tensors = load_file(path / "model.safetensors")
        self.tables, self.kv_proj = read("tables"), read("kv_proj")
        self.hidden_norm, self.key_norm = read("hidden_norm"), read("key_norm")
        self.folded = folded
        self.constants = odd_constants(ENGRAM["seed"], layer_id, 12)  # 4 tables of 3 each

    def memory(self, place: int) -> Array:
        parts, start = [], 0
        for table, prime in enumerate(primes_up_to(211, 4)):
            length = 2 + table // 2
            ngram = [self.folded[place - i] if place >= i else DEAD for i in range(length)]
            mixed = 0
            for i, token in enumerate(ngram):
                mixed ^= token * self.constants[3 * table + i] % 2**64
            row = self.tables[start + mixed % 2**63 % prime]
            parts.append(np.zeros_like(row) if DEAD in ngram else row)
            start += prime
        return np.concatenate(parts)

    def added(self, hidden: Array) -> Array:
        """[num_tokens, hidden] of the whole sequence -> what is added."""
        result = np.empty_like(hidden)
        for place, state in enumerate(hidden):
            key, value = np.split(self.kv_proj @ self.memory(place), 2)
            match = norm(state, self.hidden_norm) @ norm(key, self.key_norm) / len(state) ** 0.5
            result[place] = value / (1 + np.exp(-match))
        return result


def norm(x: Array, weight: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean() + 1e-5) * weight
    return normed


def expected_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' Llama in float64, with the memory added before each layer."""
    folded = fold_tokens(path / "tokenizer.json", VOCAB_SIZE)[tokens].tolist()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for layer_id in ENGRAM["layers"]:
        plain = PlainEngram(path, layer_id, folded)

        def add(_module: object, args: tuple[Any, ...], plain: PlainEngram = plain) -> tuple[Any, ...]:
            return (args[0] + torch.from_numpy(plain.added(args[0][0].numpy()))[None], *args[1:])

        model.model.layers[layer_id].register_forward_pre_hook(add)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0].float()


@pytest.mark.parametrize("special", [None, 2])
def test_logits_are_those_of_a_plain_computation(path: Path, special: int | None) -> None:
    tokens = [*TOKENS[:9], *([special] if special is not None else []), *TOKENS[9:]]
    expected = expected_logits(path, tokens)
    assert torch.allclose(Rig(path).in_chunks(tokens, BLOCKS[0], 64), expected, rtol=1e-4, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    assert (plain - expected).abs().max() > 0.1, "the memory is too faint to show anything"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunks_change_no_bit(path: Path, chunk: int, dtype: str) -> None:
    rig = Rig(path, dtype=dtype)
    assert torch.equal(rig.in_chunks(TOKENS, BLOCKS[1], chunk), rig.in_chunks(TOKENS, BLOCKS[0], 64))


def test_neighbours_and_rejected_drafts_change_no_bit(path: Path) -> None:
    rig = Rig(path)
    expected, rng, computed = rig.in_chunks(TOKENS, BLOCKS[0], 64), np.random.default_rng(1), 0
    while computed < len(TOKENS):
        counted = min(computed + int(rng.integers(1, 4)), len(TOKENS))
        fed = [*TOKENS[:counted], *rng.integers(60, 512, int(rng.integers(0, 4))).tolist()]
        neighbour = Row(TOKENS[5:], 0, int(rng.integers(1, 9)), BLOCKS[2])
        logits = rig.step([neighbour, Row(fed, computed, len(fed), BLOCKS[1])])[1]
        assert torch.equal(logits[: counted - computed], expected[computed:counted])
        computed = counted


def test_no_ngram_reaches_over_a_picture(tmp_path: Path) -> None:
    folder = make_idefics3(tmp_path)
    add_engram(folder, 128, NUM_ROWS, ENGRAM, "model.text_model.")
    rig = Rig(folder)
    assert rig.config.tail_tokens == 2
    tokens = [*TOKENS[:6], IMAGE_TOKEN_ID, *TOKENS[6:10]]
    batch = rig.batch([Row(tokens, 6, 11, BLOCKS[0])])
    windows = rig._model._engrams._windows(batch)  # type: ignore[attr-defined]
    a, b, c, d, e, f = fold_tokens(folder / "tokenizer.json", VOCAB_SIZE)[[*tokens[4:6], *tokens[7:]]].tolist()
    assert windows.tolist() == [[DEAD, b, a], [c, DEAD, b], [d, c, DEAD], [e, d, c], [f, e, d]]


@pytest.mark.slow
def test_two_ranks_make_the_tokens_of_one(path: Path, tmp_path: Path) -> None:
    def tracks() -> list[Track]:
        return [Track(seq_id=i, tokens=TOKENS[i : i + 20], blocks=BLOCKS[i]) for i in range(2)]

    runner = lone_runner(path, 64)
    one, others = tracks(), tracks()
    alone = run_tracks(with_columns(runner.execute, one, tail_tokens=2), one, 7, 12)
    with start_ranks(path, tmp_path, 2) as ranks:
        ranks.set_up(64)
        assert run_tracks_ahead(with_columns(ranks.step, others, tail_tokens=2), others, 7, 12) == alone


def test_hashes_are_the_documented_ones() -> None:
    assert odd_constants(0, 0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]  # SplitMix64's first numbers
    assert odd_constants(0, 1, 2) == odd_constants(0, 0, 4)[2:]
    assert primes_up_to(30, 4) == [29, 23, 19, 17]
    rows = NgramHashes(CONFIG, 0).rows(np.array([[5, DEAD, 4], [5, 4, DEAD], [5, 4, 3], [5, 4, 3]]))
    assert (rows == -1).tolist() == [[True] * 4, [False, False, True, True], [False] * 4, [False] * 4]
    assert rows[1, :2].tolist() == rows[2, :2].tolist()
    assert len({*rows[2].tolist()}) > 1


def test_hashes_spread() -> None:
    ids = np.random.default_rng(0).integers(0, 20_000, (20_000, 3))
    rows = NgramHashes(CONFIG, 0).rows(ids)
    for table, prime in enumerate(primes_up_to(211, 4)):
        counts = np.bincount(rows[:, table], minlength=prime)
        assert len(counts) == prime
        assert counts.min() > 0.5 * len(ids) / prime


def test_sums_do_not_depend_on_the_rows_beside() -> None:
    x = torch.randn(33, 577)
    torch.testing.assert_close(sum_columns(x), x.double().sum(1, keepdim=True).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.cat([sum_columns(row[None]) for row in x]), sum_columns(x))


def test_gates_do_not_depend_on_the_rows_beside() -> None:
    x = 3 * torch.randn(3000, 1)
    together = sigmoid(x)
    torch.testing.assert_close(together, torch.sigmoid(x))
    assert torch.equal(torch.cat([sigmoid(row[None]) for row in x]), together)


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("Ärger", "arger"),
        ("Straße", "strasse"),
        ("\N{LATIN SMALL LIGATURE FI}n", "fin"),
        (" \t\n a", " a"),
        ("\N{FULLWIDTH LATIN CAPITAL LETTER A}", "a"),
        ("İ", "i"),
        ("\N{HANGUL SYLLABLE GAG}", "\N{HANGUL SYLLABLE GAG}"),
    ],
)
def test_texts_are_folded(text: str, folded: str) -> None:
    assert fold_text(text) == folded


def test_tokens_of_one_folded_text_share_an_id(tmp_path: Path) -> None:
    vocab = {"<s>": 0, "The": 1, "the": 2, "THÉ": 3, "sky": 4, "<img>": 5, "Sky": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folded = fold_tokens(tmp_path / "tokenizer.json", 9, dead=[5])  # 7 and 8 have no text
    assert folded.tolist() == [DEAD, 0, 0, 0, 1, DEAD, 1, DEAD, DEAD]


def test_parts_of_characters_stay_apart(path: Path) -> None:
    folded = fold_tokens(path / "tokenizer.json", VOCAB_SIZE)
    assert 0 < folded.max() < VOCAB_SIZE - 40
    names = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    assert folded[names["Ã"]] != folded[names["Â"]]  # two bytes that start a character
    assert folded[names["A"]] == folded[names["a"]]


def test_a_checkpoint_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        fold_tokens(tmp_path / "tokenizer.json", 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [0, 2]}, r"engram\.layers \[0, 2\] are not all among the 2 layers"),
        ({"max_ngram": 1}, r"engram\.max_ngram 1 leaves no n-gram"),
        ({"table_size": 63}, r"engram\.table_size 63 is too small for 4 tables"),
    ],
)
def test_what_cannot_be_hashed_is_refused(path: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "engram": {**ENGRAM, **change}}))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_ranks_share_the_tables_evenly(path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    assert tensor_parallel_sizes(load_model_config(path)) == [1, 2]
    odd = {**ENGRAM, "num_heads": 3, "max_ngram": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "engram": odd}))
    assert tensor_parallel_sizes(load_model_config(tmp_path)) == [1]
