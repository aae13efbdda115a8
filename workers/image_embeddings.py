"""The embeddings of pictures, each encoded once however many chunks its tokens are split into."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from airside.proto.messages import ImageRow, PixelsRef

CACHE_BYTES_MAX = 128 * 1024**2


class ImageEmbeddings:
    """Encodes pictures and keeps the embeddings of the latest, up to `bytes_max`.

    Args:
        encode: one picture's pixels -> [num_image_tokens, hidden].
    """

    def __init__(self, encode: Callable[[PixelsRef], Tensor], bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._encode = encode
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def rows(self, images: list[ImageRow]) -> Tensor:
        """[sum(embed_count), hidden]: the parts of the pictures that a step touches, in its order.

        Raises:
            ValueError: a row asks for more embeddings than its picture has.
        """
        return torch.cat([self._part(image) for image in images])

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
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        embeddings = self._encode(image.pixels)
        self._kept[key] = embeddings
        self._bytes += embeddings.nbytes
        while self._bytes > self._bytes_max:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return embeddings
