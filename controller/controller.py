"""The controller's loop: it owns the engine core and the bus, and is where every message arrives.

Nothing here waits for a peer. A peer that is gone, silent, or does not take its messages is lost, and that is final
until a process of that name says hello again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from itertools import islice

import psutil

from airside.controller.engine_host import EngineHost
from airside.controller.engine_setup import vision_limits
from airside.controller.front_desk import FrontDesk
from airside.controller.gauges import gather_gauges, gather_peers
from airside.controller.grammar_desk import GrammarDesk
from airside.controller.peers import FIRST_MESSAGES, Peers, Role
from airside.controller.plan_message import output_frame, plan_frame
from airside.controller.post import Post
from airside.controller.rank_desk import RankDesk
from airside.controller.step_clock import StepClock
from airside.controller.supervisor_desk import SupervisorDesk, stuck_message
from airside.controller.vision.desk import VisionDesk
from airside.controller.vision.ledger import VisionLedger
from airside.proto import messages as msg
from airside.proto.abort_cause import AbortCause
from airside.proto.channel import Envelope, Hub
from airside.proto.settings import ControllerSettings

NAME = "controller"
REPLACED = "replaced by a new process of the same name"
TURN_MESSAGES_MAX = 512  # then the engine gets its turn, however many more have come
TICK_S = 0.5  # the longest wait, and how often silence is looked for

_log = logging.getLogger(__name__)


class Controller:
    """One engine, its peers, and the loop that serves them.

    Args:
        settings: the engine's limits.
        hub: the bus; the caller closes it after `run`.
    """

    def __init__(self, settings: ControllerSettings, hub: Hub) -> None:
        self._settings = settings
        self._hub = hub
        self._post = Post(hub)
        self._peers = Peers()
        self._host = EngineHost(settings)
        self._ledger = VisionLedger(vision_limits(settings))
        self._desk = FrontDesk(self._host, self._ledger, takes_images=settings.image_token_id is not None)
        self._grammars = GrammarDesk(self._host, self._post)
        self._ranks = RankDesk(self._host, self._grammars, self._peers, self._post)
        self._vision = VisionDesk(self._ledger, self._host, self._desk, self._post, settings.image_bytes_max)
        self._supervision = SupervisorDesk(settings, self._ledger)
        self._clock = StepClock()
        self._oldest_since = 0.0  # when the oldest step in flight became that
        self._told = self._state()  # what the gateways know
        self._stop_why: str | None = None
        self._next_watch = 0.0
        self._turn_again = False  # something changed that no message tells of

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`, then ends every sequence and tells the workers to go."""
        self._peers.join(Role.CONTROLLER, NAME, self._settings.node, os.getpid(), time.monotonic())
        _log.info("controller_up endpoint=%s", self._settings.endpoint)
        while self._stop_why is None:
            for envelope in islice(self._hub.receive(self._wait_ms()), TURN_MESSAGES_MAX):
                self._handle(envelope)
            self._desk.expire(time.time())
            self._start_steps()
            self._reply()
            self._tell_state()
            self._tell_load()
            self._watch()
        self._shut_down(self._stop_why)

    def stop(self, why: str) -> None:
        """Ends `run` within a tick. May be called from a signal handler."""
        self._stop_why = why

    def _wait_ms(self) -> int:
        """How long nothing can happen unless a message comes: up to a deadline, at most one tick."""
        if self._turn_again:
            self._turn_again = False
            return 0
        deadline = self._desk.next_deadline()
        wait_s = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - time.time()))
        return int(wait_s * 1000) + (wait_s < TICK_S)  # rounded up, so that the deadline has passed afterwards

    def _start_steps(self) -> None:
        """Plans steps and sends them to every rank, as far ahead as the engine looks."""
        self._clock.start()
        while (plan := self._host.schedule(time.time())) is not None:
            self._clock.lap("schedule")
            images = [] if plan.is_plain else [image[:2] for image in plan.images] + plan.ahead
            self._ledger.begin_step([seq_id for seq_id, _ in images])
            frame = plan_frame(plan, self._ledger)
            self._clock.lap("build")
            if self._host.steps_in_flight == 1:
                self._oldest_since = time.monotonic()
            self._vision.send_pixels(images)
            self._post.send_frame(self._host.ranks, frame)
            self._clock.lap("send")
        self._clock.lap("schedule")

    def _on_step_result(self, peer: str, result: msg.StepResult) -> None:
        self._clock.start()
        try:
            is_current = self._host.apply(peer, result, time.time())
        except ValueError as error:
            self._lose(peer, f"its result of step {result.step_id} is malformed: {error}")
            return
        self._clock.lap("apply")
        if is_current:
            self._clock.end_step()
            self._oldest_since = time.monotonic()
            self._vision.perform(self._ledger.close_step())
            if result.encoded:
                self._vision.tell_encoded(result.encoded)

    def _reply(self) -> None:
        """Sends the gateways what their sequences made since the last time, and lets go of those that ended."""
        engine = self._host.engine
        if engine is None:
            return
        self._clock.start()
        while outputs := engine.take_outputs():
            for output in outputs:
                gateway = self._desk.gateways.name(output.client)
                if gateway is not None:
                    frame = output_frame(output, self._vision.causes)
                    self._clock.lap("reply")
                    self._post.send_frame([gateway], frame)
                    self._clock.lap("send")
                for finish in output.finished:
                    self._end(finish.seq_id)
        self._clock.lap("reply")

    def _end(self, seq_id: int) -> None:
        """A sequence has ended, and its front end was told."""
        self._desk.end(seq_id)
        self._grammars.close(seq_id)
        self._vision.end(seq_id)

    def _state(self) -> msg.EngineState:
        return self._host.state(vision_ready=self._supervision.vision_ready)

    def _tell_state(self) -> None:
        """Tells all gateways the engine's state, if it is news."""
        state = self._state()
        if state != self._told:
            self._told = state
            for gateway in self._desk.gateways.names:
                self._post.send(gateway, state)

    def _tell_load(self) -> None:
        """Tells the supervisor how busy the vision workers are, when that is due."""
        load = self._supervision.take_load(time.monotonic())
        if load is not None:
            assert self._supervision.supervisor is not None
            self._post.send(self._supervision.supervisor, load)

    def _watch(self) -> None:
        """Gives up peers that take no messages, and once a tick those that are silent or stuck in their work."""
        self._give_up(self._post.take_undelivered(), "it is gone or takes no more messages")
        now, silence_s, step_s = time.monotonic(), self._settings.silence_timeout_s, self._settings.step_timeout_s
        if now < self._next_watch:
            return
        self._next_watch = now + TICK_S
        is_computing = self._host.steps_in_flight > 0
        excused = self._host.ranks if is_computing else []
        self._give_up(self._peers.silent(now, silence_s, excused), f"silent for {silence_s:g} s")
        job_s = self._settings.image_job_timeout_s
        self._give_up(self._ledger.stuck(now), f"one picture took more than {job_s:g} s (vision.job_timeout_s)")
        if is_computing and now - self._oldest_since > step_s:
            self._give_up(self._host.ranks, f"a step took more than {step_s:g} s (engine.step_timeout_s)")

    # --- messages -------------------------------------------------------------------------------------------------

    def _handle(self, envelope: Envelope) -> None:
        """Does what one message asks. A lost peer that speaks on without a hello is told to go."""
        peer, message, now = envelope.peer, envelope.message, time.monotonic()
        if not self._peers.heard(peer, now) and not isinstance(message, FIRST_MESSAGES):
            self._dismiss(peer)
            return
        if not self._peers.may_say(peer, message):
            self._refuse(peer, message)
            return
        match message:
            case msg.Heartbeat():
                self._peers.set_rss(peer, message.rss_bytes)
            case msg.StepResult():
                self._on_step_result(peer, message)
            case msg.AddRequest():
                self._on_add_request(peer, message, envelope.attachments)
            case msg.AbortSequence():
                self._desk.abort(message.seq_id, message.cause)
            case msg.StopSequence():
                self._on_stop_sequence(peer, message)
            case msg.AbortByName():
                outcome = self._desk.abort_by_name(message.request_id)
                self._post.send(peer, msg.AbortOutcome(message.query_id, outcome))
            case msg.ScaleVision():
                self._on_scale_vision(peer, message)
            case msg.CountImages():
                self._vision.count(peer, message, envelope.attachments)
            case msg.GaugesQuery():
                sources = self._host.engine, self._ledger, self._vision, self._clock, self._hub
                self._post.send(peer, gather_gauges(message.query_id, *sources))
            case msg.PeersQuery():
                with contextlib.suppress(OSError):  # strangers' connections may have left no file to be opened
                    self._peers.set_rss(NAME, psutil.Process().memory_info().rss)
                parts = self._peers, self._host, self._ledger, self._supervision
                self._post.send(peer, gather_peers(message.query_id, now, *parts))
            case msg.GrammarReady() | msg.GrammarFailed():
                self._grammars.hear(peer, message)
            case msg.Credit() | msg.Fetched() | msg.Shape() | msg.Pixels() | msg.ImageFailed() | msg.ArenaFull():
                self._vision.hear(peer, message, envelope.attachments, now)
            case msg.GatewayHello():
                self._on_gateway_hello(peer, message)
            case msg.WorkerHello():
                self._on_worker_hello(peer, message)
            case msg.VisionHello():
                self._on_vision_hello(peer, message)
            case msg.SupervisorHello():
                self._on_supervisor_hello(peer, message)
            case msg.Goodbye():
                self._on_goodbye(peer)
            case msg.WorkerFailed():
                self._on_worker_failed(peer, message)
            case msg.PeerLost():
                self._lose(message.name, message.detail)
            case msg.VisionPool():
                self._supervision.note_pool(message)
            case msg.DrainVision():
                self._vision.perform(self._ledger.drain(message.name))
            case msg.Shutdown():
                self.stop(message.why)
            case other:
                self._refuse(peer, other)

    def _refuse(self, peer: str, message: msg.Message) -> None:
        """Counts a message that makes no sense here, or not from this peer, whose name may be anything."""
        kind = type(message).__name__
        self._hub.refused[f"unexpected_{kind}"] += 1
        _log.warning("message_unexpected kind=%s peer=%r", kind, peer)

    # --- requests -------------------------------------------------------------------------------------------------

    def _on_add_request(self, peer: str, request: msg.AddRequest, images: Sequence[memoryview]) -> None:
        answer = self._desk.add(peer, request, images, time.time())
        self._post.send(peer, answer)
        if isinstance(answer, msg.Accepted):
            self._vision.add(request, images)
            if request.grammar:
                self._grammars.open(request.seq_id, request.grammar)
        elif self._peers.get(peer) is None:  # a gateway of another controller's time: it must start afresh
            self._dismiss(peer)

    def _on_stop_sequence(self, peer: str, message: msg.StopSequence) -> None:
        try:
            self._desk.stop(message)
        except TypeError:  # a number of tokens that no output can have
            self._refuse(peer, message)

    # --- gateways and the supervisor ------------------------------------------------------------------------------

    def _on_gateway_hello(self, peer: str, hello: msg.GatewayHello) -> None:
        """A gateway is up, or one that is known asks for the state again."""
        known = self._peers.live(peer)
        if known is None or known.pid != hello.pid:
            self._lose(peer, REPLACED)
            self._peers.join(Role.GATEWAY, peer, hello.node, hello.pid, time.monotonic())
            self._desk.gateways.join(peer)
            _log.info("gateway_joined name=%s pid=%d", peer, hello.pid)
        self._post.send(peer, self._state())

    def _on_supervisor_hello(self, peer: str, hello: msg.SupervisorHello) -> None:
        self._peers.join(Role.SUPERVISOR, peer, hello.node, hello.pid, time.monotonic())
        _log.info("supervisor_joined name=%s pid=%d", peer, hello.pid)
        for message in self._supervision.join(peer, self._peers.stuck()):
            self._post.send(peer, message)

    def _on_scale_vision(self, peer: str, request: msg.ScaleVision) -> None:
        outcome, target = self._supervision.scale(request)
        if target is not None:
            assert self._supervision.supervisor is not None
            self._post.send(self._supervision.supervisor, target)
        self._post.send(peer, outcome)

    # --- workers --------------------------------------------------------------------------------------------------

    def _on_worker_hello(self, peer: str, hello: msg.WorkerHello) -> None:
        """A rank is up. The newest launch is the one that counts; ranks of earlier ones are told to go."""
        if self._host.supersedes(hello):
            # Its ranks are told when they next speak: by now their names may be new processes'.
            self._fail_group(f"rank {hello.rank} of launch {hello.group} takes over", tell_ranks=False)
        self._ranks.hello(peer, hello)

    def _on_worker_failed(self, peer: str, failure: msg.WorkerFailed) -> None:
        """A rank ends; one that could not load its weights has said no hello before."""
        _log.error("worker_failed name=%s rank=%d detail=%r", peer, failure.rank, failure.detail)
        self._lose(peer, failure.detail)
        self._host.explain(f"rank {failure.rank} failed: {failure.detail}")

    def _fail_group(self, why: str, tell_ranks: bool = True) -> None:
        self._ranks.fail(why, tell_ranks)
        self._vision.lose_launch()

    def _on_vision_hello(self, peer: str, hello: msg.VisionHello) -> None:
        may_join = self._vision.may_join(peer, hello.segment)
        self._lose(peer, REPLACED)
        if may_join:
            self._peers.join(Role.VISION_WORKER, peer, hello.node, hello.pid, time.monotonic())
            self._vision.join(peer, hello)
            if self._supervision.supervisor is not None:
                self._post.send(self._supervision.supervisor, msg.VisionJoined(peer))

    def _on_goodbye(self, peer: str) -> None:
        self._vision.lose(peer)
        self._peers.leave(peer)
        _log.info("vision_worker_left name=%s", peer)

    # --- losses and the end ---------------------------------------------------------------------------------------

    def _give_up(self, names: Sequence[str], why: str) -> None:
        """Loses peers whose processes may live on, and would be missed for ever: the supervisor is to end them."""
        peers = [peer for name in names if (peer := self._peers.live(name)) is not None]
        for peer in peers:
            peer.stuck_why = why
            self._lose(peer.name, why)  # of ranks, the first takes the others with it
        for peer in peers:
            if self._supervision.supervisor is not None:
                self._post.send(self._supervision.supervisor, stuck_message(peer))

    def _lose(self, name: str, why: str) -> None:
        """Goes on without a peer. Unknown and lost ones are fine."""
        peer = self._peers.lose(name)
        if peer is None:
            return
        _log.warning("peer_lost role=%s name=%s pid=%d why=%s", peer.role.value, name, peer.pid, why)
        self._turn_again = True
        match peer.role:
            case Role.GATEWAY:
                self._desk.dismiss(name)
                self._vision.forget(name)
            case Role.WORKER if name in self._host.ranks:
                self._fail_group(f"rank {peer.rank} was lost: {why}")
            case Role.VISION_WORKER:
                self._vision.lose(name)
            case Role.SUPERVISOR if name == self._supervision.supervisor:
                self._supervision.leave()

    def _dismiss(self, name: str) -> None:
        """Tells a lost peer that it is; a vision worker only once nobody needs its segment, which goes with it."""
        if not self._ledger.needs_segment_of(name):
            self._post.last_word(
                name, msg.Shutdown("this controller does not count on you; say hello in a new process")
            )

    def _shut_down(self, why: str) -> None:
        """Ends every sequence, sends what is left, tells the workers to go."""
        num_live = self._desk.abort_all(AbortCause.SHUTDOWN)
        _log.info("controller_stopping why=%s live_sequences=%d", why, num_live)
        self._host.close(time.time())
        self._vision.lose_launch()
        self._reply()
        for name in [*self._host.ranks, *self._ledger.worker_states()]:
            self._post.last_word(name, msg.Shutdown(why))
