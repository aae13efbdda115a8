"""The engine does, command by command, what the trace files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.trace_script import TraceRunner, parse, render

TRACES = sorted((Path(__file__).parent / "traces").glob("*.txt"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path, pytestconfig: pytest.Config) -> None:
    text = path.read_text()
    stanzas = parse(text)
    runner = TraceRunner()
    rendered = render(stanzas, [runner.run(stanza.command) for stanza in stanzas])
    if pytestconfig.getoption("--rewrite-traces", default=False):
        path.write_text(rendered)
    else:
        assert rendered == text


def test_there_are_traces() -> None:
    assert len(TRACES) >= 12


def test_a_wrong_answer_shows() -> None:
    stanzas = parse("add 1 3\n----\naccepted, 5 ahead\n")
    assert render(stanzas, [TraceRunner().run(stanzas[0].command)]) == "add 1 3\n----\naccepted, 0 ahead\n"
