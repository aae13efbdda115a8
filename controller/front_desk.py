"""Requests on their way into the engine, and what the controller itself knows of them until they end."""

from __future__ import annotations

from collections.abc import Sequence

from airside.controller.engine_host import EngineHost, EngineStatus
from airside.controller.engine_setup import make_request
from airside.controller.front_ends import FrontEnds
from airside.controller.live_requests import LiveRequest, LiveRequests
from airside.controller.vision.ledger import VisionLedger, image_files
from airside.proto.abort_cause import AbortCause
from airside.proto.messages import Accepted, AddRequest, Rejected, StopSequence


class FrontDesk:
    """Takes, refuses and aborts requests of the gateways that are here. Times are unix time.

    Args:
        host: has the engine, once there is one.
        images: knows how many bytes of files wait.
        takes_images: whether the model has a vision tower.
    """

    def __init__(self, host: EngineHost, images: VisionLedger, takes_images: bool) -> None:
        self.gateways = FrontEnds()
        self._host = host
        self._images = images
        self._takes_images = takes_images
        self._requests = LiveRequests()

    def add(self, gateway: str, request: AddRequest, images: Sequence[memoryview], now: float) -> Accepted | Rejected:
        """Puts a request into the engine's queue, or says why not. `images` came with it."""
        refused = self._refusal(gateway, request, images) or self._add_to_engine(gateway, request, now)
        if refused is not None:
            return Rejected(request.seq_id, *refused)
        engine, client = self._host.engine, self.gateways.number(gateway)
        assert engine is not None
        assert client is not None
        live = LiveRequest(request.seq_id, request.request_id, client, request.arrival)
        self._requests.add(live, request.deadline)
        return Accepted(request.seq_id, engine.queue_position(request.seq_id))

    def abort(self, seq_id: int, cause: str) -> bool:
        """Ends a sequence; its finish comes with the next outputs. False when it is not live."""
        engine = self._host.engine
        if engine is None or self._requests.get(seq_id) is None:
            return False
        return engine.abort(seq_id, cause)

    def stop(self, message: StopSequence) -> None:
        """Ends a sequence as stopped after so many tokens, unless it has ended already. Raises TypeError."""
        engine = self._host.engine
        if engine is not None and self._requests.get(message.seq_id) is not None:
            engine.stop(message.seq_id, message.num_tokens, message.detail)

    def abort_by_name(self, request_id: str) -> str:
        """Ends all live sequences of a request id. Returns an `AbortOutcome`'s word."""
        live = self._requests.of_name(request_id)
        aborted = [seq_id for seq_id in live if self.abort(seq_id, AbortCause.BY_NAME)]
        if aborted:
            return "aborted"
        return "already_finished" if live or self._requests.has_ended(request_id) else "unknown"

    def abort_all(self, cause: str) -> int:
        """Ends every sequence. Returns how many there were."""
        live = self._requests.seq_ids()
        for seq_id in live:
            self.abort(seq_id, cause)
        return len(live)

    def dismiss(self, gateway: str) -> None:
        """A gateway is gone: nobody listens to its sequences any more."""
        client = self.gateways.leave(gateway)
        for seq_id in self._requests.of_client(client) if client is not None else ():
            self.abort(seq_id, AbortCause.GATEWAY_LOST)

    def next_deadline(self) -> float | None:
        """The earliest deadline of a live sequence."""
        return self._requests.next_deadline()

    def expire(self, now: float) -> None:
        """Ends the sequences whose deadline has passed, whether or not the engine can step."""
        for seq_id in self._requests.pop_expired(now):
            self.abort(seq_id, AbortCause.DEADLINE)

    def end(self, seq_id: int) -> None:
        """The engine has told this sequence's finish."""
        self._requests.end(seq_id)

    def gateway_of(self, seq_id: int) -> str | None:
        """Who listens to a live sequence."""
        request = self._requests.get(seq_id)
        return None if request is None else self.gateways.name(request.client)

    def _refusal(self, gateway: str, request: AddRequest, images: Sequence[memoryview]) -> tuple[str, str] | None:
        """The code and detail of what the controller has against a request."""
        if self._host.engine is None or self._host.status is not EngineStatus.READY:
            return "unavailable", f"the engine is {self._host.status.value}: {self._host.detail}"
        client = self.gateways.number(gateway)
        if client is None:
            return "unavailable", "the gateway has not said hello"
        if not self._requests.may_share(request.request_id, client, request.arrival):
            return "duplicate_id", f"request {request.request_id!r} is running; choose another id or abort it"
        if self._requests.get(request.seq_id) is not None or self._images.knows(request.seq_id):
            return "invalid", f"sequence {request.seq_id} is live already"
        if not images and not request.image_positions:
            return None
        return self._image_refusal(request, images)

    def _image_refusal(self, request: AddRequest, images: Sequence[memoryview]) -> tuple[str, str] | None:
        """The same of its images."""
        num_images = len(images)
        if num_images != len(request.image_positions):
            return "invalid", f"{len(request.image_positions)} image marks, {num_images} images"
        if not self._takes_images:
            return "invalid", "this model takes no images"
        if any(column and len(column) != num_images for column in (request.image_hashes, request.image_urls)):
            return "invalid", f"{num_images} images, {len(request.image_hashes)} hashes, {len(request.image_urls)} urls"
        try:
            files = image_files(request, images)
        except ValueError as error:
            return "invalid", str(error)
        return self._images.refusal(files, request.cache_salt)

    def _add_to_engine(self, gateway: str, request: AddRequest, now: float) -> tuple[str, str] | None:
        engine, client = self._host.engine, self.gateways.number(gateway)
        assert engine is not None
        assert client is not None
        try:
            rejection = engine.add(make_request(request, client), now)
        except (ValueError, TypeError) as error:  # columns that make no sense: the gateway's fault, not ours
            return "invalid", str(error)
        return None if rejection is None else (rejection.code, rejection.detail)
