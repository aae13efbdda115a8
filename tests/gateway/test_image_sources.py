"""Pictures as data URIs, in the ways that real clients spell them, and as URLs."""

from __future__ import annotations

import base64
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from airside.controller.gateway.errors import RequestError
from airside.controller.gateway.image_sources import URL_CHARS_MAX, decode_data_uri, read_images
from airside.controller.gateway.request_checks import ImageLimits
from airside.proto import airside_pb2 as pb
from airside.proto.image_content import content_hash
from airside.proto.messages import AbortSequence
from tests.gateway.client import Client, failure
from tests.gateway.conftest import IMAGE_BYTES_MAX, Start
from tests.gateway.scripted_controller import ScriptedController

PICTURE = (Path(__file__).parents[1] / "vision" / "images" / "control_rgb.png").read_bytes()
BASE64 = base64.b64encode(PICTURE).decode()
ODD = b"\xfb\xff\xfe" * 9 + b"\xff"  # + and / in base64, and two =
ODD_BASE64 = base64.b64encode(ODD).decode()


def limits(bytes_max: int = 1 << 20, *, allow_urls: bool = False) -> ImageLimits:
    return ImageLimits(mark_id=1, mark="<image>", images_max=4, image_bytes_max=bytes_max, allow_urls=allow_urls)


def wrapped(text: str, line_end: str) -> str:
    return line_end.join(textwrap.wrap(text, 76)) + line_end


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/PNG;BASE64,{BASE64}",
        f"data:image/png;charset=utf-8;base64,{BASE64}",
        f"data:image/png;base64;name=a.png,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/jpeg;base64,{BASE64}",  # the bytes decide
        f"data:image/jpg;base64,{BASE64}",
        f"data:image/*;base64,{BASE64}",
        f"data:undefined;base64,{BASE64}",
        f"data:application/octet-stream;base64,{BASE64}",
        f"  data: image/png ; base64 , {BASE64}\n",
        f"data:image/png;base64,{wrapped(BASE64, chr(10))}",
        f"data:image/png;base64,{wrapped(BASE64, chr(13) + chr(10))}",
        f"data:image/png;base64,{quote(wrapped(BASE64, chr(10)))}",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{BASE64.replace('=', '%3D').replace('+', '%2B').replace('/', '%2f')}",
        f"data:image/png;base64,{BASE64.translate(str.maketrans('+/', '-_'))}",
        f"data:image/png,{quote(PICTURE, safe='')}",
        f"data:,{quote(PICTURE)}",
    ],
)
def test_spellings_of_one_picture(uri: str) -> None:
    assert decode_data_uri("f", uri, limits()) == PICTURE
    assert decode_data_uri("f", uri, limits(len(PICTURE))) == PICTURE
    with pytest.raises(RequestError, match=f"{len(PICTURE)} bytes, at most {len(PICTURE) - 1}"):
        decode_data_uri("f", uri, limits(len(PICTURE) - 1))


@pytest.mark.parametrize("text", [ODD_BASE64, ODD_BASE64.rstrip("="), ODD_BASE64.replace("+", "-").replace("/", "_")])
def test_every_symbol_and_padding(text: str) -> None:
    assert {"+", "/"} <= set(ODD_BASE64)
    assert ODD_BASE64.endswith("==")
    assert decode_data_uri("f", f"data:;base64,{text}", limits()) == ODD


def test_a_large_picture_is_decoded_in_slices() -> None:
    file = bytes(range(256)) * 16_000 + b"end"
    uri = "data:image/png;base64," + base64.b64encode(file).decode()
    assert decode_data_uri("f", uri, limits(len(file))) == file


@pytest.mark.parametrize("before", range(4))
def test_percent_encoding_across_slices(before: int) -> None:
    file = b"A" * before + b"%\x00A" * 100_000
    escaped = "A" * before + "%25%00A" * 100_000
    assert decode_data_uri("f", f"data:,{escaped}", limits(len(file))) == file
    assert decode_data_uri("f", f"data:,{escaped}%", limits(len(file) + 1)) == file + b"%"
    encoded = quote(base64.b64encode(file), safe="").replace("A", "%41")
    assert decode_data_uri("f", f"data:;base64,{encoded}", limits(len(file))) == file


def test_percent_encoding_takes_little_memory() -> None:
    """Three bytes of it for each byte of a file, and not an object for each."""
    uri = "data:," + "%41" * 1_000_000
    tracemalloc.start()
    try:
        assert len(decode_data_uri("f", uri, limits(1_000_000))) == 1_000_000
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (BASE64, "is no data URI; the form is data:image/png;base64,..."),
        ("", "is no data URI"),
        ("https://a.test/x.png", "is no data URI"),
        ("data:image/png;base64", "has no comma"),
        (f"data:image/png;base64{BASE64}", "has no comma"),
        ("data:" + "x" * 2000 + ",", "has no comma"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64, \n", "is empty"),
        ("data:image/png;base64,==", "is cut off or padded wrongly"),
        ("data:image/png,", "is empty"),
        ("data:,", "is empty"),
        (f"data:image/png;base64,@@@{BASE64[3:]}", "has characters that are not base64"),
        (f"data:image/png;base64,{BASE64[:40]}*{BASE64[41:]}", "has characters that are not base64"),
        (f"data:image/png;base64,{BASE64[:40]}%00{BASE64[41:]}", "has characters that are not base64"),
        (f"data:image/png;base64,{BASE64[:40]}={BASE64[41:]}", "has characters that are not base64"),
        (f"data:image/png;base64,{BASE64[:40]}é{BASE64[41:]}", "has characters beyond ASCII"),
        (f"data:image/png;base64,{BASE64.rstrip('=')[:401]}", "is cut off or padded wrongly"),
        (f"data:image/png;base64,{BASE64[:404]}=", "is cut off or padded wrongly"),
        (f"data:image/png;base64,{BASE64[:400]}====", "is cut off or padded wrongly"),
        (f"data:image/png;base64,{BASE64[:401]}===", "is cut off or padded wrongly"),
        ("data:text/html;base64,PGgxPng8L2gxPg==", "states a type other than image/*"),
        (f"data:application/pdf;base64,{BASE64}", "states a type other than image/*"),
        (f"data:data:image/png;base64,{BASE64}", "states a type other than image/*"),
        (f"data:image/;base64,{BASE64}", "states a type other than image/*"),
    ],
)
def test_what_is_no_picture_in_a_data_uri(uri: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        decode_data_uri("images[3].data_uri", uri, limits())
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.message.startswith(f"images[3].data_uri: {message}")
    assert BASE64[3:12] not in refused.value.message
    assert refused.value.__cause__ is None


def test_size_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "airside.controller.gateway.image_sources"
    monkeypatch.setattr(f"{module}.binascii.a2b_base64", lambda *_, **__: pytest.fail("decoded"))
    monkeypatch.setattr(f"{module}.unquote_to_bytes", lambda *_: pytest.fail("decoded"))
    for uri in (f"data:;base64,{BASE64}", f"data:,{quote(PICTURE, safe='')}"):
        with pytest.raises(RequestError, match="at most 304 are allowed"):
            decode_data_uri("f", uri, limits(len(PICTURE) - 1))


@pytest.mark.parametrize(
    "url", ["http://a.test/x", "HTTPS://A.test/x?q", "file:///etc/hostname", "/etc/hostname", "a.png", "ftp://a.test/x"]
)
def test_urls_are_off_unless_allowed(url: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_images([pb.Image(url=url)], ["images[0]"], limits())
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.field == "images[0].url"
    assert "vision.media.allow_urls" in refused.value.message
    assert not any(word in refused.value.message for word in ("a.test", "hostname", "a.png"))


def test_urls_that_are_allowed() -> None:
    allowed = limits(allow_urls=True)
    mixed = [pb.Image(data=b"x"), pb.Image(url=" https://a.test/x?q "), pb.Image(data_uri=f"data:,{quote(PICTURE)}")]
    sources = read_images(mixed, ["0", "1", "2"], allowed)
    assert sources.files == [b"x", b"", PICTURE]
    assert sources.urls == ["", "https://a.test/x?q", ""]
    for url in ("file:///etc/hostname", "/etc/hostname", "http:/a.test", "//a.test/x"):
        with pytest.raises(RequestError, match="only http:// and https://") as refused:
            read_images([pb.Image(url=url)], ["images[0]"], allowed)
        assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(RequestError, match=f"at most {URL_CHARS_MAX}"):
        read_images([pb.Image(url="http://a.test/" + "x" * URL_CHARS_MAX)], ["images[0]"], allowed)


def test_a_data_uri_sent_as_url_is_taken() -> None:
    """As clients of other servers do, which have one field for both."""
    uri = f"data:image/png;base64,{BASE64}"
    assert read_images([pb.Image(url=uri)], ["images[0]"], limits()).files == [PICTURE]
    with pytest.raises(RequestError, match=r"images\[0\].url: has characters that are not base64"):
        read_images([pb.Image(url=uri.replace("iVBO", "@@@@"))], ["images[0]"], limits())


def test_what_travels_to_the_controller(
    start_gateway: Start, controller: ScriptedController, pool: DescriptorPool
) -> None:
    client = Client(pool, start_gateway(allow_urls=True).channel)
    images: list[dict[str, Any]] = [
        {"data_uri": f"data:image/png;base64,{wrapped(BASE64, chr(10))}"},
        {"url": "https://a.test/x?q"},
        {"data": BASE64},  # JSON's way of writing bytes
    ]
    content = content_hash(PICTURE)
    message = {"role": "user", "parts": [{"image": image} for image in images]}
    for method, fields in [
        (client.generate, {"prompt": "<image> <image> <image>", "images": images}),
        (client.chat, {"messages": [message]}),
    ]:
        call = method(**fields)
        request = controller.accept()
        assert controller.attachments == [PICTURE, b"", PICTURE]
        assert request.image_urls == ["", "https://a.test/x?q", ""]
        assert request.image_hashes == [content, b"", content]
        call.cancel()
        controller.expect(AbortSequence)


def test_without_urls_none_travel(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="<image>", images=[{"data": BASE64}])
    assert controller.accept().image_urls == []
    call.cancel()
    failed = failure(client.generate(prompt="<image>", images=[{"url": "https://a.test/x?q"}]))
    assert (failed.code, failed.fields) == (grpc.StatusCode.PERMISSION_DENIED, ["images[0].url"])


def test_a_payload_is_in_no_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    too_large = base64.b64encode(PICTURE * 4).decode()
    assert len(PICTURE) * 4 > IMAGE_BYTES_MAX
    for payload in (too_large, "@" + BASE64[1:], BASE64[:-3]):
        failed = failure(client.generate(prompt="<image>", images=[{"data_uri": f"data:image/png;base64,{payload}"}]))
        assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["images[0].data_uri"])
        assert BASE64[8:20] not in failed.message + caplog.text
