"""What became of a sequence's images, added up for its `finished`."""

from __future__ import annotations

from airside.proto import airside_pb2 as pb
from airside.proto.messages import ImageEncoded, ImageReady, ImageStages


class ImageTimes:
    """Counts the images of one sequence that were found, and adds up where the time of the others went."""

    def __init__(self) -> None:
        self._stages = pb.ImageStages()
        self._encode_s = 0.0
        self._num_cached = 0

    def ready(self, news: ImageReady) -> None:
        """The pixels of an image are in."""
        self._num_cached += news.cached
        if news.stages is not None:
            for field, value in stages_message(news.stages).ListFields():
                setattr(self._stages, field.name, getattr(self._stages, field.name) + value)

    def encoded(self, news: ImageEncoded) -> None:
        """The embeddings of an image are there."""
        self._encode_s += news.encode_s

    def fill(self, finished: pb.Finished) -> None:
        """Sets the fields that are about images. What is not known of any image stays unset."""
        finished.usage.cached_images = self._num_cached
        finished.timings.image_encode_s = self._encode_s
        if self._stages.ListFields():
            finished.timings.images.CopyFrom(self._stages)


def stages_message(stages: ImageStages) -> pb.ImageStages:
    """The public message."""
    return pb.ImageStages(
        fetch_s=stages.fetch_s,
        queue_s=stages.queue_s,
        decode_s=stages.decode_s,
        process_s=stages.process_s,
        transport_s=stages.transport_s,
    )
