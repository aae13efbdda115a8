"""An engine with its fake workers, run to the end."""

from __future__ import annotations

from typing import Any

from airside import _core
from tests.engine.columns import config, plan_rows, request, token_rows
from tests.engine.fake_model import Answer, FakeModel


class Driver:
    """Runs an engine, as many steps ahead as it plans, and keeps what clients are told and what was planned."""

    def __init__(self, **values: Any) -> None:  # Any: fields of EngineConfig
        self.config = config(**values)
        self.engine = _core.Engine(self.config)
        self.model = FakeModel(self.config.block_size)
        self.flights: list[_core.StepPlan] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, _core.Finish] = {}
        self.admitted: list[int] = []  # in the order of their first rows
        self.row_lengths: list[list[int]] = []  # per step
        self.now = 0.0

    def add(self, seq_id: int, tokens: int | list[int], **values: Any) -> str | None:  # Any: fields of Request
        """The rejection's code, or None."""
        self.model.introduce(
            seq_id, values.get("cache_salt", ""), values.get("image_hashes") or [(seq_id, i) for i in range(9)]
        )
        rejection = self.engine.add(request(seq_id, tokens, **values), self.now)
        return rejection.code if rejection else None

    def schedule(self) -> bool:
        plan = self.engine.schedule(self.now)
        self.engine.check()
        if plan is None:
            return False
        rows = plan_rows(plan)
        self.row_lengths.append([len(row.tokens) for row in rows])
        self.admitted += [row.seq_id for row in rows if row.seq_id not in self.admitted]
        self.flights.append(plan)
        return True

    def apply(self) -> Answer:
        """Computes the first step in flight and closes it."""
        answer = self.model.execute(self.flights.pop(0))
        answer.apply_to(self.engine, self.now)
        self.engine.check()
        self.look()
        return answer

    def look(self) -> None:
        for output in self.engine.take_outputs():
            for seq_id, made in token_rows(output):
                self.tokens.setdefault(seq_id, []).extend(made)
            self.ends |= {finish.seq_id: finish for finish in output.finished}

    def step(self) -> bool:
        """Plans all that can be, and closes the first; False: nothing moves."""
        while self.schedule():
            pass
        if not self.flights:
            self.look()
            return False
        self.apply()
        return True

    def fail_step(self) -> None:
        self.flights.clear()
        self.model.restart()
        self.engine.fail_step(self.now)

    def drain(self) -> None:
        for _ in range(2000):
            if not self.step():
                return
        raise AssertionError("it never ends")
