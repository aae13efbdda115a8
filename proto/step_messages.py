"""What the controller and the model workers say to one another: the part of `messages.py` that makes up a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from airside.proto.codec import Message, message

# --- worker -> controller -----------------------------------------------------------------------------------------


@message(30)
class WorkerHello(Message):
    """A rank has loaded its weights. `group` counts the launches of the whole worker group."""

    rank: int
    world_size: int
    group: int
    node: str
    pid: int
    num_blocks: int  # how many KV blocks this rank can hold
    load_s: float
    num_state_slots: int = 0  # sequences whose fixed-size state this rank can hold; 0: the model has none


@message(31)
class StepResult(Message):
    """From rank 0: one token for each position that the plan asked to sample, in the plan's order.

    Records are as in `logprob_record.py`. The draft columns are there when the worker has a draft head.
    """

    step_id: int
    sampled: bytes  # i32 [sum(plan.sampled)]; -1 where no token had a probability, -2 where the grammar allowed none
    execute_s: float
    logprobs: bytes = b""  # records of all sampled positions of each row that wants them
    prompt_logprobs: bytes = b""  # records of all prompt positions asked for
    num_drafts: bytes = b""  # i32 [num_sampling]: proposals for what follows each row that samples
    draft_tokens: bytes = b""  # i32 [sum(num_drafts)]
    draft_confidences: bytes = b""  # f32 [sum(num_drafts)]: what the draft head gives each, a probability
    encoded: list[EncodedRow] = field(default_factory=list)  # images first used by their sequence, or encoded again


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """The embeddings of one image were computed, or found."""

    seq_id: int
    image_index: int
    encode_s: float  # 0: found, from an equal picture
    kept_bytes: int = 0  # of all embeddings that the rank keeps now


@message(32)
class WorkerFailed(Message):
    """A rank cannot go on; it exits after sending this."""

    rank: int
    detail: str


@message(33)
class GrammarReady(Message):
    """From rank 0: the grammar of `OpenGrammar` is built; the sequence may sample."""

    seq_id: int


@message(34)
class GrammarFailed(Message):
    """From rank 0: the grammar could not be built, or cannot go on."""

    seq_id: int
    detail: str


# --- controller -> worker -----------------------------------------------------------------------------------------


@message(40)
class KvSetup(Message):
    """To every rank once all have said hello: allocate this many KV blocks."""

    num_blocks: int


@message(41)
class StepPlan(Message):
    """To every rank: one step. Plans are executed in the order of their ids.

    Row i is one sequence: tokens `[num_computed[i], num_computed[i] + num_new[i])` are computed, their KV written to
    the blocks of its table. The last `sampled[i]` of them are sampled: 0 for a chunk that does not reach the end; else
    1, and one more for each draft token, which are the last tokens of the row. Columns marked `num_sampling` have one
    entry per row with `sampled[i] > 0`, those marked `num_positions` one per sampled position.

    A negative token id `-1 - j` stands for what position j of the step before (`step_id - 1`) sampled: that step was
    still being computed when this one was planned.

    Of a row with drafts, sampled tokens count up to and including the first that differs from the draft beside it.
    """

    step_id: int
    seq_ids: bytes  # u64 [num_seqs]
    num_computed: bytes  # i32 [num_seqs]
    num_new: bytes  # i32 [num_seqs]
    token_ids: bytes  # i32 [sum(num_new)]
    num_blocks: bytes  # i32 [num_seqs]: length of each block table
    block_tables: bytes  # i32 [sum(num_blocks)]
    sampled: bytes  # u8 [num_seqs]
    temperature: bytes  # f32 [num_sampling]
    top_k: bytes  # i32 [num_sampling]
    top_p: bytes  # f32 [num_sampling]
    min_p: bytes  # f32 [num_sampling]
    seed: bytes  # u64 [num_sampling]
    position: bytes  # i64 [num_sampling]: index in the output of the first token sampled
    banned: dict[int, list[int]] = field(default_factory=dict)  # sampled position -> ids not to be sampled there
    images: list[ImageRow] = field(default_factory=list)
    forced: bytes = b""  # i32 [num_positions]: taken whatever is sampled; -1: none. b"": none at all
    logprobs: bytes = b""  # i32 [num_sampling]: alternatives in each record; -1: no records. b"": none at all
    prompt_logprobs: list[PromptLogprobRow] = field(default_factory=list)
    structured: bytes = b""  # u8 [num_sampling]: 1 where the sequence's grammar restricts. b"": nowhere
    drafts_wanted: bytes = b""  # i32 [num_sampling]: proposals the draft head should make after each. b"": none
    opened: list[OpenedRow] = field(default_factory=list)
    closed: bytes = b""  # u64: sequences whose `OpenedRow`, and all kept for them, may be forgotten
    state_slots: bytes = b""  # i32 [num_seqs]: where each keeps its fixed-size state. b"": the model has none
    state_from: bytes = b""  # i32 [num_seqs]: the block after which the state is taken up; -1: the slot's own
    tail_ids: bytes = b""  # i32 [num_seqs * n]: the n tokens before each row, oldest first; -1: before the start
    position_shifts: bytes = b""  # i32 [num_seqs]: tokens less rope positions of the pictures before each row. b"": 0
    ahead: list[ImageRow] = field(default_factory=list)  # to be encoded for later steps; of none is a part read here


@dataclass(frozen=True, slots=True)
class PromptLogprobRow:
    """Records are wanted of prompt tokens: those after tokens `[start, start + len(targets))` of plan row `row`."""

    row: int
    start: int  # counted in the row's tokens
    k: int  # alternatives in each record
    targets: bytes  # i32: the prompt's tokens at the positions that follow


@dataclass(frozen=True, slots=True)
class OpenedRow:
    """What the sampler must know of a sequence beyond the columns; sent with its first plan of a launch."""

    seq_id: int
    num_prompt_tokens: int
    token_ids: bytes  # i32: prompt and output, as far as they are known
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: list[int]  # empty: all


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor inside a slab. `offset` counts bytes from the start of the slab."""

    name: str
    dtype: str  # numpy's name
    shape: list[int]
    offset: int


@dataclass(frozen=True, slots=True)
class PixelsRef:
    """Processed pixels of one image: a slab of a segment, and the tensors in it.

    The segment is shared memory, or, of a vision worker that does not share its memory, but the name under which the
    ranks have got the slab (`PixelsParcel`).
    """

    segment: str
    slab: int  # byte offset of the slab in the segment
    num_bytes: int
    tensors: list[TensorRef]


@dataclass(frozen=True, slots=True)
class ImageRow:
    """One image that this step touches, in token order.

    The step's tokens that equal the model's image token are, over all rows of the plan in order, embeddings
    `[embed_start, embed_start + embed_count)` of each ImageRow's picture in turn.
    """

    seq_id: int
    image_index: int
    embed_start: int
    embed_count: int
    pixels: PixelsRef
    content_hash: bytes = b""  # equal for equal pictures; b"": not known


@message(43)
class OpenGrammar(Message):
    """To rank 0: build this grammar and take it past the output so far. Answered with GrammarReady or GrammarFailed."""

    seq_id: int
    grammar: str  # llguidance's serialized form
    output_ids: bytes  # i32


@message(44)
class CloseGrammar(Message):
    """To rank 0: the sequence has ended."""

    seq_id: int


@message(45)
class PixelsParcel(Message):
    """To every rank, before the first plan of a launch that names this slab: its bytes, which are the one attachment.

    Only for slabs of segments that the ranks cannot map. They keep it until `DropPixels`.
    """

    segment: str
    slab: int
    num_bytes: int


@message(46)
class DropPixels(Message):
    """To every rank that has a slab's `PixelsParcel`: no plan names it any more. Another may come in its place."""

    segment: str
    slab: int
