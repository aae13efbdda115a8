"""Every message that travels between Airside's own processes, as a typed class.

Those between the controller and the model workers are in `step_messages.py`, those between it and the vision workers in
`vision_messages.py`. Large binary parts (image files, pixels) follow a message as frames of their own, so that nobody
copies them to look at the rest. Hot messages are columnar: arrays travel as little-endian bytes, named here with their
dtype.

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
from airside.proto.step_messages import CloseGrammar as CloseGrammar
from airside.proto.step_messages import DropPixels as DropPixels
from airside.proto.step_messages import EncodedRow as EncodedRow
from airside.proto.step_messages import GrammarFailed as GrammarFailed
from airside.proto.step_messages import GrammarReady as GrammarReady
from airside.proto.step_messages import ImageRow as ImageRow
from airside.proto.step_messages import KvSetup as KvSetup
from airside.proto.step_messages import OpenedRow as OpenedRow
from airside.proto.step_messages import OpenGrammar as OpenGrammar
from airside.proto.step_messages import PixelsParcel as PixelsParcel
from airside.proto.step_messages import PixelsRef as PixelsRef
from airside.proto.step_messages import PromptLogprobRow as PromptLogprobRow
from airside.proto.step_messages import StepPlan as StepPlan
from airside.proto.step_messages import StepResult as StepResult
from airside.proto.step_messages import TensorRef as TensorRef
from airside.proto.step_messages import WorkerFailed as WorkerFailed
from airside.proto.step_messages import WorkerHello as WorkerHello
from airside.proto.vision_messages import ArenaFull as ArenaFull
from airside.proto.vision_messages import Cancel as Cancel
from airside.proto.vision_messages import Credit as Credit
from airside.proto.vision_messages import Drain as Drain
from airside.proto.vision_messages import Fetched as Fetched
from airside.proto.vision_messages import Goodbye as Goodbye
from airside.proto.vision_messages import ImageFailed as ImageFailed
from airside.proto.vision_messages import Job as Job
from airside.proto.vision_messages import Pixels as Pixels
from airside.proto.vision_messages import Probe as Probe
from airside.proto.vision_messages import Release as Release
from airside.proto.vision_messages import Shape as Shape
from airside.proto.vision_messages import VisionHello as VisionHello

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
    """A checked and tokenized request. One attachment per image: the bytes of the file, in mark order.

    A picture that is to be fetched has an empty attachment; its entry of `image_hashes` is b"", since only `Fetched`
    says what was found there.

    `logprobs` and `prompt_logprobs`: how many alternatives come with each token's log-probability; -1: none at all.
    `golden_mode`: "force" makes the golden tokens the output, whatever the model would choose; "draft" offers them as
    draft tokens, of which a share of `golden_acceptance` is left unspoilt; "" is for requests without any.
    """

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
    user: str = ""  # users get equal shares of the engine
    cache_salt: str = ""  # cached blocks are shared among requests of the same salt
    image_hashes: list[bytes] = field(default_factory=list)  # 16 bytes per image: its content and all options
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)  # empty: all
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: str = ""  # llguidance's serialized form; "": unstructured
    drafts_max: int | None = None  # draft tokens per step; None: as the engine is configured
    golden_tokens: bytes = b""  # i32
    golden_mode: str = ""  # "" | "force" | "draft"
    golden_acceptance: float = 1.0
    image_urls: list[str] = field(default_factory=list)  # per image; "": its bytes are the attachment. []: all are
    image_min_pixels: list[int] = field(default_factory=list)  # per image, as in `PixelRange`. []: none has any
    image_max_pixels: list[int] = field(default_factory=list)


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
    """`Control.ScaleVision`. Answered with `ScaleVisionOutcome`, and passed on to the supervisor.

    From `replicas` to `replicas_max` vision workers as the load asks for; None: exactly `replicas`.
    """

    query_id: int
    replicas: int
    replicas_max: int | None = None


@message(15)
class GaugesQuery(Message):
    """Answered with `Gauges`."""

    query_id: int


@message(16)
class PeersQuery(Message):
    """Answered with `Peers`."""

    query_id: int


@message(17)
class StopSequence(Message):
    """A stop string is complete in the text of the first `num_tokens` output tokens; what came after them is void.

    Not answered; the end comes as a finish with reason "stop", unless the sequence has ended already.
    """

    seq_id: int
    num_tokens: int
    detail: str


@message(18)
class CountImages(Message):
    """How many tokens images take, by their headers. One attachment per image: its file. Answer: `ImagesCounted`."""

    query_id: int
    min_pixels: list[int] = field(default_factory=list)  # as in `AddRequest`
    max_pixels: list[int] = field(default_factory=list)


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
    """The pixels of one image are in. `stages`: how long each took; `cached`: they had been made before."""

    seq_id: int
    image_index: int
    num_tokens: int
    process_s: float  # decoding included
    cached: bool = False
    stages: ImageStages | None = None
    pixels: int = 0  # width times height of the picture; 0: not known


@dataclass(frozen=True, slots=True)
class ImageStages:
    """Where a picture's time went, in seconds. 0 for what did not happen."""

    fetch_s: float = 0.0  # from a URL
    queue_s: float = 0.0  # known by its header, waiting for a vision worker
    decode_s: float = 0.0
    process_s: float = 0.0  # from upright RGB to tensors
    transport_s: float = 0.0  # on the bus and waiting for room in the arena


@message(29)
class ImageEncoded(Message):
    """A worker has the embeddings of one image, and computed them for so long; 0: an equal picture had left them."""

    seq_id: int
    image_index: int
    encode_s: float


@message(24)
class OutputBatch(Message):
    """All new tokens of one step for one gateway, and all ends since the last batch.

    Row i of the columns: sequence `seq_ids[i]` made the next `num_tokens[i]` entries of `token_ids`. Log-probabilities
    are records as in `logprob_record.py`, one per token, of those rows alone that asked for them.
    """

    seq_ids: bytes  # u64
    num_tokens: bytes  # i32
    token_ids: bytes  # i32
    finished: list[FinishedRow] = field(default_factory=list)
    step_tokens: int = 0  # tokens computed, over all sequences, in the step that made these
    logprob_sizes: bytes = b""  # i32 [rows]: bytes of each row's records; b"": nobody has any
    logprobs: bytes = b""
    prompt_seq_ids: bytes = b""  # u64: sequences whose next prompt positions have records here
    prompt_sizes: bytes = b""  # i32: bytes of each one's records
    prompt_logprobs: bytes = b""

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """Each row's sequence and its new token ids. Raises TypeError or ValueError on columns that do not fit."""
        seq_ids, counts = memoryview(self.seq_ids).cast("Q"), memoryview(self.num_tokens).cast("i")
        token_ids = memoryview(self.token_ids).cast("i")
        begin = 0
        for seq_id, count in zip(seq_ids, counts, strict=True):
            yield seq_id, token_ids[begin : begin + count].tolist()
            begin += count

    def records(self) -> Iterator[bytes]:
        """The log-probability records of each of `rows`, b"" where nobody asked for any."""
        return _pieces(self.logprobs, self.logprob_sizes or bytes(len(self.num_tokens)))

    def prompt_rows(self) -> Iterator[tuple[int, bytes]]:
        """Sequences, and the records of their next prompt positions. Raises ValueError as `rows`."""
        pieces = _pieces(self.prompt_logprobs, self.prompt_sizes)
        return zip(memoryview(self.prompt_seq_ids).cast("Q"), pieces, strict=True)


def _pieces(data: bytes, sizes: bytes) -> Iterator[bytes]:
    """Consecutive parts of `data`; `sizes`: i32, bytes of each."""
    begin = 0
    for size in memoryview(sizes).cast("i"):
        yield data[begin : begin + size]
        begin += size


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
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at its first admission
    draft_tokens: int = 0  # verified
    accepted_tokens: int = 0
    vision_wait_s: float = 0.0  # from arrival until all pixels were in
    prefill_s: float = 0.0  # from the first step to the first token
    preempted_s: float = 0.0  # between losing its blocks, to others or with the workers, and its next step
    stage: str = ""  # what it was at when it ended: "images", "queue", "prefill" or "decode"
    image_cause: str = ""  # with the reason "vision_failed": a word of `ImageCause`


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
    replicas_max: int | None = None  # as in `ScaleVision`


@message(27)
class Gauges(Message):
    """Numbers for `GetServerInfo`, by their names in `airside.v1.Gauges`."""

    query_id: int
    gauges: dict[str, float]
    requests_finished: dict[str, int]
    bus_messages_refused: dict[str, int]
    controller_phase_s: dict[str, float] = field(default_factory=dict)
    bus_messages: dict[str, int] = field(default_factory=dict)


@message(28)
class Peers(Message):
    """Rows for `ListWorkers`."""

    query_id: int
    peers: list[PeerRow]
    vision_target: int
    vision_pending: str
    vision_scale_events: dict[str, int] = field(default_factory=dict)  # as in `VisionPool`
    vision_restarts: dict[str, int] = field(default_factory=dict)  # likewise


@message(80)
class ImagesCounted(Message):
    """The tokens that take the place of each image's mark; none where `refused` says that they cannot be told.

    `refused` is "queue_full", "unavailable" or "invalid" as in `Rejected`, or "image": one is at fault, by
    `image_cause`.
    """

    query_id: int
    num_tokens: list[int]
    refused: str = ""
    detail: str = ""
    image_cause: str = ""  # a word of `ImageCause`


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


# --- controller -> any peer ---------------------------------------------------------------------------------------


@message(42)
class Shutdown(Message):
    """To any peer: finish what is in hand and exit."""

    why: str


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
    fewest: int = 0  # what the load decides within; equal where it decides nothing
    most: int = 0
    scale_events: dict[str, int] = field(default_factory=dict)  # "up_load", "down_asked", ...: changes of the target
    # Vision workers that others took the place of, by why: "died", "hung", "not_started" or "with_the_controller".
    restarts: dict[str, int] = field(default_factory=dict)


@message(73)
class DrainVision(Message):
    """Supervisor -> controller: this vision worker is to go."""

    name: str


@message(74)
class VisionTarget(Message):
    """Controller -> supervisor: someone asked for this many vision workers, or for a range. As in `ScaleVision`."""

    replicas: int
    replicas_max: int | None = None


@message(75)
class PeerStuck(Message):
    """Controller -> supervisor: this process was given up, but may live on, stopped or hung. It is to be ended.

    `pid` tells it from a new process of the same name.
    """

    name: str
    pid: int
    why: str


@message(76)
class VisionLoad(Message):
    """Controller -> supervisor, twice a second: how long a picture that came now would wait."""

    queued: int  # pictures that wait for a vision worker
    in_hand: int
    workers: int  # that take jobs
    wait_s: float  # predicted: seconds of work, waiting and in hand, over the workers (or over one, if there is none)
    done: int = 0  # pictures that left the hands of vision workers since the load before this one


@message(77)
class VisionJoined(Message):
    """Controller -> supervisor: this vision worker is up, so that whatever ends it was no failed start."""

    name: str
