"""One prompt on its way through the offline `LLM`: its sequences, and what has come of them so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from airside.cluster.offline.outputs import Completion, RequestOutput
from airside.controller.gateway.continuation import Continuation
from airside.controller.gateway.prompt import Prompt
from airside.controller.gateway.streams import Tokens
from airside.controller.gateway.terms import Terms
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import messages as msg

Send = Callable[[msg.Message], None]


class Generation:
    """Turns what the controller says of a prompt's sequences into its output.

    Args:
        seq_ids: of the continuations.
        terms, prompt: what is asked for.
        model: the text side.
        send: tells the controller that a stop string ends a sequence.
    """

    def __init__(self, seq_ids: Sequence[int], terms: Terms, prompt: Prompt, model: TextModel, send: Send) -> None:
        self.terms = terms
        self.prompt = prompt
        self.seq_ids = seq_ids
        completions = [Completion(index, terms.seed(index)) for index in range(terms.n)]
        self.output = RequestOutput(list(prompt.token_ids), completions)
        self._completions = dict(zip(seq_ids, completions, strict=True))
        self._continuations = {
            seq_id: Continuation(index, terms, prompt, model, _stopper(seq_id, send))
            for index, seq_id in enumerate(seq_ids)
        }

    def add_requests(self) -> list[msg.AddRequest]:
        """For the controller, one per continuation. Each goes with the prompt's images."""
        return [self.terms.add_request(seq_id, index, self.prompt) for index, seq_id in enumerate(self.seq_ids)]

    def tokens(self, seq_id: int, tokens: Tokens) -> None:
        """New tokens of a sequence."""
        self._add(seq_id, self._continuations[seq_id].tokens(tokens))

    def prompt_records(self, seq_id: int, records: bytes) -> None:
        """Log-probabilities of the prompt's next tokens."""
        self._add(seq_id, self._continuations[seq_id].prompt_records(records))

    def image_ready(self, news: msg.ImageReady) -> None:
        """A picture's number of tokens is known."""
        self._add(news.seq_id, self._continuations[news.seq_id].image_ready(news))

    def image_encoded(self, news: msg.ImageEncoded) -> None:
        """A picture's embeddings are there."""
        self._continuations[news.seq_id].image_encoded(news)

    def finish(self, row: msg.FinishedRow) -> None:
        """The end of a sequence."""
        self._add(row.seq_id, self._continuations[row.seq_id].finish(row)[0])

    def reject(self, rejected: msg.Rejected) -> None:
        """A sequence was never begun."""
        completion = self._completions[rejected.seq_id]
        completion.finish_reason, completion.detail = "rejected", f"{rejected.code}: {rejected.detail}"

    def _add(self, seq_id: int, events: Iterable[pb.GenerateEvent]) -> None:
        for event in events:
            self._completions[seq_id].add(event)
            self.output.prompt_logprobs += event.delta.prompt_logprobs


def _stopper(seq_id: int, send: Send) -> Callable[[int, str], None]:
    return lambda num_tokens, detail: send(msg.StopSequence(seq_id, num_tokens, detail))


class Generations:
    """All prompts of one call, by the sequences that are not over yet."""

    def __init__(self, generations: Iterable[Generation]) -> None:
        self._unfinished = {seq_id: generation for generation in generations for seq_id in generation.seq_ids}

    @property
    def unfinished(self) -> list[int]:
        """Sequences that have no end yet."""
        return list(self._unfinished)

    def take(self, message: msg.Message | None) -> None:
        """Takes what the controller says. What is of other sequences, or of none, is passed over."""
        match message:
            case msg.OutputBatch():
                self._take_batch(message)
            case msg.ImageReady() if message.seq_id in self._unfinished:
                self._unfinished[message.seq_id].image_ready(message)
            case msg.ImageEncoded() if message.seq_id in self._unfinished:
                self._unfinished[message.seq_id].image_encoded(message)
            case msg.Rejected() if message.seq_id in self._unfinished:
                self._unfinished.pop(message.seq_id).reject(message)

    def _take_batch(self, batch: msg.OutputBatch) -> None:
        for seq_id, records in batch.prompt_rows():
            if seq_id in self._unfinished:
                self._unfinished[seq_id].prompt_records(seq_id, records)
        for (seq_id, ids), records in zip(batch.rows(), batch.records(), strict=True):
            if seq_id in self._unfinished:
                self._unfinished[seq_id].tokens(seq_id, Tokens(ids, bytearray(records), batch.step_tokens))
        for row in batch.finished:
            if row.seq_id in self._unfinished:
                self._unfinished.pop(row.seq_id).finish(row)
