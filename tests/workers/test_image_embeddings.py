"""Which pictures are encoded, which are found, and what is told of that."""

from __future__ import annotations

import pytest
import torch

from airside.proto.messages import ImageRow, PixelsRef
from airside.workers.image_embeddings import USES_MAX, ImageEmbeddings

NUM_TOKENS = 4
PICTURE_BYTES = NUM_TOKENS * 2 * 4


class Encoder:
    """Embeds a picture as the number of its slab, and notes what it was asked for."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def __call__(self, pixels: PixelsRef) -> torch.Tensor:
        self.encoded.append(pixels.slab)
        return torch.full((NUM_TOKENS, 2), float(pixels.slab))


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


def row(seq_id: int, slab: int, start: int = 0, count: int = 1, content: bytes = b"", index: int = 0) -> ImageRow:
    return ImageRow(seq_id, index, start, count, PixelsRef("", slab, 0, []), content)


def told(embeddings: ImageEmbeddings) -> list[tuple[int, int, bool]]:
    return [(news.seq_id, news.image_index, news.encode_s > 0) for news in embeddings.take_news()]


def test_equal_pictures_of_one_step_are_encoded_once(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=10 * PICTURE_BYTES)
    rows = [row(1, slab=5, content=b"cat"), row(2, slab=6, content=b"cat"), row(2, slab=7, content=b"dog", index=1)]
    assert embeddings.rows(rows).tolist() == [[5, 5], [5, 5], [7, 7]]
    assert encoder.encoded == [5, 7], "the second cat's pixels were read"
    assert told(embeddings) == [(1, 0, True), (2, 0, False), (2, 1, True)]


def test_equal_pictures_of_one_step_are_encoded_once_whatever_may_be_kept(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=0)
    embeddings.rows([row(1, slab=5, content=b"cat"), row(2, slab=7, content=b"dog"), row(3, slab=6, content=b"cat")])
    assert encoder.encoded == [5, 7]
    embeddings.rows([row(1, slab=5, start=1, content=b"cat")])
    assert encoder.encoded == [5, 7, 5], "nothing may be kept between steps"


def test_what_is_kept_after_the_step_is_told_with_each(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=2 * PICTURE_BYTES)
    embeddings.rows([row(1, slab=slab, content=b"%d" % slab, index=slab) for slab in range(3)])
    assert [news.kept_bytes for news in embeddings.take_news()] == [2 * PICTURE_BYTES] * 3


def test_pictures_without_a_hash_are_like_no_others(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=10 * PICTURE_BYTES)
    embeddings.rows([row(1, slab=5), row(1, slab=6, index=1), row(2, slab=7)])
    assert encoder.encoded == [5, 6, 7]
    embeddings.rows([row(1, slab=6, index=1, start=2)])
    assert encoder.encoded == [5, 6, 7], "its next chunk found it"


def test_an_image_is_told_of_once_however_many_chunks_it_takes(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=10 * PICTURE_BYTES)
    embeddings.rows([row(1, slab=5, content=b"cat")])
    assert told(embeddings) == [(1, 0, True)]
    embeddings.rows([row(1, slab=5, start=1, content=b"cat"), row(2, slab=9, content=b"cat")])
    assert told(embeddings) == [(2, 0, False)]
    embeddings.rows([row(2, slab=9, start=1, content=b"cat")])
    assert told(embeddings) == []


def test_the_least_recently_used_goes_first_and_is_told_of_when_it_is_encoded_again(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=2 * PICTURE_BYTES)
    embeddings.rows([row(1, slab=1), row(2, slab=2)])
    embeddings.rows([row(1, slab=1, start=1), row(3, slab=3)])
    embeddings.rows([row(1, slab=1, start=2)])
    assert encoder.encoded == [1, 2, 3], "picture 1 was used last and must have stayed"
    told(embeddings)
    embeddings.rows([row(2, slab=2, start=1)])
    assert encoder.encoded == [1, 2, 3, 2]
    assert told(embeddings) == [(2, 0, True)]


def test_what_is_remembered_of_sequences_is_bounded(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=10 * PICTURE_BYTES)
    for seq_id in range(USES_MAX + 1):
        embeddings.rows([row(seq_id, slab=1, content=b"cat")])
    assert len(told(embeddings)) == USES_MAX + 1
    embeddings.rows([row(USES_MAX, slab=1, content=b"cat"), row(0, slab=1, content=b"cat")])
    assert told(embeddings) == [(0, 0, False)], "the first was forgotten, the last was not"


def test_what_is_encoded_ahead_is_there_when_a_step_reads_it(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=1)
    embeddings.encode([row(1, slab=5, count=0), row(1, slab=6, index=1, count=0)])
    assert told(embeddings) == [(1, 0, True), (1, 1, True)]
    embeddings.encode([])
    embeddings.rows([row(1, slab=5), row(1, slab=6, index=1)])
    embeddings.encode([row(2, slab=7, count=0)])
    embeddings.rows([row(2, slab=7)])
    assert encoder.encoded == [5, 6, 7]


def test_pictures_that_nobody_reads_do_not_pile_up(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=2 * PICTURE_BYTES)
    for seq_id in range(5):
        embeddings.encode([row(seq_id, slab=seq_id, count=0)])
    kept = [row.kept_bytes for row in embeddings.take_news()]
    assert max(kept) == 3 * PICTURE_BYTES


def test_a_picture_larger_than_the_bound_is_still_usable(encoder: Encoder) -> None:
    embeddings = ImageEmbeddings(encoder, bytes_max=1)
    assert embeddings.rows([row(1, slab=1, count=NUM_TOKENS)]).shape == (NUM_TOKENS, 2)
    with pytest.raises(ValueError, match=r"\[2, 5\) of image 0 .* the picture makes 4"):
        embeddings.rows([row(1, slab=1, start=2, count=3)])
