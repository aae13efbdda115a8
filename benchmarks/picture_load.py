"""Pictures in flight: requests with one each, given up as soon as its pixels are in, so that the model has little of
them to look at. They are sent from a process of their own, to take nothing from whoever measures.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Self

import grpc
from PIL import Image

from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import InferenceStub

STOP_S = 10.0


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


def unlike_others(file: bytes, number: int) -> bytes:
    """The same JPEG with a comment: no cache knows it."""
    comment = f"{os.getpid()} {number}".encode()
    return file[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + file[2:]


class PictureLoad:
    """Keeps a number of pictures in flight for as long as the context lasts.

    Args:
        address: of the server.
        file: a JPEG.
        in_flight: how many at once.
        mark: what stands for a picture in a prompt.
    """

    def __init__(self, address: str, file: bytes, in_flight: int, mark: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._made: Synchronized[int] = context.Value("L", 0)
        self._errors, theirs = context.Pipe(duplex=False)
        self._in_flight = in_flight
        arguments = (address, file, in_flight, mark, self._made, theirs)
        self._process = context.Process(target=_send_pictures, args=arguments, daemon=True)

    @property
    def num_made(self) -> int:
        """Pictures whose pixels were in so far."""
        return self._made.value

    def __enter__(self) -> Self:
        """Returns once the first turn of all is over: they no longer come all at once. Raises RuntimeError."""
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
    address: str, file: bytes, in_flight: int, mark: str, made: Synchronized[int], errors: Connection
) -> None:
    """The child: never returns."""
    numbers = itertools.count()
    options = [("grpc.max_send_message_length", 64 * 2**20)]
    with grpc.insecure_channel(address, options) as channel:
        arguments = (InferenceStub(channel), file, numbers, mark, made, errors)
        threads = [threading.Thread(target=_send_in_turn, args=arguments, daemon=True) for _ in range(in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _send_in_turn(
    stub: InferenceStub, file: bytes, numbers: Iterator[int], mark: str, made: Synchronized[int], errors: Connection
) -> None:
    while True:
        image = pb.Image(data=unlike_others(file, next(numbers)))
        call = stub.Generate(pb.GenerateRequest(prompt=mark, images=[image], stop=pb.Stop(max_tokens=1)))
        try:
            ready = any(event.HasField("image_ready") for event in call)  # looks no further than the first
        except grpc.RpcError as error:
            errors.send(str(error.details()))
            return
        call.cancel()
        if not ready:
            errors.send("its request ended before")
            return
        with made.get_lock():
            made.value += 1
