"""The example that asks for JSON, against a real gateway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gateway.conftest import RunningGateway
from tests.gateway.scripted_controller import ScriptedController, batch, finish, record
from tests.gateway.tiny_checkpoint import END_ID, byte_level_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_json_and_how_likely_it_was(gateway: RunningGateway, controller: ScriptedController) -> None:
    script = [sys.executable, "examples/json_client.py", "proto/airside.proto", f"127.0.0.1:{gateway.port}", "a city"]
    with subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as example:
        request = controller.accept()
        assert '"city"' in request.grammar
        ids = [*byte_level_tokenizer().encode('{"city":"Paris","is_capital":true}').ids, END_ID]
        records = {request.seq_id: record(-0.5) * len(ids)}
        controller.send(batch((request.seq_id, ids), records=records, finished=[finish(request.seq_id)]))
        out, _ = example.communicate(timeout=60)
    assert example.returncode == 0, out
    assert out.endswith("[stop]\n{'city': 'Paris', 'is_capital': True}\n")
    assert out.count(" 60.7%  ") == len(ids)
