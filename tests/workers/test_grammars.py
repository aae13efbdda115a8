"""Grammars on a worker: what the masks allow is what the grammar allows, whatever was tried and taken back before."""

from __future__ import annotations

import dataclasses
import json
import random
import select
import weakref
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from torch import Tensor

from airside.proto.grammar_limits import PARSER_LIMITS, RENEW_TOKENS
from airside.proto.messages import GrammarFailed, GrammarReady
from airside.workers import grammar as grammar_module
from airside.workers.grammars import Grammars, Wanted, apply_masks
from airside.workers.model_config import ModelConfig, load_model_config
from tests.checkpoints import SPECIAL_TOKENS, make_tokenizer
from tests.gateway.grammars import MANY_STATES
from tests.real_processes import wait_until

END = SPECIAL_TOKENS.index("<|im_end|>")
OTHER_END = SPECIAL_TOKENS.index("<|endoftext|>")
TOKENIZER = make_tokenizer()
ANY_JSON = LLMatcher.grammar_from_json_schema("{}")
GRAMMARS = [
    'start: "a" start | "b"',
    "start: /(a|b)+c?/",
    'start: WORD ("," WORD)*\nWORD: /[a-z]{1,4}/',
    'start: /[a-z]+/ "!"+\n%ignore / +/',
    "start: part part\npart[max_tokens=2]: /[a-z]*/",
    LLMatcher.grammar_from_json_schema('{"type":"array","items":{"enum":["x","yy",null,12]},"maxItems":3}'),
    LLMatcher.grammar_from_regex("[é東🙂]+!"),
    LLMatcher.grammar_from_regex("the (small|large) (circle|square)|the end"),
    ANY_JSON,
]
STUCK = 'start: "a" other\nother: other'
"""Takes an "a", and nothing after it."""
TOO_MUCH = 'start: other+\nother: other other | "a" | other other other'
"""Takes any number of "a", in more ways than the limits allow after a few hundred of them."""


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False).input_ids
    return encoded


def answers(grammars: Grammars) -> list[GrammarReady | GrammarFailed]:
    """The next answers, waited for."""
    assert select.select([grammars.wake_fd], [], [], 60)[0]
    return grammars.poll()


def opened(grammars: Grammars, seq_id: int, grammar: str, output_ids: Sequence[int] = ()) -> None:
    grammars.open(seq_id, grammar, np.array(output_ids, "<i4").tobytes())
    assert answers(grammars) == [GrammarReady(seq_id)]


def allowed(masks: Tensor) -> list[set[int]]:
    """The token ids of each row."""
    return [set(np.unpackbits(row, bitorder="little").nonzero()[0].tolist()) for row in masks.numpy()]


def masks(grammars: Grammars, seq_id: int, position: int, drafts: Sequence[int] = ()) -> Tensor:
    return grammars.masks([Wanted(seq_id, position, drafts)])


def one(grammars: Grammars, seq_id: int, position: int) -> set[int]:
    return allowed(masks(grammars, seq_id, position))[0]


@pytest.fixture(scope="module")
def config(llama_path: Path) -> ModelConfig:
    return load_model_config(llama_path)


@pytest.fixture(scope="module")
def grammars(llama_path: Path, config: ModelConfig) -> Grammars:
    return Grammars(str(llama_path), config)


ALL = set(range(512))


class Walk:
    """A random text of a grammar, made token by token, and what a fresh matcher says of each of its beginnings."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._fresh: dict[tuple[int, ...], set[int]] = {}

    def after(self, tokens: Sequence[int]) -> set[int]:
        """What a fresh matcher allows after these tokens; without end tokens."""
        key = tuple(tokens)
        if key not in self._fresh:
            opened(self._grammars, 1, self._grammar, key)
            self._fresh[key] = one(self._grammars, 1, len(key))
        return self._fresh[key]

    def text(self, choose: random.Random, length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length and (choices := self.after(tokens) - {END, OTHER_END}):
            tokens.append(choose.choice(sorted(choices)))
        return tokens


@settings(max_examples=60, deadline=None)
@given(grammar=st.sampled_from(GRAMMARS), seed=st.integers(0, 1 << 32), data=st.data())
def test_drafts_and_steps_back_leave_no_trace(grammars: Grammars, grammar: str, seed: int, data: st.DataObject) -> None:
    walk = Walk(grammars, grammar)
    text = walk.text(random.Random(seed), 12)
    opened(grammars, 2, grammar)
    position = 0
    for _ in range(12):
        position = data.draw(st.integers(max(0, position - 4), position), "position")  # later ones did not count
        drafts = text[position : position + data.draw(st.integers(0, 4), "drafts")]
        if drafts and data.draw(st.booleans(), "spoilt"):
            drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(st.integers(0, 511), "instead")
        rows = allowed(masks(grammars, 2, position, drafts))
        assert len(rows) == 1 + len(drafts)
        known = text[:position]
        for row, draft in zip(rows, [*drafts, None], strict=True):
            assert row == walk.after(known)
            if draft is None or draft not in row - {END, OTHER_END}:
                break
            known = [*known, draft]
        accepted = text[position : position + data.draw(st.integers(0, 4), "accepted")]
        grammars.advance(2, position, accepted)
        position += len(accepted)


def test_what_cannot_count_is_not_restricted(grammars: Grammars) -> None:
    a, b, c = ids("a")[0], ids("b")[0], ids("c")[0]
    opened(grammars, 3, GRAMMARS[0])
    rows = allowed(masks(grammars, 3, 0, [a, c, a]))
    assert rows[0] == rows[1]
    assert {a, b} <= rows[0]
    assert c not in rows[0]
    assert rows[2:] == [ALL, ALL], "the second draft is refused"
    assert allowed(masks(grammars, 3, 0, [b, END, a]))[1:] == [{END}, ALL, ALL], "the text ends with the second draft"


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_end_tokens_are_allowed_just_where_the_text_is_complete(grammars: Grammars, grammar: str) -> None:
    tokenizer = grammars._tokenizer
    assert tokenizer is not None
    choose = random.Random(0)
    opened(grammars, 4, grammar)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    for position in range(30):
        row = one(grammars, 4, position)
        assert (END in row) == matcher.is_accepting()
        if not row - {END}:
            assert matcher.is_accepting()
            break
        token = choose.choice(sorted(row - {END}))
        assert matcher.consume_token(token)
        grammars.advance(4, position, [token])


def test_all_end_tokens_of_the_checkpoint_end_a_text(llama_path: Path, tmp_path: Path) -> None:
    for file in llama_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER_END, 5]}))
    grammars = Grammars(str(tmp_path), load_model_config(tmp_path))
    opened(grammars, 1, 'start: "a"')
    grammars.advance(1, 0, ids("a"))
    assert one(grammars, 1, 1) == {OTHER_END, 5, END}, "those of the generation config and the tokenizer's own"


def test_a_step_planned_before_the_end_is_computed_in_vain(grammars: Grammars) -> None:
    b = ids("b")[0]
    for ending in ([b, END], [b, -1], [b, -2]):
        opened(grammars, 5, GRAMMARS[0])
        grammars.advance(5, 0, ending)
        assert allowed(masks(grammars, 5, 2, [b])) == [ALL, ALL]
        grammars.advance(5, 2, [b])
        assert allowed(masks(grammars, 5, 3)) == [ALL]
        assert grammars.poll() == []
        assert one(grammars, 5, 1) == {END}, "the end is sampled anew"


def test_a_position_ahead_is_a_programming_error(grammars: Grammars) -> None:
    opened(grammars, 6, GRAMMARS[0])
    with pytest.raises(AssertionError, match="position 1 after 0 tokens"):
        masks(grammars, 6, 1)


def test_what_was_made_before_is_replayed(grammars: Grammars) -> None:
    a, b = ids("a")[0], ids("b")[0]
    opened(grammars, 7, GRAMMARS[0], [a, a, b])
    assert one(grammars, 7, 3) == {END}
    assert b in one(grammars, 7, 2)
    opened(grammars, 7, GRAMMARS[0], [b, END, a])
    assert one(grammars, 7, 3) == ALL, "it has ended, as it would have without a replay"
    assert one(grammars, 7, 1) == {END}
    grammars.open(7, GRAMMARS[0], np.array([b, b], "<i4").tobytes())
    failed = answers(grammars)[0]
    assert isinstance(failed, GrammarFailed)
    assert failed.detail.startswith("the grammar cannot go on from the output so far: ")


def test_a_grammar_that_cannot_be_built_is_answered(grammars: Grammars) -> None:
    grammars.open(8, 'start: ("a"', b"")
    grammars.open(9, GRAMMARS[0], b"")
    seen = answers(grammars)
    while len(seen) < 2:
        seen += answers(grammars)
    by_id = {answer.seq_id: answer for answer in seen}
    assert isinstance(by_id[8], GrammarFailed)
    assert "Expected" in by_id[8].detail
    assert "\n" not in by_id[8].detail
    assert by_id[9] == GrammarReady(9)


def test_a_grammar_that_is_stuck_allows_nothing_and_says_so(grammars: Grammars) -> None:
    a = ids("a")[0]
    opened(grammars, 10, STUCK)
    assert allowed(masks(grammars, 10, 0, [a, a])) == [{a}, set(), ALL], "an end token would leave it incomplete"
    assert one(grammars, 10, 0) == {a}, "the draft may not be accepted"
    assert grammars.poll() == []
    grammars.advance(10, 0, [a])
    for _ in range(2):
        assert one(grammars, 10, 1) == set()
        grammars.advance(10, 1, [-2])
        detail = "the grammar cannot go on: it allows nothing that could come next"
        assert grammars.poll() == [GrammarFailed(10, detail)]
    assert one(grammars, 10, 2) == ALL, "computed in vain"


def test_a_token_from_elsewhere_is_a_failure(grammars: Grammars) -> None:
    opened(grammars, 11, GRAMMARS[0])
    grammars.advance(11, 0, ids("z"))
    assert one(grammars, 11, 1) == set()
    grammars.advance(11, 1, [-2])
    (failed,) = grammars.poll()
    assert isinstance(failed, GrammarFailed)
    assert "doesn't satisfy the grammar" in failed.detail


def test_a_token_after_which_the_grammar_is_too_much_counts(grammars: Grammars) -> None:
    """Whether it was a draft or not."""
    a = ids("a")[0]
    opened(grammars, 17, TOO_MUCH)
    length = 0
    while a in one(grammars, 17, length):
        grammars.advance(17, length, [a])
        length += 1
        assert grammars.poll() == []
    grammars.advance(17, length, [-2])
    (failed,) = grammars.poll()
    assert isinstance(failed, GrammarFailed)
    assert failed.detail.startswith("the grammar cannot go on: Parser Error: Current row has ")
    opened(grammars, 18, TOO_MUCH, [a] * (length - 3))
    rows = allowed(masks(grammars, 18, length - 3, [a] * 4))
    assert [a in row for row in rows] == [True, True, True, False, True]


def test_a_closed_or_replaced_build_is_not_answered(grammars: Grammars) -> None:
    b = ids("b")[0]
    grammars.open(12, GRAMMARS[0], b"")
    grammars.close(12)
    grammars.open(13, ANY_JSON, b"")
    grammars.open(13, 'start: "b"', b"")
    seen: list[GrammarReady | GrammarFailed] = []
    while not seen:
        seen = answers(grammars)
    assert seen == [GrammarReady(13)]
    assert one(grammars, 13, 0) == {b}
    opened(grammars, 14, GRAMMARS[0])  # whatever was left has been built before
    grammars.close(13)
    grammars.close(13)
    with pytest.raises(KeyError):
        masks(grammars, 13, 0)
    assert not select.select([grammars.wake_fd], [], [], 0)[0]


def test_nothing_is_kept_of_a_closed_sequence(grammars: Grammars) -> None:
    opened(grammars, 19, GRAMMARS[0])
    one(grammars, 19, 0)
    grammars.advance(19, 0, [-2])
    kept = weakref.ref(grammars._grammars[19])
    grammars.close(19)
    assert not grammars._tickets
    wait_until(lambda: kept() is None, 10, "the grammar is gone, once the thread that built it waits again")


def test_sequences_do_not_meet(grammars: Grammars) -> None:
    a = ids("a")[0]
    opened(grammars, 15, GRAMMARS[0])
    opened(grammars, 16, GRAMMARS[0])
    before = one(grammars, 16, 0)
    grammars.advance(15, 0, [a, a])
    assert one(grammars, 16, 0) == before
    assert one(grammars, 15, 2) == before


class CountingExecutor:
    """Remembers how many masks it was asked for at once."""

    def __init__(self) -> None:
        self._executor = LLExecutor(2)
        self.counts: list[int] = []

    def unsafe_compute_mask_ptr(self, asks: list[tuple[LLMatcher, int]], *place: int) -> None:
        self.counts.append(len(asks))
        self._executor.unsafe_compute_mask_ptr(asks, *place)


def test_masks_of_many_are_those_of_each(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the others in the same step."""
    a, b, c = ids("a")[0], ids("b")[0], ids("c")[0]
    wanted = [
        Wanted(21, 0, [a, a, b, a]),
        Wanted(22, 0, [a, a]),  # stuck with the first draft
        Wanted(23, 1, [b]),  # has ended
        Wanted(24, 0, []),
        Wanted(25, 0, [c]),  # refused
    ]
    structures = [GRAMMARS[0], STUCK, 'start: "b"', ANY_JSON, GRAMMARS[0]]

    def each() -> list[Tensor]:
        for want, structure in zip(wanted, structures, strict=True):
            opened(grammars, want.seq_id, structure)
        grammars.advance(23, 0, [END])
        return [grammars.masks([want]) for want in wanted]

    one_by_one = torch.cat(each())
    each()
    executor = CountingExecutor()
    monkeypatch.setattr(grammars, "_executor", executor)
    for _ in range(2):
        assert torch.equal(grammars.masks(wanted), one_by_one)
        assert executor.counts == [4, 2, 1, 1], "those that wait for the same number of drafts go together"
        executor.counts.clear()


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lexers that hold no more than so many states."""
    number = 1500
    limits = LLParserLimits(**{**PARSER_LIMITS, "max_lexer_states": number})  # type: ignore[arg-type]
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    return number


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_lexer_that_is_full_is_made_anew(grammars: Grammars, num_drafts: int) -> None:
    """A long text of counted letters has a state per letter, and per letter that a token tried might add."""
    structure = LLMatcher.grammar_from_regex("([a-z ]|[A-Z]x|[0-9]yz){1,5000}")
    tokenizer = grammars._tokenizer
    assert tokenizer is not None
    plain = LLMatcher(tokenizer, structure, log_level=0)
    opened(grammars, 26, structure)
    first = grammars._grammars[26]._matcher
    dice, length = random.Random(0), 0
    while length < 450:  # later the text itself has as many states
        text: list[int] = []
        expected: list[set[int]] = []
        for _ in range(1 + num_drafts):
            mask = torch.frombuffer(bytearray(plain.compute_bitmask()), dtype=torch.uint8)
            expected += allowed(mask[None])
            text.append(dice.choice(sorted(expected[-1] - {END, OTHER_END})))
            assert plain.consume_token(text[-1])
        assert allowed(masks(grammars, 26, length, text[:-1])) == expected
        grammars.advance(26, length, text)
        length += len(text)
    assert grammars._grammars[26]._matcher is not first, "its lexer was never full"
    assert grammars.poll() == []


def test_a_lexer_that_is_full_too_soon_ends_its_sequence_alone(grammars: Grammars, few_states: int) -> None:
    """Not another of the same grammar either: matchers that share a lexer share its errors."""
    structure = LLMatcher.grammar_from_regex(f"{MANY_STATES.regex}|!+")
    bang = ids("!")[0]
    opened(grammars, 27, structure)
    opened(grammars, 28, structure)
    dice, length = random.Random(0), 0
    while choices := one(grammars, 27, length) - {bang, END, OTHER_END}:
        token = dice.choice(sorted(choices))
        grammars.advance(27, length, [token])
        length += 1
        assert length < RENEW_TOKENS
    grammars.advance(27, length, [-2])
    assert grammars.poll() == [
        GrammarFailed(27, f"the grammar cannot go on: lexer error: too many states: {few_states} >= {few_states}")
    ]
    for position in range(3):
        assert bang in one(grammars, 28, position)
        grammars.advance(28, position, [bang])
    assert grammars.poll() == []


def test_a_checkpoint_without_a_tokenizer_fails_its_grammars_alone(tmp_path: Path, config: ModelConfig) -> None:
    grammars = Grammars(str(tmp_path), config)
    grammars.open(1, GRAMMARS[0], b"")
    (failed,) = answers(grammars)
    assert isinstance(failed, GrammarFailed)
    assert "cannot use this checkpoint's tokenizer" in failed.detail


@pytest.mark.parametrize("name", ["idefics3_path", "odd_vocabulary_path"])
def test_checkpoints_of_other_kinds(request: pytest.FixtureRequest, name: str) -> None:
    path: Path = request.getfixturevalue(name)
    grammars = Grammars(str(path), load_model_config(path))
    opened(grammars, 1, 'start: "b"')
    rows = masks(grammars, 1, 0)
    assert allowed(rows) == [set(ids("b"))]
    logits = torch.zeros(1, load_model_config(path).vocab_size)
    apply_masks(logits, torch.tensor([0]), rows)
    assert logits.isfinite().sum() == 1


def test_a_gguf_file_has_its_vocabulary_with_it(tmp_path: Path, config: ModelConfig) -> None:
    tokens = ["<|endoftext|>", "a", "b", "ab", "Ġ"]
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    for add in (writer.add_head_count, writer.add_head_count_kv, writer.add_block_count):
        add(1)
    for add in (writer.add_embedding_length, writer.add_feed_forward_length, writer.add_context_length):
        add(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    grammars = Grammars(str(path), dataclasses.replace(config, eos_token_ids=(0,)))
    opened(grammars, 1, "start: /a|ab/")
    assert one(grammars, 1, 0) == {1, 3}
    grammars.advance(1, 0, [3])
    assert one(grammars, 1, 1) == {0}


def test_masks_are_applied_to_their_rows() -> None:
    random_bits = torch.randint(0, 256, (2, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    logits = torch.arange(3 * 500, dtype=torch.float32).view(3, 500)
    expected = logits.numpy().copy()
    for row, bits in zip((2, 0), random_bits.numpy(), strict=True):
        expected[row, np.unpackbits(bits, bitorder="little")[:500] == 0] = -np.inf
    apply_masks(logits, torch.tensor([2, 0]), random_bits)
    assert np.array_equal(logits.numpy(), expected)


SCHEMAS: list[dict[str, object]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 100}, "minItems": 1, "maxItems": 3},
    {"enum": ["x", 1, None, {"k": [True]}]},
    {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
    {"type": "string", "format": "date"},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}},
    {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[a-c]{2,3}$"}, "maxProperties": 2},
]
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_the_model_says_the_json_is_valid(grammars: Grammars, schema: dict[str, object]) -> None:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)  # type: ignore[arg-type]
    num_complete = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        opened(grammars, 20, grammar)
        tokens: list[int] = []
        while len(tokens) < 200 and END not in tokens:
            logits = torch.randn(1, 512, generator=generator)
            logits[0, END] += 4  # so that most texts end
            apply_masks(logits, torch.tensor([0]), masks(grammars, 20, len(tokens)))
            token = int(logits.argmax())
            assert logits[0, token].isfinite()
            grammars.advance(20, len(tokens), [token])
            tokens.append(token)
        if tokens[-1] == END:
            num_complete += 1
            jsonschema.validate(json.loads(TOKENIZER.decode(tokens[:-1])), schema)
    assert num_complete >= 3
