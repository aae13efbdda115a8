"""Grammars of the live structured sequences, and what is said of them to rank 0, which keeps them built."""

from __future__ import annotations

from airside.controller.engine_host import EngineHost
from airside.controller.post import Post
from airside.proto.messages import CloseGrammar, GrammarFailed, GrammarReady, OpenGrammar


class GrammarDesk:
    """Remembers each grammar for as long as its sequence lives, since a new launch of ranks knows none of them.

    Args:
        host: has the engine, and knows who speaks for the ranks.
        post: where messages go.
    """

    def __init__(self, host: EngineHost, post: Post) -> None:
        self._host = host
        self._post = post
        self._grammars: dict[int, str] = {}

    def open(self, seq_id: int, grammar: str) -> None:
        """A structured sequence was accepted: its grammar is to be built."""
        assert seq_id not in self._grammars, seq_id
        self._grammars[seq_id] = grammar
        self._ask(seq_id, b"")

    def open_again(self) -> None:
        """There are new ranks: they are to build every grammar, and take it past what its sequence has made."""
        engine = self._host.engine
        assert engine is not None
        for seq_id in engine.structured_ids():
            self._ask(seq_id, engine.output_ids(seq_id))

    def hear(self, peer: str, message: GrammarReady | GrammarFailed) -> None:
        """What rank 0 says of a grammar; nothing changes when the sequence is gone, or the speaker is another."""
        engine = self._host.engine
        if engine is None or peer != self._host.speaker or message.seq_id not in self._grammars:
            return
        match message:
            case GrammarReady():
                engine.set_grammar_ready(message.seq_id)
            case GrammarFailed():
                engine.fail_grammar(message.seq_id, message.detail)

    def close(self, seq_id: int) -> None:
        """A sequence has ended. Unstructured ones are fine."""
        if self._grammars.pop(seq_id, None) is not None and self._host.speaker is not None:
            self._post.send(self._host.speaker, CloseGrammar(seq_id))

    def _ask(self, seq_id: int, output_ids: bytes) -> None:
        assert self._host.speaker is not None
        self._post.send(self._host.speaker, OpenGrammar(seq_id, self._grammars[seq_id], output_ids))
