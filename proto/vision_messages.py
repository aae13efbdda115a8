"""Messages between the controller and the vision workers. `messages.py` has the rules, and all names."""

from __future__ import annotations

from airside.proto.codec import Message, message
from airside.proto.step_messages import PixelsRef

# --- vision worker -> controller ----------------------------------------------------------------------------------


@message(50)
class VisionHello(Message):
    """A vision worker is up; `segment` is the shared-memory segment that it alone allocates from, or but a name.

    `segment_bytes` is how much that is: of a worker that does not share its memory, how much of its pixels may be held
    elsewhere at a time.
    """

    node: str
    pid: int
    segment: str
    segment_bytes: int = 0
    shares_memory: bool = True  # False: the ranks cannot map the segment, and tensors come behind `Pixels`


@message(51)
class Credit(Message):
    """The worker can take this many more jobs; a draining one: it is done with so many of those in hand."""

    jobs: int


@message(52)
class Shape(Message):
    """From the header alone: the exact token ids that take the place of this image's mark. Answers `Probe`."""

    seq_id: int
    image_index: int
    epoch: int
    expansion: bytes  # i32
    width: int = 0  # upright, in pixels
    height: int = 0
    rope_advance: int = 0  # by how much positions go on over this picture; 0: by the number of its tokens


@message(53)
class Pixels(Message):
    """The image's tensors; the slab is the controller's until it sends `Release`.

    They are in the worker's segment. A worker that does not share its memory keeps nothing of them: the slab, of
    `pixels.num_bytes`, is the one attachment, and until `Release` counts as room that is taken.
    """

    seq_id: int
    image_index: int
    epoch: int
    pixels: PixelsRef
    process_s: float  # from upright RGB to tensors
    decode_s: float = 0.0


@message(54)
class ImageFailed(Message):
    """The image cannot be used. `cause` is a word of `ImageCause`, `detail` a sentence."""

    seq_id: int
    image_index: int
    epoch: int
    cause: str
    detail: str


@message(55)
class Goodbye(Message):
    """A drained worker has nothing left, holds no slab, and exits."""


@message(56)
class ArenaFull(Message):
    """A picture is done and waits for a slab of so many bytes. Said again, a few times a second, while it waits."""

    num_bytes: int
    is_memory_full: bool = False  # there is room for it in the arena, but the machine has no shared memory left


@message(57)
class Fetched(Message):
    """A picture was fetched; the file is the attachment. Answers a `Probe` with a URL, before anyone looks into it."""

    seq_id: int
    image_index: int
    epoch: int
    content_hash: bytes  # 16 bytes of what the file contains
    fetch_s: float


# --- controller -> vision worker ----------------------------------------------------------------------------------


@message(60)
class Job(Message):
    """Make the pixels of one image; its bytes are the attachment. Costs a credit.

    `epoch` grows each time the image is taken from a vision worker.
    """

    seq_id: int
    image_index: int
    epoch: int
    min_pixels: int = 0  # as in `PixelRange`
    max_pixels: int = 0


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


@message(64)
class Probe(Message):
    """Say what one image's header says: `Shape`, or `ImageFailed`. Its bytes are the attachment. Costs no credit.

    With a `url` the attachment is empty, and the picture is to be fetched: the answer is `Fetched`, or `ImageFailed`.
    """

    seq_id: int
    image_index: int
    epoch: int
    url: str = ""
    min_pixels: int = 0  # as in `PixelRange`
    max_pixels: int = 0
