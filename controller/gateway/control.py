"""The Control service: questions to the controller, put into the public words."""

# Names and arguments of the methods are gRPC's.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from typing import Any

import grpc

from airside.controller.gateway.controller_link import ControllerLink
from airside.controller.gateway.errors import Context, RequestError, answered, invalid, unavailable
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import airside_pb2_grpc as pb_grpc
from airside.proto import messages as msg
from airside.proto.settings import GatewaySettings

LOAD_AGE_S = 0.1
"""What `GetLoad` says is at most so old: gathering it takes the controller a millisecond, and anybody may ask often."""

_GAUGE_FIELDS: dict[str, Any] = {field.name: field for field in pb.Gauges.DESCRIPTOR.fields}


class Control(pb_grpc.ControlServicer):
    """`airside.v1.Control`. Each call is one question; UNAVAILABLE when the controller does not answer in time."""

    def __init__(self, settings: GatewaySettings, model: TextModel, link: ControllerLink) -> None:
        self._settings = settings
        self._model = model
        self._link = link
        self._version = importlib.metadata.version("airside")
        self._load: dict[str, float] = {}  # the gauges of the last answer
        self._load_until = 0.0  # so long they are new enough
        self._load_lock = asyncio.Lock()

    @answered
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        """What is served here, how it is, and its gauges."""
        gauges = await self._link.query(msg.GaugesQuery, msg.Gauges)
        return self._info(gauges)

    @answered
    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.Load:
        """A few of the gauges, of the whole server and not of this gateway alone."""
        values = await self._latest_load()
        used, total = values.get("kv_blocks_live", 0), values.get("kv_blocks_total", 0)
        return pb.Load(
            state=self._state().state,
            num_requests_running=int(values.get("num_requests_running", 0)),
            num_requests_waiting=int(values.get("num_requests_waiting", 0)),
            kv_cache_usage_ratio=used / total if total else 0,
            vision_queue_depth=int(values.get("vision_queue_depth", 0)),
            vision_wait_s=values.get("vision_wait_s", 0),
        )

    @answered
    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersReply:
        """Every process of this server."""
        peers = await self._link.query(msg.PeersQuery, msg.Peers)
        return pb.ListWorkersReply(
            workers=[_worker(row) for row in peers.peers],
            vision_target=peers.vision_target,
            vision_pending=peers.vision_pending,
        )

    @answered
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        """Ends a request by its id; the request may have come through another gateway."""
        if not request.request_id:
            raise invalid("request_id", "is empty; send the id that `accepted` said")
        outcome = await self._link.query(lambda q: msg.AbortByName(q, request.request_id), msg.AbortOutcome)
        return pb.AbortReply(outcome=outcome.outcome)

    @answered
    async def ScaleVision(self, request: pb.ScaleVisionRequest, context: Context) -> pb.ScaleVisionReply:
        """Asks for a number of vision workers, or for a range within which the load decides."""
        replicas, replicas_max = _vision_size(request)
        outcome = await self._link.query(lambda q: msg.ScaleVision(q, replicas, replicas_max), msg.ScaleVisionOutcome)
        if outcome.refused:
            status = grpc.StatusCode
            code = status.INVALID_ARGUMENT if outcome.is_out_of_range else status.FAILED_PRECONDITION
            raise RequestError(code, outcome.refused, str(request.WhichOneof("size")))
        most = outcome.replicas if outcome.replicas_max is None else outcome.replicas_max
        return pb.ScaleVisionReply(replicas=outcome.replicas, replicas_max=most)

    async def _latest_load(self) -> dict[str, float]:
        """Gauges that are new enough. Calls at the same time ask once for all of them."""
        async with self._load_lock:
            self._state()  # of a silent controller, each call would wait for an answer after the other
            if time.monotonic() >= self._load_until:
                self._load = (await self._link.query(msg.GaugesQuery, msg.Gauges)).gauges
                self._load_until = time.monotonic() + LOAD_AGE_S
            return self._load

    def _state(self) -> msg.EngineState:
        state = self._link.state
        if state is None:
            raise unavailable("the controller does not answer; try again later")
        return state

    def _info(self, gauges: msg.Gauges) -> pb.ServerInfo:
        state = self._state()
        settings, model = self._settings, self._model
        return pb.ServerInfo(
            version=self._version,
            model=settings.served_name,
            architecture=settings.architecture,
            state=state.state,
            accepts_images=model.accepts_images,
            max_model_len=state.max_model_len,
            vocab_size=model.vocab_size,
            tensor_parallel_size=settings.tensor_parallel_size,
            device=settings.device,
            dtype=settings.dtype,
            image_mark=model.image_mark,
            gauges=_gauges(gauges),
        )


def _vision_size(request: pb.ScaleVisionRequest) -> tuple[int, int | None]:
    """What was asked for, as in `messages.ScaleVision`. Raises RequestError."""
    match request.WhichOneof("size"):
        case "replicas":
            if request.replicas < 0:
                raise invalid("replicas", f"is {request.replicas}, but must be at least 0")
            return request.replicas, None
        case "range":
            wanted = request.range
            if not 0 <= wanted.min <= wanted.max:
                raise invalid("range", f"is {wanted.min} to {wanted.max}, but must be rising, from 0 or more")
            return wanted.min, wanted.max
        case _:
            raise invalid("size", "is not set; send a number of `replicas`, or a `range` with `min` and `max`")


def _gauges(gauges: msg.Gauges) -> pb.Gauges:
    """The public message. Names that it has no field for belong to a newer controller, and are left out."""
    reply = pb.Gauges(
        requests_finished=gauges.requests_finished,
        bus_messages_refused=gauges.bus_messages_refused,
        controller_phase_s=gauges.controller_phase_s,
        bus_messages=gauges.bus_messages,
    )
    for name, value in gauges.gauges.items():
        field = _GAUGE_FIELDS.get(name)
        if field is not None:
            setattr(reply, name, value if field.cpp_type == field.CPPTYPE_DOUBLE else int(value))
    return reply


def _worker(row: msg.PeerRow) -> pb.Worker:
    return pb.Worker(
        role=row.role,
        name=row.name,
        rank=row.rank,
        node=row.node,
        pid=row.pid,
        state=row.state,
        last_heard_s=row.last_heard_s,
        jobs_done=row.jobs_done,
        rss_bytes=row.rss_bytes,
    )
