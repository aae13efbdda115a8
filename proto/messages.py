"""Every message that travels between Airside's own processes, as a typed class.

Large binary parts (image files) follow a message as frames of their own, so that nobody copies them to look at the
rest. Hot messages are columnar: arrays travel as little-endian bytes, named here with their dtype.

Kinds are numbered once and never renumbered; a field is only ever added at the end, with a default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from airside.proto.codec import Message as Message
from airside.proto.codec import MessageRefused as MessageRefused
from airside.proto.codec import decode as decode
from airside.proto.codec import encode as encode
from airside.proto.codec import message

# --- any process -> controller ------------------------------------------------------------------------------------


@message(1)
class Heartbeat(Message):
    """Sent by every peer when it has had nothing else to say for a second."""

    rss_bytes: int


# --- gateway -> controller ----------------------------------------------------------------------------------------


@message(10)
class GatewayHello(Message):
    """First message of a gateway; answered with `EngineState`."""

    node: str
    pid: int


@message(11)
class AddRequest(Message):
    """A checked and tokenized request. One attachment per image: the bytes of the file, in mark order."""

    seq_id: int
    request_id: str
    token_ids: bytes  # i32
    image_positions: list[int]  # index of each image's mark in token_ids, increasing
    arrival: float  # unix time of the RPC
    priority: int
    deadline: float | None  # unix time
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: list[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@message(12)
class AbortSequence(Message):
    """The client is gone, cancelled, or out of time. Not answered; the end comes as a finish."""

    seq_id: int
    cause: str


@message(13)
class AbortByName(Message):
    """`Control.Abort`. Answered with `AbortOutcome`."""

    query_id: int
    request_id: str


@message(14)
class ScaleVision(Message):
    """`Control.ScaleVision`. Answered with `ScaleVisionOutcome`, and passed on to the supervisor."""

    query_id: int
    replicas: int


@message(15)
class GaugesQuery(Message):
    """Answered with `Gauges`."""

    query_id: int


@message(16)
class PeersQuery(Message):
    """Answered with `Peers`."""

    query_id: int


# --- controller -> gateway ----------------------------------------------------------------------------------------


@message(20)
class EngineState(Message):
    """What a gateway must know to check requests. Sent on its hello and on every change."""

    state: str  # "starting" | "ready" | "recovering"
    detail: str
    max_model_len: int
    kv_tokens_max: int  # the longest sequence that the KV pool can ever hold
    vision_ready: bool


@message(21)
class Accepted(Message):
    """The sequence is in the waiting queue."""

    seq_id: int
    queue_position: int


@message(22)
class Rejected(Message):
    """The sequence never entered the queue.

    `code` is one of "duplicate_id", "context_exceeded", "pool_exceeded", "queue_full", "unavailable", "invalid".
    """

    seq_id: int
    code: str
    detail: str


@message(23)
class ImageReady(Message):
    """The pixels of one image are in."""

    seq_id: int
    image_index: int
    num_tokens: int
    process_s: float


@message(24)
class OutputBatch(Message):
    """All new tokens of one step for one gateway, and all ends since the last batch.

    Row i of the columns: sequence `seq_ids[i]` made the next `num_tokens[i]` entries of `token_ids`.
    """

    seq_ids: bytes  # u64
    num_tokens: bytes  # i32
    token_ids: bytes  # i32
    finished: list[FinishedRow] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """Each row's sequence and its new token ids. Raises TypeError or ValueError on columns that do not fit."""
        seq_ids, counts = memoryview(self.seq_ids).cast("Q"), memoryview(self.num_tokens).cast("i")
        token_ids = memoryview(self.token_ids).cast("i")
        begin = 0
        for seq_id, count in zip(seq_ids, counts, strict=True):
            yield seq_id, token_ids[begin : begin + count].tolist()
            begin += count


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """The one end of one sequence; its last tokens are in the same batch or an earlier one. Times are durations."""

    seq_id: int
    reason: str
    detail: str
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    preemptions: int
    queued_s: float
    time_to_first_token_s: float
    decode_s: float


@message(25)
class AbortOutcome(Message):
    """`outcome` is "aborted", "already_finished" or "unknown"."""

    query_id: int
    outcome: str


@message(26)
class ScaleVisionOutcome(Message):
    """`refused` is empty when the target was taken."""

    query_id: int
    replicas: int
    refused: str
    is_out_of_range: bool = False  # it was refused for the number asked for, not for what the server can do now


@message(27)
class Gauges(Message):
    """Numbers for `GetServerInfo`, by their names in `airside.v1.Gauges`."""

    query_id: int
    gauges: dict[str, float]
    requests_finished: dict[str, int]
    bus_messages_refused: dict[str, int]


@message(28)
class Peers(Message):
    """Rows for `ListWorkers`."""

    query_id: int
    peers: list[PeerRow]
    vision_target: int
    vision_pending: str


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One process. Fields as in `airside.v1.Worker`."""

    role: str
    name: str
    rank: int
    node: str
    pid: int
    state: str
    last_heard_s: float
    jobs_done: int
    rss_bytes: int


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


@message(31)
class StepResult(Message):
    """From rank 0: one sampled token for each row that the plan asked to sample, in the plan's order."""

    step_id: int
    sampled: bytes  # i32; -1 where no token had a probability
    execute_s: float


@message(32)
class WorkerFailed(Message):
    """A rank cannot go on; it exits after sending this."""

    rank: int
    detail: str


# --- controller -> worker -----------------------------------------------------------------------------------------


@message(40)
class KvSetup(Message):
    """To every rank once all have said hello: allocate this many KV blocks."""

    num_blocks: int


@message(41)
class StepPlan(Message):
    """To every rank: one step, complete in itself; ranks keep nothing about sequences between steps but KV blocks.

    Row i is one sequence: tokens `[num_computed[i], num_computed[i] + num_new[i])` are computed, their KV written to
    the blocks of its table. Rows with `sampled[i] == 1` sample one token from the last position's logits; the
    sampling columns have one entry per such row.
    """

    step_id: int
    seq_ids: bytes  # u64 [num_seqs]
    num_computed: bytes  # i32 [num_seqs]
    num_new: bytes  # i32 [num_seqs]
    token_ids: bytes  # i32 [sum(num_new)]
    num_blocks: bytes  # i32 [num_seqs]: length of each block table
    block_tables: bytes  # i32 [sum(num_blocks)]
    sampled: bytes  # u8 [num_seqs]
    temperature: bytes  # f32 [num_sampled]
    top_k: bytes  # i32 [num_sampled]
    top_p: bytes  # f32 [num_sampled]
    min_p: bytes  # f32 [num_sampled]
    seed: bytes  # u64 [num_sampled]
    position: bytes  # i64 [num_sampled]: how many tokens the sequence has made so far
    banned: dict[int, list[int]] = field(default_factory=dict)  # sampled row -> token ids with no probability
    images: list[ImageRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor inside an arena segment. `offset` counts bytes from the start of the slab."""

    name: str
    dtype: str  # numpy's name
    shape: list[int]
    offset: int


@dataclass(frozen=True, slots=True)
class PixelsRef:
    """Processed pixels of one image in the arena: a slab of a segment, and the tensors in it."""

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


@message(42)
class Shutdown(Message):
    """To any peer: finish what is in hand and exit."""

    why: str


# --- vision worker -> controller ----------------------------------------------------------------------------------


@message(50)
class VisionHello(Message):
    """A vision worker is up; `segment` is the shared-memory segment that it alone allocates from."""

    node: str
    pid: int
    segment: str


@message(51)
class Credit(Message):
    """The worker can take this many more jobs."""

    jobs: int


@message(52)
class Shape(Message):
    """From the header alone: the exact token ids that take the place of this image's mark."""

    seq_id: int
    image_index: int
    epoch: int
    expansion: bytes  # i32


@message(53)
class Pixels(Message):
    """The image's tensors are in the arena; the slab is the controller's until it sends `Release`."""

    seq_id: int
    image_index: int
    epoch: int
    pixels: PixelsRef
    process_s: float


@message(54)
class ImageFailed(Message):
    """The image cannot be used. `cause` is a short stable word ("truncated", "too_large", ...), `detail` a sentence."""

    seq_id: int
    image_index: int
    epoch: int
    cause: str
    detail: str


@message(55)
class Goodbye(Message):
    """A drained worker has nothing left, holds no slab, and exits."""


# --- controller -> vision worker ----------------------------------------------------------------------------------


@message(60)
class Job(Message):
    """Process one image; its bytes are the attachment. `epoch` counts the attempts at this image."""

    seq_id: int
    image_index: int
    epoch: int


@message(61)
class Cancel(Message):
    """Nobody wants this image any more. Harmless when it is done already."""

    seq_id: int
    image_index: int
    epoch: int


@message(62)
class Release(Message):
    """The slab at this byte offset of the worker's segment is free again."""

    slab: int


@message(63)
class Drain(Message):
    """Take no more jobs; finish those in hand, wait for all slabs to come back, say goodbye, exit."""


# --- supervisor <-> controller ------------------------------------------------------------------------------------


@message(70)
class SupervisorHello(Message):
    """First message of the supervisor; answered with `VisionTarget`."""

    node: str
    pid: int


@message(71)
class PeerLost(Message):
    """Supervisor -> controller: the process with this bus name is gone."""

    name: str
    detail: str


@message(72)
class VisionPool(Message):
    """Supervisor -> controller: how many vision workers there should be, and why there are fewer (or "")."""

    target: int
    pending: str


@message(73)
class DrainVision(Message):
    """Supervisor -> controller: this vision worker is to go."""

    name: str


@message(74)
class VisionTarget(Message):
    """Controller -> supervisor: someone asked for this many vision workers."""

    replicas: int


@message(75)
class PeerStuck(Message):
    """Controller -> supervisor: this process was given up, but may live on, stopped or hung. It is to be ended.

    `pid` tells it from a new process of the same name.
    """

    name: str
    pid: int
    why: str
