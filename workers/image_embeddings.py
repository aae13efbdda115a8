"""The embeddings of pictures: encoded once for all equal ones, however many chunks and sequences use them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from airside.proto.messages import EncodedRow, ImageRow, PixelsRef

USES_MAX = 4096
"""Images of sequences of which it is remembered that they were told of. One that is forgotten is told of again."""

Content = bytes | tuple[int, int]
"""What equal pictures share: their content hash; of a picture without one, whose and which it is."""


class ImageEmbeddings:
    """Encodes pictures and keeps the embeddings of those used last, up to `bytes_max` between steps.

    All ranks are given the same plans, so they keep the same pictures.

    Args:
        encode: one picture's pixels -> [num_image_tokens, hidden]. Not called for a picture that is kept.
        bytes_max: what may be kept. In any case a picture is there until the end of a step that reads it, and one that
            was encoded ahead until the next is read or encoded.
    """

    def __init__(self, encode: Callable[[PixelsRef], Tensor], bytes_max: int) -> None:
        self._encode = encode
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[Content, Tensor] = OrderedDict()  # least recently used first
        self._used: OrderedDict[tuple[int, int], None] = OrderedDict()  # images that were told of, oldest first
        self._news: list[tuple[int, int, float]] = []  # as in `EncodedRow`

    def rows(self, images: Sequence[ImageRow]) -> Tensor:
        """[sum(embed_count), hidden]: the parts of the pictures that a step touches, in its order.

        Raises:
            ValueError: a row asks for more embeddings than its picture has.
        """
        parts = torch.cat([self._part(image) for image in images])
        self._let_go()
        return parts

    def encode(self, images: Sequence[ImageRow]) -> None:
        """Has the pictures at hand for the next steps: until others are encoded so, however many bytes they have."""
        if images:
            self._let_go()
        for image in images:
            self._get(image)

    def take_news(self) -> list[EncodedRow]:
        """Since the last call: images that a sequence used for the first time, or that had to be encoded again."""
        news, self._news = self._news, []
        return [EncodedRow(*row, kept_bytes=self._bytes) for row in news]

    def _let_go(self) -> None:
        while self._bytes > self._bytes_max:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def _part(self, image: ImageRow) -> Tensor:
        embeddings = self._get(image)
        end = image.embed_start + image.embed_count
        if image.embed_start < 0 or end > len(embeddings):
            raise ValueError(
                f"embeddings [{image.embed_start}, {end}) of image {image.image_index} were asked for, "
                f"the picture makes {len(embeddings)}"
            )
        return embeddings[image.embed_start : end]

    def _get(self, image: ImageRow) -> Tensor:
        key = (image.seq_id, image.image_index)
        content: Content = image.content_hash or key
        embeddings = self._kept.get(content)
        if embeddings is not None:
            self._kept.move_to_end(content)
            if key not in self._used:
                self._tell(key, encode_s=0.0)
            return embeddings
        started_s = time.perf_counter()
        embeddings = self._kept[content] = self._encode(image.pixels)
        self._bytes += embeddings.nbytes
        self._tell(key, time.perf_counter() - started_s)
        return embeddings

    def _tell(self, key: tuple[int, int], encode_s: float) -> None:
        self._news.append((*key, encode_s))
        self._used[key] = None
        self._used.move_to_end(key)
        if len(self._used) > USES_MAX:
            self._used.popitem(last=False)
