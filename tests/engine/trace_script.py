"""Trace files: commands for an engine, and beneath each, after a line of four dashes, what it must answer.

    engine num_blocks=4 block_size=4       a new engine; fields of EngineConfig
    add ID TOKENS [field=value ...]        TOKENS: how many; images=2,5 puts marks there; fields of Request
    shape ID INDEX COUNT                   the image becomes so many image tokens
    ready ID INDEX                         its pixels are in
    abort ID CAUSE    fail-vision ID WHY   fail-grammar ID WHY
    stop ID TOKENS WHY                     somebody found a stop string in so many tokens
    grammar ID                             it is built
    schedule          fail-step            both at the time of the trace; a token of the step before shows as ?
    apply [TOKENS]                         the oldest step: 5,6: those; else 200 + the number of tokens made so far
    step [COUNT]                           schedule, apply and outputs, so many times or until nothing moves
    outputs           state                what clients are told; who is where, with how much computed
    time SECONDS                           the time from here on

A line that starts with # is a comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from airside import _core
from tests.engine.columns import IMAGE, PlanRow, config, i32, plan_rows, request, token_rows

SEPARATOR = "----"


@dataclass
class Stanza:
    """One command; `head` are its lines as written, comments and blank lines above it included."""

    head: list[str]
    command: str
    expected: list[str]


def parse(text: str) -> list[Stanza]:
    stanzas: list[Stanza] = []
    head: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        head.append(line)
        if not line.strip() or line.startswith("#"):
            continue
        assert next(lines) == SEPARATOR, f"no {SEPARATOR} after {line!r}"
        stanzas.append(Stanza(head=head, command=line, expected=list(_until_blank(lines))))
        head = [""]
    return stanzas


def render(stanzas: list[Stanza], answers: list[list[str]]) -> str:
    lines: list[str] = []
    for stanza, answer in zip(stanzas, answers, strict=True):
        lines += [*stanza.head, SEPARATOR, *answer]
    return "\n".join(lines) + "\n"


def _until_blank(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


class TraceRunner:
    """Runs commands on an engine and says, in lines of text, what came of each."""

    def __init__(self) -> None:
        self._engine = _core.Engine(config())
        self._plans: list[_core.StepPlan] = []  # in flight
        self._ids: list[int] = []
        self._now = 0.0

    def run(self, command: str) -> list[str]:
        name, *words = command.split()
        commands: dict[str, Callable[[list[str]], list[str]]] = {
            "engine": self._new_engine,
            "add": self._add,
            "shape": self._shape,
            "ready": lambda words: [_yes(self._engine.set_ready(int(words[0]), int(words[1])))],
            "abort": lambda words: [_yes(self._engine.abort(int(words[0]), " ".join(words[1:])))],
            "fail-vision": lambda words: [_yes(self._engine.fail_vision(int(words[0]), " ".join(words[1:])))],
            "fail-grammar": lambda words: [_yes(self._engine.fail_grammar(int(words[0]), " ".join(words[1:])))],
            "grammar": lambda words: [_yes(self._engine.set_grammar_ready(int(words[0])))],
            "stop": lambda words: [_yes(self._engine.stop(int(words[0]), int(words[1]), " ".join(words[2:])))],
            "schedule": self._schedule,
            "apply": self._apply,
            "fail-step": self._fail_step,
            "step": self._step,
            "outputs": self._outputs,
            "state": self._state,
            "time": self._set_time,
        }
        answer = commands[name](words)
        self._engine.check()
        return answer

    def _new_engine(self, words: list[str]) -> list[str]:
        self._engine = _core.Engine(config(**_fields(words)))
        self._plans, self._ids, self._now = [], [], 0.0
        return ["ok"]

    def _set_time(self, words: list[str]) -> list[str]:
        self._now = float(words[0])
        return ["ok"]

    def _add(self, words: list[str]) -> list[str]:
        seq_id, fields = int(words[0]), _fields(words[2:])
        tokens = [100 + i for i in range(int(words[1]))]
        fields["golden_tokens"] = i32(fields.pop("golden", []))
        positions = fields.pop("images", [])
        for position in positions:
            tokens[position] = IMAGE
        asked = request(seq_id, tokens, image_positions=positions, **{"arrival": self._now, **fields})
        rejection = self._engine.add(asked, self._now)
        if rejection is not None:
            return [f"rejected: {rejection.code}: {rejection.detail}"]
        self._ids = [*(i for i in self._ids if i != seq_id), seq_id]
        return [f"accepted, {self._engine.queue_position(seq_id)} ahead"]

    def _shape(self, words: list[str]) -> list[str]:
        seq_id, index, count = (int(word) for word in words)
        return [_yes(self._engine.set_shape(seq_id, index, i32([IMAGE] * count)))]

    def _schedule(self, _: list[str]) -> list[str]:
        plan = self._engine.schedule(self._now)
        if plan is None:
            return ["nothing"]
        self._plans.append(plan)
        lines = [_describe_row(row) for row in plan_rows(plan)]
        lines += [f"image {i} of {s}: [{start}, {start + count})" for s, i, start, count in plan.images]
        return lines

    def _apply(self, words: list[str]) -> list[str]:
        plan = self._plans.pop(0)
        made = [
            200 + row.position + i
            for row in plan_rows(plan)
            for i in range(row.num_sampled)
            if row.position is not None
        ]
        tokens = [int(word) for word in words[0].split(",")] if words else made
        self._engine.apply(plan.step_id, i32(tokens), self._now)
        return self._outputs([])

    def _fail_step(self, _: list[str]) -> list[str]:
        self._engine.fail_step(self._now)
        self._plans.clear()
        return ["ok"]

    def _step(self, words: list[str]) -> list[str]:
        lines: list[str] = []
        for _ in range(int(words[0]) if words else 1):
            lines += self._schedule([])
            if not self._plans:
                break
            lines += self._apply([])
        return lines

    def _outputs(self, _: list[str]) -> list[str]:
        lines: list[str] = []
        for output in self._engine.take_outputs():
            lines += [f"-> {output.client}: {s} made {' '.join(map(str, tokens))}" for s, tokens in token_rows(output)]
            lines += [f"-> {output.client}: {_describe(finish)}" for finish in output.finished]
        return lines or ["-> nothing new"]

    def _state(self, _: list[str]) -> list[str]:
        stats = self._engine.stats()
        lines = [f"blocks free {stats.blocks_free} of {stats.blocks_total}"]
        for seq_id in self._ids:
            status = self._engine.status(seq_id)
            if status is not None:
                ahead = f", {self._engine.queue_position(seq_id)} ahead" if status == "WAITING" else ""
                lines.append(f"{seq_id}: {status}{ahead}")
        if stats.blocks_cached:
            lines.append(f"blocks cached {stats.blocks_cached}, hits {stats.prefix_cache_hits}")
        if stats.draft_tokens:
            lines.append(f"drafts {stats.draft_tokens}, accepted {stats.accepted_tokens}")
        if stats.num_preemptions or stats.recomputed_tokens:
            lines.append(f"preemptions {stats.num_preemptions}, recomputed {stats.recomputed_tokens}")
        return lines


def _yes(done: bool) -> str:
    return "done" if done else "no"


def _describe_row(row: PlanRow) -> str:
    banned = (row.banned or [[]])[0]
    pending = " ?" if any(token < 0 for token in row.tokens) else ""
    drafts = f" drafts {' '.join(map(str, row.drafts))}" if row.drafts else ""
    slot = f", slot {row.state_slot}" if row.state_slot is not None else ""
    origin = f" from block {row.state_from}" if row.state_from not in (None, -1) else ""
    blocks = " ".join(map(str, row.blocks))
    return (
        f"{row.seq_id}: [{row.begin}, {row.end}){pending}{drafts} in blocks {blocks}{slot}{origin}"
        + (f", token {row.position}" if row.num_sampled else "")
        + (f", but none of {banned}" if banned else "")
    )


def _describe(finish: _core.Finish) -> str:
    usage = f"{finish.prompt_tokens} prompt + {finish.completion_tokens}"
    images = f", {finish.image_tokens} of images" if finish.image_tokens else ""
    preempted = f", preempted {finish.preemptions}" if finish.preemptions else ""
    cached = f", {finish.cached_tokens} cached" if finish.cached_tokens else ""
    return f"{finish.seq_id} ended: {finish.reason} ({finish.detail}); {usage}{images}{cached}{preempted}"


def _fields(words: list[str]) -> dict[str, Any]:  # Any: values of fields of many types
    lists = {"images", "stop_token_ids", "golden"}
    fields: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        fields[name] = [int(part) for part in value.split(",")] if name in lists else _value(value)
    return fields


def _value(text: str) -> int | float | bool | str | None:
    constants = {"true": True, "false": False, "none": None}
    if text in constants:
        return constants[text]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
