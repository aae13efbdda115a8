"""What the tests of pictures on real processes share: files, requests, and what has been done for them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.system.local_server import Answer, LocalServer

PATIENCE_S = 120.0
_END_BYTES = 12  # of the last chunk of a PNG


def picture(width: int, height: int, turn: int = 0) -> bytes:
    """A gradient in a PNG, small for its pixels; told from others of the same size by its `turn`."""
    file = io.BytesIO()
    shade = Image.linear_gradient("L").rotate(turn).resize((width, height))
    Image.merge("RGB", (shade, shade.rotate(180), shade)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def in_new_file(png: bytes, number: int) -> bytes:
    """The same picture in the file of this number: no cache takes it for one it has seen."""
    body = b"tEXt" + b"Comment\0" + str(number).encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:-_END_BYTES] + chunk + png[-_END_BYTES:]


def request(prompt: str, *files: bytes, max_tokens: int = 4, **fields: Any) -> pb.GenerateRequest:
    """Greedy, for exactly so many tokens."""
    return pb.GenerateRequest(
        prompt=prompt,
        images=[pb.Image(data=data) for data in files],
        sampling=pb.Sampling(temperature=0),
        stop=pb.Stop(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


def answer(server: LocalServer, asked: pb.GenerateRequest) -> Answer:
    """Of a request that ends well."""
    return Answer(list(server.inference.Generate(asked, timeout=PATIENCE_S)))


def jobs_done(server: LocalServer) -> int:
    """Pictures that vision workers have had in their hands to the end, over all that were ever there."""
    rows = server.control.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
    return sum(row.jobs_done for row in rows)


def vision_states(server: LocalServer) -> dict[str, str]:
    """What each vision worker is doing, by name."""
    rows = server.control.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
    return {row.name: row.state for row in rows if row.role == "vision_worker"}


def is_idle(server: LocalServer) -> bool:
    """Whether nothing of any request is left with the controller."""
    gauges = server.gauges()
    waiting = gauges.vision_queue_depth + gauges.image_bytes_waiting
    return gauges.num_requests_running + gauges.num_requests_waiting + gauges.kv_blocks_live + waiting == 0
