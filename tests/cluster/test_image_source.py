"""What callers of `Client` and `LLM` may give as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from airside.cluster.cli.program import app
from airside.cluster.client import user_message
from airside.cluster.image_source import ImageSource, to_image
from airside.proto import airside_pb2 as pb

BYTES = b"\x89PNG, or so"


@pytest.mark.parametrize(
    ("source", "image"),
    [
        (BYTES, pb.Image(data=BYTES)),
        (b"http://a.test/x", pb.Image(data=b"http://a.test/x")),
        ("http://a.test/x?q", pb.Image(url="http://a.test/x?q")),
        ("HTTPS://a.test", pb.Image(url="HTTPS://a.test")),
        ("data:image/png;base64,AAAA", pb.Image(data_uri="data:image/png;base64,AAAA")),
        ("DATA:,%00", pb.Image(data_uri="DATA:,%00")),
    ],
)
def test_a_picture_is_bytes_a_url_or_a_data_uri(source: ImageSource, image: pb.Image) -> None:
    assert to_image(source) == image
    assert user_message("What?", [source]).parts[0].image == image


def test_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data.png"
    file.write_bytes(BYTES)
    monkeypatch.chdir(tmp_path)
    for source in (file, str(file), "data.png", Path("data.png")):
        assert to_image(source) == pb.Image(data=BYTES)
    with pytest.raises(FileNotFoundError):
        to_image("other.png")


def test_the_command_line_refuses_a_path_without_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.png"):
        result = CliRunner().invoke(app, ["generate", "What?", "--image", str(path), "--address", "127.0.0.1:9"])
        assert result.exit_code == 2
        assert "no file of this name" in result.output
