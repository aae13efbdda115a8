"""The images of a request: the bytes of their files, or where the server is to fetch them."""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import grpc

from airside.controller.gateway.errors import RequestError, invalid
from airside.controller.gateway.request_checks import ImageLimits
from airside.proto import airside_pb2 as pb
from airside.proto.image_content import PixelRange

URL_CHARS_MAX = 8192

_HEADER_CHARS_MAX = 1024
_BASE64_SLICE_CHARS = 1 << 20  # a multiple of 4; others get their turn between two slices
_UNQUOTED_CHARS = 1 << 16  # at a time, since urllib makes an object of each escape
_ASCII_WHITESPACE = b" \t\n\r\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ANY_FILE = ("application/octet-stream", "binary/octet-stream")  # what clients state that do not look
_FORM = "data:image/png;base64,..."


@dataclass(frozen=True, slots=True)
class ImageSources:
    """One entry per image in each. A file is b"" where the URL is not ""."""

    files: list[bytes]
    urls: list[str]
    ranges: list[PixelRange]


def read_images(images: Sequence[pb.Image], fields: Sequence[str], limits: ImageLimits) -> ImageSources:
    """Where each picture comes from, data URIs decoded, and within how many pixels it is to be scaled.

    May take a tenth of a second, and some seconds where all is percent-encoded.

    Args:
        images: of one request.
        fields: the path of each image in the request.
        limits: on their number, size and origin.

    Raises:
        RequestError: names the image at fault, and holds nothing of its content.
    """
    if images and limits.mark_id is None:
        raise invalid(fields[0], "this model takes text only; send the request without images")
    if len(images) > limits.images_max:
        raise invalid(
            fields[limits.images_max],
            f"the request has {len(images)} images, at most {limits.images_max} are allowed; leave some out",
        )
    sources = ImageSources([], [], [])
    for image, field in zip(images, fields, strict=True):
        file, url = _read(image, field, limits)
        sources.files.append(file)
        sources.urls.append(url)
        sources.ranges.append(_read_range(image, field, limits))
    return sources


def _read_range(image: pb.Image, field: str, limits: ImageLimits) -> PixelRange:
    """What is left out is 0. Whether the checkpoint allows so many is the vision worker's to say."""
    has_min, has_max = image.HasField("min_pixels"), image.HasField("max_pixels")
    given = {"min_pixels": image.min_pixels} if has_min else {}
    given |= {"max_pixels": image.max_pixels} if has_max else {}
    for name, value in given.items():
        if not limits.takes_pixel_ranges:
            raise invalid(f"{field}.{name}", "this model scales each picture in one way only; leave it out")
        if value < 1:
            raise invalid(f"{field}.{name}", f"is {value}, but must be at least 1")
    if has_min and has_max and image.min_pixels > image.max_pixels:
        raise invalid(f"{field}.min_pixels", f"is {image.min_pixels}, more than max_pixels, {image.max_pixels}")
    return PixelRange(image.min_pixels, image.max_pixels)


def _read(image: pb.Image, field: str, limits: ImageLimits) -> tuple[bytes, str]:
    source = image.WhichOneof("source")
    match source:
        case "data":
            _check_size(f"{field}.data", len(image.data), limits)
            return image.data, ""
        case "url" if not _is_data_uri(image.url):
            return b"", _check_url(f"{field}.url", image.url.strip(), limits)
        case "url" | "data_uri":
            text: str = getattr(image, source)
            return decode_data_uri(f"{field}.{source}", text, limits), ""
        case _:
            raise invalid(field, "is empty; send one of data, url and data_uri")


def _check_size(field: str, num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes == 0:
        raise invalid(field, "is empty; send the bytes of an image file")
    if num_bytes > limits.image_bytes_max:
        raise invalid(
            field, f"has {num_bytes} bytes, at most {limits.image_bytes_max} are allowed; send a smaller file"
        )


def _check_url(field: str, url: str, limits: ImageLimits) -> str:
    """What can be said of a URL without its host: the vision worker that fetches it looks at that."""
    if not url:
        raise invalid(field, "is empty; send the URL of an image file")
    if not limits.allow_urls:
        raise _denied(field, "this server fetches no pictures (vision.media.allow_urls); send the file as data")
    if len(url) > URL_CHARS_MAX:
        raise invalid(field, f"has {len(url)} characters, at most {URL_CHARS_MAX} are allowed; send the file as data")
    if not url[:8].lower().startswith(("http://", "https://")):
        raise _denied(field, "only http:// and https:// URLs are fetched; send the file as data")
    return url


def _denied(field: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.PERMISSION_DENIED, f"{field}: {message}", field)


def _is_data_uri(text: str) -> bool:
    return text[:64].lstrip()[:5].lower() == "data:"


def decode_data_uri(field: str, uri: str, limits: ImageLimits) -> bytes:
    """The bytes of a `data:` URI (RFC 2397), read as browsers do: fetch.spec.whatwg.org, "data: URL processor".

    Taken as well: base64 that is wrapped, without padding, percent-encoded or in the URL-safe alphabet, and any stated
    type that does not say that it is something other than an image: the bytes decide.

    Raises:
        RequestError: INVALID_ARGUMENT for `field`.
    """
    if not _is_data_uri(uri):
        raise invalid(field, f"is no data URI; the form is {_FORM}")
    comma = uri.find(",", 0, _HEADER_CHARS_MAX)
    if comma < 0:
        raise invalid(field, f"has no comma before its payload; the form is {_FORM}")
    stated_type, *parameters = [part.strip().lower() for part in uri[:comma].lstrip()[5:].split(";")]
    if "/" in stated_type and not (re.match(r"image/[^:/]+$", stated_type) or stated_type in _ANY_FILE):
        raise invalid(field, f"states a type other than image/*; the form is {_FORM}")
    if not uri.isascii():
        raise invalid(field, f"has characters beyond ASCII; the form is {_FORM}")
    payload = uri[comma + 1 :].strip()
    if "base64" in parameters:
        file = _decode_base64(field, payload, limits)
    else:
        _check_size(field, len(payload) - 2 * payload.count("%"), limits)
        file = _unquote(payload)
    _check_size(field, len(file), limits)
    return file


def _decode_base64(field: str, payload: str, limits: ImageLimits) -> bytes:
    encoded = _unquote(payload) if "%" in payload else payload.encode()
    encoded = encoded.translate(_URL_SAFE, delete=_ASCII_WHITESPACE)
    padding = len(encoded) - len(encoded.rstrip(b"="))
    symbols = len(encoded) - padding
    if padding > 2 or symbols % 4 == 1 or (padding and len(encoded) % 4):
        raise invalid(field, "is cut off or padded wrongly: its base64 does not come out at a whole byte")
    _check_size(field, symbols * 3 // 4, limits)
    encoded = encoded[:symbols] + b"=" * (-symbols % 4)
    try:
        return b"".join(
            binascii.a2b_base64(encoded[at : at + _BASE64_SLICE_CHARS], strict_mode=True)
            for at in range(0, len(encoded), _BASE64_SLICE_CHARS)
        )
    except binascii.Error:
        raise invalid(field, "has characters that are not base64") from None


def _unquote(text: str) -> bytes:
    parts, at = [], 0
    while at < len(text):
        end = at + _UNQUOTED_CHARS
        cut = text.rfind("%", end - 2, end)  # an escape that would be in two slices
        end = end if cut < 0 else cut
        parts.append(unquote_to_bytes(text[at:end]))
        at = end
    return b"".join(parts)
