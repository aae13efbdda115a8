"""The command line, without a server."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from airside.cluster.cli import app
from airside.cluster.cli.generate_view import show_events
from airside.cluster.config.file import ConfigError
from airside.proto import airside_pb2 as pb

LOCAL_YAML = Path(__file__).resolve().parents[2] / "cluster" / "local.yaml"


def airside(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "airside.cluster.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
    )


def test_the_example_has_no_problems() -> None:
    result = CliRunner().invoke(app, ["config", "check", str(LOCAL_YAML)])
    assert result.exit_code == 0
    assert "no problems" in result.output


def test_check_raises_what_main_explains(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("engine: {max_num_seq: 1}\n")
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert isinstance(result.exception, ConfigError)


def test_problems_go_to_stderr_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("engine:\n  max_num_seq: 1\nvison: {}\n")
    result = airside("up", str(path), home=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"{path}:2: engine.max_num_seq: unknown key; did you mean max_num_seqs?",
        f"{path}:3: vison: unknown key; did you mean vision?",
    ]


def test_show_prints_what_set_changed() -> None:
    result = CliRunner().invoke(app, ["config", "show", str(LOCAL_YAML), "--set", "engine.max_num_seqs=8"])
    assert yaml.safe_load(result.output)["engine"]["max_num_seqs"] == 8


def test_no_server_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = airside("status", "--address", "127.0.0.1:9", home=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: no server answers; start one with `airside up FILE`")
    assert len(result.stderr.splitlines()) == 1


def test_down_without_a_server(tmp_path: Path) -> None:
    result = airside("down", home=tmp_path)
    assert (result.returncode, result.stderr) == (2, "no server of yours is up\n")
    assert airside("down", "--all", home=tmp_path).returncode == 0


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from airside.cluster.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(sorted({'torch', 'ray', 'transformers', 'grpc', 'pydantic'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("reason", "is_good"), [("stop", True), ("length", True), ("vision_failed", False)])
def test_text_goes_to_stdout_and_the_end_to_stderr(reason: str, is_good: bool) -> None:
    finished = pb.Finished(reason=reason, usage=pb.Usage(prompt_tokens=3, completion_tokens=2))
    events = [
        pb.GenerateEvent(accepted=pb.Accepted()),
        pb.GenerateEvent(delta=pb.Delta(text="Par")),
        pb.GenerateEvent(delta=pb.Delta(text="is")),
        pb.GenerateEvent(finished=finished),
    ]
    text, notes = io.StringIO(), io.StringIO()
    assert show_events(events, text, notes) is is_good
    assert text.getvalue() == "Paris\n"
    assert notes.getvalue().startswith(f"[{reason}: 3 prompt tokens, 2 new")
