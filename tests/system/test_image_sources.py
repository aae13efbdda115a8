"""Pictures as data URIs and from URLs, through a whole server of real processes."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from airside import LLM, SamplingParams
from airside.cluster.image_source import ImageSource
from airside.controller.gateway.errors import RequestError
from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.system.local_server import LocalServer, read_failing
from tests.vision import picture_host
from tests.vision.picture_host import PictureHost, answer, redirect

pytestmark = pytest.mark.slow

IMAGES = Path(__file__).parents[1] / "vision" / "images"
PICTURE = (IMAGES / "control_rgb.png").read_bytes()
OTHER = (IMAGES / "tiny_257x27.png").read_bytes()
TIMEOUT_S = 2.0
SECRET = "token=sekrit"


@pytest.fixture(scope="module")
def host() -> Iterator[PictureHost]:
    routes = {
        "/ok": answer(PICTURE),
        "/other": answer(OTHER, Content_Type="text/plain"),
        "/html": answer((IMAGES / "html_as.jpg").read_bytes()),
        "/svg": answer((IMAGES / "vector.svg").read_bytes()),
        "/to-ok": redirect("/ok"),
        "/to-metadata": redirect("http://169.254.169.254/latest/meta-data/"),
        "/loop": redirect("/loop"),
        "/drip": picture_host.drip_body,
        "/headers": picture_host.drip_headers,
        "/endless": picture_host.endless,
        "/bomb": answer(b"\x1f\x8b", Content_Encoding="gzip"),
    }
    with PictureHost(routes) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    media = {"allow_urls": True, "allowed_domains": ["127.0.0.1"], "max_redirects": 2, "timeout_s": TIMEOUT_S}
    vision = {"arena": "32MiB", "limits": {"max_bytes": "256KiB"}, "media": media}
    with LocalServer(make_idefics3(tmp_path_factory.mktemp("idefics3")), vision=vision) as running:
        yield running
        log = "".join(running.processes.log(name) for name in ("controller", "gateway-0", "vision-0"))
        assert "sekrit" not in log
        assert BASE64[8:24] not in log


def request(*images: pb.Image) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt="<image>" * len(images) + "What is it?",
        images=images,
        stop=pb.Stop(max_tokens=4, ignore_eos=True),
        sampling=pb.Sampling(temperature=0),
        output=pb.Output(logprobs=0),
    )


def told(server: LocalServer, *images: pb.Image) -> list[tuple[int, float]]:
    """What the model makes of pictures, fine enough to tell two of them apart."""
    events = list(server.inference.Generate(request(*images), timeout=60))
    assert events[-1].finished.reason == "length"
    return [(row.token_id, row.logprob) for event in events for row in event.delta.logprobs]


def refused(server: LocalServer, *images: pb.Image) -> tuple[list[pb.GenerateEvent], grpc.RpcError]:
    events, error = read_failing(server.inference.Generate(request(*images), timeout=60))
    assert not any(word in error.details() for word in ("127.0.0.1", "169.254", "sekrit"))
    return events, error


def url(host: PictureHost, path: str) -> pb.Image:
    return pb.Image(url=f"http://127.0.0.1:{host.port}{path}?{SECRET}")


BASE64 = base64.b64encode(PICTURE).decode()


def test_a_url_is_as_good_as_the_bytes(server: LocalServer, host: PictureHost) -> None:
    here, other = told(server, pb.Image(data=PICTURE)), told(server, pb.Image(data=OTHER))
    assert here != other
    assert told(server, url(host, "/ok")) == here
    assert told(server, url(host, "/to-ok")) == here
    assert told(server, url(host, "/other")) == other
    both = told(server, pb.Image(data=PICTURE), pb.Image(data=OTHER))
    assert told(server, url(host, "/ok"), pb.Image(data=OTHER)) == both
    assert told(server, pb.Image(data=PICTURE), url(host, "/other")) == both


def test_continuations_share_one_fetch(server: LocalServer, host: PictureHost) -> None:
    """Of the same URL in one request, too: both show the same picture, whatever the host would say next."""
    asked, twice = len(host.requests), request(url(host, "/ok"), url(host, "/ok"))
    twice.n = 3
    events = list(server.inference.Generate(twice, timeout=60))
    assert [event.finished.reason for event in events if event.HasField("finished")] == ["length"] * 3
    assert len(host.requests) == asked + 1


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/PNG;BASE64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/jpeg;base64,{BASE64}",
        f"data:image/png;base64,{BASE64[:76]}\n{BASE64[76:]}",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        "data:image/png," + "".join(f"%{byte:02X}" for byte in PICTURE),
    ],
)
def test_a_data_uri_is_as_good_as_the_bytes(server: LocalServer, uri: str) -> None:
    assert told(server, pb.Image(data_uri=uri)) == told(server, pb.Image(data=PICTURE))


@pytest.mark.parametrize("file", ["html_as.jpg", "vector.svg", "doc.pdf"])
def test_a_data_uri_that_lies_about_its_type(server: LocalServer, file: str) -> None:
    payload = base64.b64encode((IMAGES / file).read_bytes()).decode()
    _, error = refused(server, pb.Image(data_uri=f"data:image/png;base64,{payload}"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("image 0: unsupported_format")


@pytest.mark.parametrize(
    ("path", "code", "cause"),
    [
        ("/none", grpc.StatusCode.INVALID_ARGUMENT, "fetch_failed: its host answers with status 404"),
        ("/html", grpc.StatusCode.INVALID_ARGUMENT, "unsupported_format"),
        ("/svg", grpc.StatusCode.INVALID_ARGUMENT, "unsupported_format"),
        ("/to-metadata", grpc.StatusCode.PERMISSION_DENIED, "not_allowed"),
        ("/loop", grpc.StatusCode.INVALID_ARGUMENT, "fetch_failed: its host redirects more than 2 times"),
        ("/drip", grpc.StatusCode.INVALID_ARGUMENT, "fetch_timeout"),
        ("/headers", grpc.StatusCode.INVALID_ARGUMENT, "fetch_timeout"),
        ("/endless", grpc.StatusCode.INVALID_ARGUMENT, "too_many_bytes"),
        ("/bomb", grpc.StatusCode.INVALID_ARGUMENT, "fetch_failed"),
    ],
)
def test_a_bad_url_ends_its_request(
    server: LocalServer, host: PictureHost, path: str, code: grpc.StatusCode, cause: str
) -> None:
    events, error = refused(server, pb.Image(data=PICTURE), url(host, path))
    assert error.code() is code
    assert error.details().startswith(f"image 1: {cause}")
    ends = [event.finished for event in events if event.HasField("finished")]
    assert [(end.reason, end.detail) for end in ends] == [("vision_failed", error.details())]
    assert not any(event.HasField("delta") for event in events)


@pytest.mark.parametrize(
    "where", ["http://127.0.0.2:{port}/ok", "http://localhost:{port}/ok", "http://2130706433:{port}/ok"]
)
def test_a_host_that_is_not_listed(server: LocalServer, host: PictureHost, where: str) -> None:
    connections = host.num_connections
    _, error = refused(server, pb.Image(url=where.format(port=host.port)))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert error.details().startswith("image 0: not_allowed")
    assert host.num_connections == connections


def test_slow_hosts_hold_up_nobody_else(server: LocalServer, host: PictureHost) -> None:
    """While 50 pictures drip, text, a picture's bytes and a good URL of the same host are answered."""
    ended = threading.Semaphore(0)

    def drip() -> grpc.StatusCode:
        _, error = refused(server, url(host, "/drip"))
        ended.release()
        return error.code()

    told(server, url(host, "/ok"))
    seen = len(host.requests)
    with ThreadPoolExecutor(50) as pool:
        slow = [pool.submit(drip) for _ in range(50)]
        while len(host.requests) == seen:
            assert not ended.acquire(timeout=0.01), "none came to its host"
        assert server.generate(prompt="The", stop=pb.Stop(max_tokens=4)).finished.reason in ("length", "stop")
        assert told(server, pb.Image(data=OTHER))
        assert told(server, url(host, "/ok"))
        assert {future.result() for future in slow} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert server.gauges().num_requests_running == 0


def test_a_cancelled_request_lets_its_host_go(server: LocalServer, host: PictureHost) -> None:
    while host.left.acquire(blocking=False):
        pass
    seen = len(host.requests)
    call = server.inference.Generate(request(url(host, "/drip")), timeout=60)
    while len(host.requests) == seen:
        assert call.is_active(), "ended before it came to its host"
    call.cancel()
    assert host.left.acquire(timeout=30)


def test_urls_are_off_by_default(tmp_path_factory: pytest.TempPathFactory, host: PictureHost) -> None:
    connections = host.num_connections
    with LocalServer(make_idefics3(tmp_path_factory.mktemp("off"))) as off:
        events, error = refused(off, url(host, "/ok"))
        assert told(off, pb.Image(data_uri=f"data:image/png;base64,{BASE64}"))
    assert (events, error.code()) == ([], grpc.StatusCode.PERMISSION_DENIED)
    assert error.details().startswith("images[0].url: ")
    assert host.num_connections == connections


def test_the_offline_llm_takes_them_all(tmp_path: Path, host: PictureHost) -> None:
    media = {"allow_urls": True, "allowed_domains": ["localhost"]}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    here, there = f"data:image/png;base64,{BASE64}", f"http://localhost:{host.port}/ok"
    sources: list[ImageSource] = [PICTURE, IMAGES / "control_rgb.png", here, there]
    with LLM(str(make_idefics3(tmp_path / "model")), dtype="float32", media=media) as llm:
        outputs = llm.generate(["<image>What?"] * 4, params, [[source] for source in sources])
        elsewhere, after = llm.generate(["<image>What?"] * 2, params, [[f"http://127.0.0.1:{host.port}/ok"], [PICTURE]])
        with pytest.raises(RequestError, match=r"images\[1\]\[0\].data_uri: "):
            llm.generate(["a", "<image>b"], params, [[], ["data:image/png;base64,@"]])
    assert {output.finish_reason for output in outputs} == {"length"}
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert (elsewhere.finish_reason, after.token_ids) == ("vision_failed", outputs[0].token_ids)
    assert elsewhere.detail.startswith("image 0: not_allowed")
