"""What rank 0 says of the embeddings of images, added up: they live in the ranks, and the counts must outlive those."""

from __future__ import annotations

from collections.abc import Iterable

from airside.proto.messages import EncodedRow


class EmbeddingTally:
    """Counts images by whether an equal one had left its embeddings."""

    def __init__(self) -> None:
        self.num_hits = self.num_misses = 0
        self.num_bytes = 0
        """That each rank keeps."""

    def note(self, rows: Iterable[EncodedRow]) -> None:
        """Images that a step used for the first time, or that had to be encoded again."""
        for row in rows:
            self.num_hits += row.encode_s == 0
            self.num_misses += row.encode_s > 0
            self.num_bytes = row.kept_bytes

    def lose(self) -> None:
        """The ranks are gone, and what they kept with them."""
        self.num_bytes = 0
