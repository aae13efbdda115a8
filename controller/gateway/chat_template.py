"""Chat templates: Jinja, with what Hugging Face's checkpoints expect beside it, and no more than they may do."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, object]


class ChatTemplate:
    """One compiled template. It comes with the checkpoint and is not trusted: Jinja's sandbox runs it.

    Raises:
        jinja2.TemplateSyntaxError: it is no template.
    """

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)

    def render(self, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
        """The prompt that asks for the assistant's next message.

        Args:
            messages: of JSON's types; what is None is left out.
            special_tokens: by their names, "bos_token".
        Raises: whatever the template raises.
        """
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return self._template.render(
            messages=given, tools=None, documents=None, add_generation_prompt=True, **special_tokens
        )


class _Generation(Extension):
    """`{% generation %}` stands around what the model wrote; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as a block that is called has.
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # Any: as Jinja's own, so that `self` may be a name in it
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:  # Any: what the template assigns
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The `dict` of templates: it makes some, and has nothing else to get at."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., object]] = {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    return environment


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
