"""Pictures by number, each in as many files as are wanted: what caches know of one file is no help with the next."""

from __future__ import annotations

import io
import os

from PIL import Image

from airside.proto import airside_pb2 as pb


def picture(number: int, width: int = 96, height: int = 64) -> Image.Image:
    """One of many that a model tells apart."""
    parts = [Image.linear_gradient("L").rotate(turn) for turn in (37 * number, 61 * number, 83 * number)]
    return Image.merge("RGB", parts).resize((width + number % 7, height + number % 5))


def new_file(image: Image.Image) -> bytes:
    """The picture as a JPEG that nobody has seen before."""
    file, comment = io.BytesIO(), os.urandom(8)
    image.save(file, "JPEG", comment=comment)
    return file.getvalue()


def ask_about(*images: Image.Image, max_tokens: int = 6) -> pb.GenerateRequest:
    """A greedy request with these pictures, in new files."""
    return pb.GenerateRequest(
        prompt="<image>" * len(images) + "What is it?",
        images=[pb.Image(data=new_file(image)) for image in images],
        sampling=pb.Sampling(temperature=0),
        stop=pb.Stop(max_tokens=max_tokens, ignore_eos=True),
    )
