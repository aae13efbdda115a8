"""Pictures in flight: requests with one or more, given up as soon as their pixels are in, so that the model has little
of them to look at. They are sent from a process of their own, to take nothing from whoever measures.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import string
import threading
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Self

import grpc
from PIL import Image, ImageDraw, ImageFont

from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import InferenceStub

STOP_S = 10.0

_PNG_HEAD_BYTES = 8 + 25  # the signature, and a chunk with the size


def jpeg(width: int, height: int) -> bytes:
    """A picture with the detail of a photo: clouds at several scales, and a grain."""
    chosen = random.Random(0)
    picture = Image.new("RGB", (width, height))
    for cells, weight in ((4, 1.0), (16, 0.5), (128, 0.25), (max(width, height), 0.06)):
        layer = Image.frombytes("RGB", (cells, cells), chosen.randbytes(cells * cells * 3)).resize(picture.size)
        picture = Image.blend(picture, layer, weight)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def page(width: int, height: int) -> bytes:
    """A page of text as PNG, drawn in black on white."""
    chosen = random.Random(0)
    picture = Image.new("RGB", (width, height), "white")
    drawing, size = ImageDraw.Draw(picture), height // 80
    font = ImageFont.load_default(size)
    for top in range(4 * size, height - 4 * size, 3 * size // 2):
        words = ("".join(chosen.choices(string.ascii_lowercase, k=chosen.randint(2, 10))) for _ in range(14))
        drawing.text((4 * size, top), " ".join(words), fill=(20, 20, 20), font=font)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def unlike_others(file: bytes, number: int) -> bytes:
    """The same JPEG or PNG with a comment: no cache knows it."""
    comment = f"{os.getpid()} {number}".encode()
    if file.startswith(b"\xff\xd8"):
        return file[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + file[2:]
    text = b"tEXtComment\0" + comment
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    return file[:_PNG_HEAD_BYTES] + chunk + file[_PNG_HEAD_BYTES:]


class PictureLoad:
    """Keeps a number of pictures in flight for as long as the context lasts.

    Args:
        address: of the server.
        file: a JPEG or PNG.
        in_flight: how many at once.
        mark: what stands for a picture in a prompt.
        per_request: how many a request has; divides `in_flight`.
    """

    def __init__(self, address: str, file: bytes, in_flight: int, mark: str, per_request: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._made: Synchronized[int] = context.Value("L", 0)
        self._errors, theirs = context.Pipe(duplex=False)
        self._in_flight = in_flight
        arguments = (address, file, in_flight // per_request, mark, per_request, self._made, theirs)
        self._process = context.Process(target=_send_pictures, args=arguments, daemon=True)

    @property
    def num_made(self) -> int:
        """Pictures whose pixels were in so far."""
        return self._made.value

    def __enter__(self) -> Self:
        """Returns once so many have been made: they no longer come all at once. Raises RuntimeError."""
        self._process.start()
        while self.num_made < self._in_flight:
            self._check(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The server gives up those that are under way. Raises RuntimeError when one had failed."""
        try:
            if error is None:
                self._check(0)
        finally:
            self._process.terminate()
            self._process.join(STOP_S)

    def _check(self, wait_s: float) -> None:
        if self._errors.poll(wait_s):
            raise RuntimeError(f"a picture was not made: {self._errors.recv()}")
        if not self._process.is_alive():
            raise RuntimeError("the process that sends pictures has ended")


def _send_pictures(
    address: str,
    file: bytes,
    num_streams: int,
    mark: str,
    per_request: int,
    made: Synchronized[int],
    errors: Connection,
) -> None:
    """The child: never returns."""
    numbers = itertools.count()
    options = [("grpc.max_send_message_length", 64 * 2**20)]

    def next_request() -> pb.GenerateRequest:
        images = [pb.Image(data=unlike_others(file, next(numbers))) for _ in range(per_request)]
        return pb.GenerateRequest(prompt=mark * per_request, images=images, stop=pb.Stop(max_tokens=1))

    with grpc.insecure_channel(address, options) as channel:
        arguments = (InferenceStub(channel), next_request, made, errors)
        threads = [threading.Thread(target=_send_in_turn, args=arguments, daemon=True) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _send_in_turn(
    stub: InferenceStub, next_request: Callable[[], pb.GenerateRequest], made: Synchronized[int], errors: Connection
) -> None:
    while True:
        request = next_request()
        call = stub.Generate(request)
        ready = 0
        try:
            for event in call:
                if not event.HasField("image_ready"):
                    continue
                ready += 1
                with made.get_lock():
                    made.value += 1
                if ready == len(request.images):
                    break  # and looks no further
        except grpc.RpcError as error:
            errors.send(str(error.details()))
            return
        call.cancel()
        if ready < len(request.images):
            errors.send("its request ended before")
            return
