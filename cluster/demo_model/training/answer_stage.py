"""Stage 2: tower, connector and adapter learn to answer, through the frozen text model; loss on answers alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from airside.cluster.demo_model.training.chat import Chats
from airside.cluster.demo_model.training.facts import facts
from airside.cluster.demo_model.training.packing import IMAGE, SYSTEMS, Group, Packer, Rows
from airside.cluster.demo_model.training.questions import ABOUT_DIGITS, ABOUT_TWO, Kind, Question, ask
from airside.cluster.demo_model.training.readouts import Readouts
from airside.cluster.demo_model.training.scans import Scans
from airside.cluster.demo_model.training.text_model import HIDDEN, Adapter, TextModel
from airside.cluster.demo_model.training.tower import CONNECTOR, TOKENS, Tower
from airside.cluster.demo_model.training.tower_stage import Batch, Log, drawn, rate, some_digits
from airside.cluster.demo_model.training.words import Words
from airside.cluster.demo_model.training.world import Random, Scene, things_scene

ALONE = tuple(kind for kind in Kind if kind not in ABOUT_TWO and kind not in ABOUT_DIGITS)
# These may be asked several times about one picture, mostly about other things: that a colour belongs to a shape is
# learnt late.
BINDING = (Kind.COLOUR, Kind.COLOUR, Kind.COUNT_KIND)
TWO_OF_THINGS = (Kind.TWO_WHICH, Kind.TWO_MORE)


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How stage 2 trains. Pictures per step: `things` and `digits` are asked about; the extra ones only seen."""

    minutes: float
    things: int = 8
    digits: int = 4
    extra_things: int = 18
    extra_digits: int = 6
    questions_per_picture: int = 5
    pairs_of_things: int = 3
    pairs_of_digits: int = 2
    adapter_rate: float = 1e-3
    connector_rate: float = 4e-4
    tower_rate: float = 1e-4
    readout_rate: float = 3e-4
    readout_share: float = 0.2
    word_share: float = 0.3
    warmup_steps: int = 30
    chat_every: int = 4
    chats_per_step: int = 5
    chat_share: float = 2.0
    average_decay: float = 0.99
    log_steps: int = 10
    steps_max: int | None = None


class Scores:
    """How often each kind has lately been answered right, and so how much more often it is to be asked."""

    def __init__(self) -> None:
        self._right = dict.fromkeys(Kind, 0.0)

    def add(self, question: Question, right: bool) -> None:
        """Takes one answer in."""
        self._right[question.kind] += 0.01 * (right - self._right[question.kind])

    def share(self, kind: Kind) -> float:
        """A weight: kinds that are mostly wrong come up six times as often as those always right."""
        return 0.2 + (1 - self._right[kind])

    def told(self) -> str:
        """For a log line."""
        return ", ".join(f"{kind.name.lower()} {share:.2f}" for kind, share in self._right.items())


class AnswerStage:
    """What is trained and what it is trained with.

    Args:
        tower, readouts: as stage 1 left them.
        adapter: a new one.
    """

    def __init__(
        self,
        tower: Tower,
        readouts: Readouts,
        adapter: Adapter,
        text_model: TextModel,
        packer: Packer,
        chats: Chats,
        scans: Scans,
        settings: AnswerSettings,
        random: Random,
    ) -> None:
        self.tower, self.readouts, self.adapter = tower, readouts, adapter
        self._text_model, self._packer, self._chats, self._scans = text_model, packer, chats, scans
        self._settings, self._random = settings, random
        self._words = Words(packer, text_model.embedding)
        self.scores = Scores()
        connector = [tensor for name, tensor in tower.named().items() if "connector" in name]
        tower_only = [tensor for name, tensor in tower.named().items() if "connector" not in name]
        self._groups: list[tuple[list[Tensor], float]] = [
            (tower_only, settings.tower_rate),
            (connector, settings.connector_rate),
            (list(adapter.parameters()), settings.adapter_rate),
            (list(readouts.parameters()), settings.readout_rate),
        ]
        self._optimizer = torch.optim.AdamW(
            [{"params": params, "base": base, "lr": base} for params, base in self._groups],
            betas=(0.9, 0.98),
            weight_decay=0.01,
        )
        self._averaged = [*tower.parameters(), *adapter.parameters()]
        self._average = [tensor.detach().clone() for tensor in self._averaged]

    def train(self, log: Log, save: Callable[[], None]) -> None:
        """Until the time is up; calls `save` now and then."""
        start, step = time.monotonic(), 0
        losses: list[tuple[float, ...]] = []
        while True:
            done = (time.monotonic() - start) / (60 * self._settings.minutes)
            if done >= 1 or step == self._settings.steps_max:
                break
            for group in self._optimizer.param_groups:
                group["lr"] = group["base"] * rate(done, step, self._settings.warmup_steps)
            losses.append(self._step(step))
            step += 1
            self._take_average(step)
            if step % self._settings.log_steps == 0:
                means = " ".join(f"{sum(part) / len(part):.3f}" for part in zip(*losses, strict=True))
                passed = f"{time.monotonic() - start:.0f}s"
                log(f"answers {step} {passed} answer/facts/words/chat {means}; {self.scores.told()}")
                losses = []
            if step % (self._settings.log_steps * 5) == 0:
                save()
        save()

    def averaged(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The moving averages of tower and connector, and of the adapter, under their names in the files."""
        kept = [tensor.detach().clone() for tensor in self._averaged]
        self._assign(self._average)
        tower = {name: tensor.detach().clone() for name, tensor in self.tower.named().items()}
        adapter = {name: tensor.clone() for name, tensor in self.adapter.named().items()}
        self._assign(kept)
        return tower, adapter

    @torch.no_grad()
    def add_words(self, strength: float = 4.0, batches: int = 12) -> float:
        """Adds to the connector what makes tokens their words, by least squares; returns the share it explains."""
        connector = self.tower.named()[CONNECTOR]
        inputs, targets = [], []
        for _ in range(batches):
            batch = self._batch()
            inputs.append(self.tower.features(batch.pixels).flatten(0, 1))
            targets.append(self._words.target(facts(batch.scenes)).flatten(0, 1))
        x, y = torch.cat(inputs).double(), torch.cat(targets).double()
        square = x.T @ x
        ridge = 1e-3 * square.diagonal().mean() * torch.eye(len(square), dtype=torch.double)
        fitted = torch.linalg.solve(square + ridge, x.T @ y)
        connector += strength * fitted.T.float()
        return 1 - float((x @ fitted - y).square().sum() / y.square().sum())

    @torch.no_grad()
    def _assign(self, values: list[Tensor]) -> None:
        for tensor, value in zip(self._averaged, values, strict=True):
            tensor.copy_(value)

    @torch.no_grad()
    def _take_average(self, step: int) -> None:
        decay = min(self._settings.average_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, [tensor.detach() for tensor in self._averaged], 1 - decay)

    def _step(self, step: int) -> tuple[float, ...]:
        """Changes the weights once; the losses of answers, facts, words and chats."""
        settings = self._settings
        batch = self._batch()
        seen = self.tower(batch.pixels)
        true = facts(batch.scenes)
        told, _ = self.readouts.losses(seen, true, batch.ink, batch.scan)
        word_loss = self._words.loss(seen.tokens, true)
        fact_loss = torch.stack(list(told.values())).sum()
        prompt = self._packer.prompt(SYSTEMS[int(self._random.random() < 0.25)])
        rows = self._packer.pack(self._asked(batch.scenes), len(prompt))
        answer_loss = self._answer_loss(rows, seen.tokens, prompt)
        loss = answer_loss + settings.readout_share * fact_loss + settings.word_share * word_loss
        chat_loss = torch.zeros(())
        if step % settings.chat_every == 0:
            chosen = self._random.integers(0, 1 << 30, settings.chats_per_step).tolist()
            chat_loss = self._chats.loss(self.adapter, chosen)
            loss = loss + settings.chat_share * chat_loss
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        for params, _ in self._groups:
            nn.utils.clip_grad_norm_(params, 1.0)
        self._optimizer.step()
        return tuple(float(loss.detach()) for loss in (answer_loss, fact_loss, word_loss, chat_loss))

    def _batch(self) -> Batch:
        settings, random = self._settings, self._random
        scenes = [things_scene(random) for _ in range(settings.things)]
        scenes += some_digits(settings.digits, self._scans, False, random)
        scenes += [things_scene(random) for _ in range(settings.extra_things)]
        scenes += some_digits(settings.extra_digits, self._scans, False, random)
        return drawn(scenes, self._scans, random)

    def _asked(self, scenes: list[Scene]) -> list[Group]:
        settings, random = self._settings, self._random
        things = range(settings.things)
        digits = range(settings.things, settings.things + settings.digits)
        groups = []
        for i in things:
            weighted = sorted(ALONE + BINDING, key=lambda kind: -(random.random() ** (1 / self.scores.share(kind))))
            questions = [q for kind in weighted if (q := ask(kind, [scenes[i]], random)) is not None]
            groups.append(Group((i,), tuple(questions[: settings.questions_per_picture])))
        for i in digits:
            if (digit := ask(Kind.DIGIT, [scenes[i]], random)) is not None:
                groups.append(Group((i,), (digit,)))
        pairs: list[tuple[tuple[Kind, ...], range]] = [(TWO_OF_THINGS, things)] * settings.pairs_of_things
        pairs += [((Kind.TWO_DIGITS,), digits)] * settings.pairs_of_digits
        for kinds, among in pairs:
            first, second = (int(i) for i in random.choice(among, 2, replace=False))
            pair = [scenes[first], scenes[second]]
            questions = [q for kind in kinds if (q := ask(kind, pair, random)) is not None]
            if questions:
                groups.append(Group((first, second), tuple(questions)))
        return groups

    def _answer_loss(self, rows: Rows, tokens: Tensor, prompt: list[int]) -> Tensor:
        """Mean cross entropy of the answers' tokens; takes the scores too. tokens: [pictures, 16, 576]."""
        model = self._text_model
        embedded = model.embedding[rows.ids].clone()
        embedded[rows.ids == IMAGE] = tokens[rows.pictures].reshape(-1, HIDDEN).to(torch.bfloat16)
        assert int((rows.ids == IMAGE).sum()) == len(rows.pictures) * TOKENS
        hidden = model(embedded, rows.positions, rows.visible, prompt, self.adapter)
        answering = rows.targets >= 0
        logits, targets = model.logits(hidden[answering]), rows.targets[answering]
        wrong = set(rows.question[answering][logits.argmax(-1) != targets].tolist())
        for i, question in enumerate(rows.questions):
            self.scores.add(question, i not in wrong)
        return functional.cross_entropy(logits, targets)
