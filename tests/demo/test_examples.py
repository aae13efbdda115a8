"""The client examples run, against a stand-in server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_processes import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    config = tmp_path / "config.yaml"
    config.write_text(f"server: {{grpc: {{host: 127.0.0.1, port: {port}}}}}\n")
    command = [sys.executable, str(Path(__file__).parent / "fake_server.py"), "good", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "serving\n"
        yield f"127.0.0.1:{port}"
        server.terminate()


def run_example(name: str, *arguments: str, timeout_s: float = 60) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_client_made_from_the_proto_file_alone(address: str) -> None:
    out = run_example("generate_client.py", "proto/airside.proto", address, "The capital of France is")
    assert " Paris.\n[stop, 1 tokens]" in out


def test_chat_with_the_picture_that_comes_with_airside(address: str) -> None:
    out = run_example("chat_with_image.py", "--address", address)
    assert "9\n[stop" in out


@pytest.mark.slow
def test_chat_with_a_picture_of_ones_own(address: str) -> None:
    picture = ROOT / "cluster" / "demo_model" / "assets" / "exhibits" / "digit-2.jpg"
    assert "3\n[stop" in run_example("chat_with_image.py", str(picture), "Which?", "--address", address)


@pytest.mark.slow
def test_offline_engine(built_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built_demo.parents[2]))
    lines = run_example("offline.py", timeout_s=240).splitlines()
    assert lines[0].startswith("The capital of France is Paris")
    assert "length, 24 tokens]" in "\n".join(lines)
