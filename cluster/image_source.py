"""What a caller may give as a picture, as the API's `Image`."""

from __future__ import annotations

from pathlib import Path

from airside.proto import airside_pb2 as pb

ImageSource = bytes | str | Path
"""The bytes of an image file, its path, a `data:` URI, or the URL that the server is to fetch it from."""

_URL_SCHEMES = ("http://", "https://")


def to_image(source: ImageSource) -> pb.Image:
    """A file is read here; a URL is left to the server. Raises OSError for a path that cannot be read."""
    if isinstance(source, bytes):
        return pb.Image(data=source)
    if isinstance(source, str):
        if _starts_with(source, "data:"):
            return pb.Image(data_uri=source)
        if _starts_with(source, *_URL_SCHEMES):
            return pb.Image(url=source)
    return pb.Image(data=Path(source).read_bytes())


def is_path(source: str) -> bool:
    """Whether a text is taken as a path."""
    return not _starts_with(source, "data:", *_URL_SCHEMES)


def _starts_with(text: str, *prefixes: str) -> bool:
    return text[:8].lower().startswith(prefixes)
