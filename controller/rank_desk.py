"""Ranks of the model as they come and go: their hellos, the set-up of a whole group, the end of one."""

from __future__ import annotations

import logging
import time

from airside.controller.engine_host import EngineHost
from airside.controller.grammar_desk import GrammarDesk
from airside.controller.peers import Peers, Role
from airside.controller.post import Post
from airside.proto.messages import Shutdown, WorkerHello

_log = logging.getLogger(__name__)


class RankDesk:
    """Makes the engine host's group of ranks, tells it what it must know, and sees to its end.

    Args:
        host: the engine and its group.
        grammars: what a new group must build.
        peers: who is on the bus.
        post: where messages go.
    """

    def __init__(self, host: EngineHost, grammars: GrammarDesk, peers: Peers, post: Post) -> None:
        self._host = host
        self._grammars = grammars
        self._peers = peers
        self._post = post

    def hello(self, peer: str, hello: WorkerHello) -> None:
        """A rank is up. It joins its launch, unless that is over, or no group of ours."""
        refusal = self._host.refusal(hello)
        if refusal:
            _log.error("worker_refused name=%s pid=%d why=%s", peer, hello.pid, refusal)
            self._post.last_word(peer, Shutdown(refusal))
            return
        self._peers.join(Role.WORKER, peer, hello.node, hello.pid, time.monotonic(), hello.rank)
        _log.info("worker_joined name=%s launch=%d num_blocks=%d", peer, hello.group, hello.num_blocks)
        if self._host.join(peer, hello):
            self._set_up()

    def fail(self, why: str, tell_ranks: bool = True) -> None:
        """The group is no more; its sequences wait for the next one."""
        for rank in self._host.fail(why, time.time()):
            self._peers.lose(rank)
            if tell_ranks:
                self._post.last_word(rank, Shutdown(why))

    def _set_up(self) -> None:
        """A group is whole: it gets its KV blocks and the grammars, and the engine goes on where it was."""
        shortage = self._host.shortage()
        if shortage:
            self.fail(shortage)
            return
        setup = self._host.set_up()
        for rank in self._host.ranks:
            self._post.send(rank, setup)
        self._grammars.open_again()
