"""Asks a running server about a picture, and streams the answer.

    airside up cluster/local.yaml
    python examples/chat_with_image.py [PICTURE] [QUESTION] [--address 127.0.0.1:50051]

Without a picture it sends a handwritten digit that comes with Airside.
"""

import argparse
from pathlib import Path

from airside import SamplingParams
from airside.cluster.client import DEFAULT_ADDRESS, Client, user_message
from airside.cluster.demo_model.exhibits import digit_exhibits

parser = argparse.ArgumentParser()
parser.add_argument("picture", type=Path, nargs="?")
parser.add_argument("question", nargs="?", default="What digit is this?")
parser.add_argument("--address", default=DEFAULT_ADDRESS)
arguments = parser.parse_args()
picture = arguments.picture.read_bytes() if arguments.picture else digit_exhibits()[0].pictures[0]

with Client(arguments.address) as client:
    message = user_message(arguments.question, [picture])
    for event in client.chat([message], SamplingParams(temperature=0, max_tokens=64)):
        match event.WhichOneof("event"):
            case "image_ready":
                print(f"[picture: {event.image_ready.tokens} tokens, {event.image_ready.process_s * 1e3:.1f} ms]")
            case "delta":
                print(event.delta.text, end="", flush=True)
            case "finished":
                print(f"\n[{event.finished.reason} {event.finished.detail}]")
