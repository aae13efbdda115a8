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


def test_the_example_scales_by_load() -> None:
    shown = yaml.safe_load(CliRunner().invoke(app, ["config", "show", str(LOCAL_YAML)]).output)
    assert shown["vision"]["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 4,
        "target_media_wait_ms": 50.0,
        "upscale_delay_s": 3.0,
        "downscale_delay_s": 60.0,
    }


@pytest.mark.parametrize("key", ["replicas", "max_replicas"])
def test_the_number_of_vision_workers_has_moved(tmp_path: Path, key: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"vision:\n  {key}: 2\n")
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert f"vision.{key}: unknown key" in str(result.exception)


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


def test_several_continuations_are_shown_one_after_the_other() -> None:
    def delta(index: int, text: str) -> pb.GenerateEvent:
        return pb.GenerateEvent(delta=pb.Delta(index=index, text=text))

    def finished(index: int, reason: str) -> pb.GenerateEvent:
        return pb.GenerateEvent(finished=pb.Finished(index=index, reason=reason, detail="the client is gone"))

    events = [
        pb.GenerateEvent(accepted=pb.Accepted(seed=1, seeds=[1, 2])),
        *(delta(0, "Par"), delta(1, "Ly"), delta(0, "is"), delta(1, "on")),
        *(finished(1, "stop"), finished(0, "abort")),
    ]
    text, notes = io.StringIO(), io.StringIO()
    assert not show_events(events, text, notes)
    assert text.getvalue() == "Lyon\nParis\n"
    assert [line.split(" (")[0] for line in notes.getvalue().splitlines()] == ["[2 of 2: stop", "[1 of 2: abort"]


def test_log_probabilities_are_notes_after_the_text() -> None:
    top = [pb.TopLogprob(text=b" a", logprob=-0.5), pb.TopLogprob(text=b"\xc3", logprob=-1.5)]
    rows = [pb.TokenLogprob(text=b"\xc3", logprob=-1.5, top=top), pb.TokenLogprob(text=b"b", logprob=-0.25)]
    finished = pb.Finished(reason="stop", usage=pb.Usage(cached_tokens=2, draft_tokens=4, accepted_tokens=3))
    events = [
        pb.GenerateEvent(delta=pb.Delta(text="xb", logprobs=rows)),
        pb.GenerateEvent(finished=finished),
    ]
    text, notes = io.StringIO(), io.StringIO()
    assert show_events(events, text, notes)
    first, second, usage = notes.getvalue().splitlines()
    assert first.split() == ["-1.500", r"'\xc3'", "of", "'", "a'", "-0.500,", r"'\xc3'", "-1.500"]
    assert second.split() == ["-0.250", "'b'"]
    assert "2 cached" in usage
    assert "3 of 4 drafts accepted" in usage


def unboxed(output: str) -> str:
    """What the command line says, without the frame that it draws and the lines that this takes."""
    return " ".join(output.replace("│", " ").split())


def test_a_text_has_one_form() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--json", "--regex", "a+", "--address", "127.0.0.1:9"])
    assert result.exit_code == 2
    assert "json_object and regex" in unboxed(result.output)


def test_grammars_are_files(tmp_path: Path) -> None:
    lark, gbnf = tmp_path / "a.lark", tmp_path / "a.gbnf"
    lark.write_text('start: "é"')
    arguments = ["generate", "x", "--address", "127.0.0.1:9", "--lark", str(lark)]
    result = CliRunner().invoke(app, [*arguments, "--gbnf", str(gbnf)])
    assert (result.exit_code, "does not exist" in unboxed(result.output)) == (2, True)
    gbnf.write_text('root ::= "é"')
    result = CliRunner().invoke(app, [*arguments, "--gbnf", str(gbnf)])
    assert (result.exit_code, "lark and gbnf" in unboxed(result.output)) == (2, True)
