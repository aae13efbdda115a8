"""The messages of a chat: checked, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airside.controller.gateway.errors import invalid
from airside.controller.gateway.request_checks import ImageLimits
from airside.proto import airside_pb2 as pb

ROLES = ("system", "user", "assistant")

_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """Messages as chat templates take them; images in order, and where each was in the request."""

    messages: list[dict[str, object]]
    images: list[pb.Image]
    fields: list[str]


def check_chat(messages: Sequence[pb.ChatMessage], limits: ImageLimits) -> CheckedChat:
    """The messages of a chat.

    A text that spells the image mark is refused: the template's output is tokenized as one text, so it would stand for
    a picture that its writer did not send.
    """
    if not messages:
        raise invalid("messages", "is empty; send at least one message")
    chat = CheckedChat([], [], [])
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid(
                f"messages[{i}].role", f"is {message.role[:_SHOWN_CHARS]!r}, but must be one of {', '.join(ROLES)}"
            )
        if not message.parts:
            raise invalid(f"messages[{i}].parts", "is empty; send at least one part")
        parts = [_check_part(part, f"messages[{i}].parts[{j}]", limits, chat) for j, part in enumerate(message.parts)]
        # Templates of image models go through a list of parts, those of text models take one text.
        plain = limits.mark_id is None
        content: object = "".join(part.get("text", "") for part in parts) if plain else parts
        chat.messages.append({"role": message.role, "content": content})
    return chat


def _check_part(part: pb.Part, field: str, limits: ImageLimits, chat: CheckedChat) -> dict[str, str]:
    match part.WhichOneof("part"):
        case "text":
            if limits.mark and limits.mark in part.text:
                raise invalid(
                    f"{field}.text", f"spells {limits.mark}, which marks an image; send images as parts of their own"
                )
            return {"type": "text", "text": part.text}
        case "image":
            chat.images.append(part.image)
            chat.fields.append(f"{field}.image")
            return {"type": "image"}
        case _:
            raise invalid(field, "is empty; send a text or an image")
