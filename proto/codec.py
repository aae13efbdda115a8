"""How a message becomes a frame and back: a version byte, then a msgpack array `[kind, field, field, ...]`."""

from __future__ import annotations

import dataclasses
import operator
import threading
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

VERSION = 1
_VERSION_BYTE = bytes((VERSION,))

_REGISTRY: dict[int, type[Message]] = {}


class MessageRefused(Exception):
    """A frame that is not a message of ours. `why` is a short stable word, fit for a metric label."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(f"{why}: {detail}")
        self.why = why


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; subclasses are declared with `@message(kind)`."""

    kind: ClassVar[int] = -1


M = TypeVar("M", bound=Message)


@typing.dataclass_transform(frozen_default=True)
def message(kind: int) -> Callable[[type[M]], type[M]]:
    """Class decorator: makes a dataclass of the class and registers it under `kind` (unique, never renumbered)."""

    def register(cls: type[M]) -> type[M]:
        made = dataclass(frozen=True, slots=True)(cls)
        if kind in _REGISTRY:
            raise AssertionError(f"kind {kind} is taken by {_REGISTRY[kind].__name__}")
        made.kind = kind
        _REGISTRY[kind] = made
        return made

    return register


def encode(msg: Message) -> bytes:
    """The frame of a message."""
    frame: bytes = _VERSION_BYTE + _packer.pack([msg.kind, *_plain(msg)])
    return frame


def pack_rows(rows: Sequence[object]) -> bytes:
    """A list of rows (dataclasses or tuples) as one field of a frame; of types that nothing checks."""
    packed: bytes = _packer.pack(rows)
    return packed


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame.

    Raises:
        MessageRefused: another version, an unknown kind, or fields that do not fit the class.
    """
    view = memoryview(frame)
    if len(view) < 2:
        raise MessageRefused("malformed", f"frame of {len(view)} bytes")
    if view[0] != VERSION:
        raise MessageRefused("version", f"version {view[0]}, this process speaks {VERSION}")
    try:
        kind, *values = msgpack.unpackb(view[1:], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageRefused("malformed", f"{type(error).__name__}: {error}") from error
    cls = _REGISTRY.get(kind) if isinstance(kind, int) else None
    if cls is None:
        raise MessageRefused("unknown_kind", f"kind {kind!r}")
    return typing.cast(Message, _build(cls, values))


def _plain(record: Any) -> Iterable[object]:  # Any: a dataclass instance
    cls = type(record)
    read = _readers.get(cls)
    if read is None:
        read = _readers[cls] = _reader(tuple(f.name for f in dataclasses.fields(cls)))
    return read(record)


_readers: dict[type, Callable[[Any], Iterable[object]]] = {}


def _reader(names: Sequence[str]) -> Callable[[Any], Iterable[object]]:
    """Reads all fields of a record at once."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: [getattr(record, name) for name in names]


class _Packer(threading.local):
    """One per thread: while a row is read, another thread may run, and a msgpack.Packer has one buffer."""

    def __init__(self) -> None:
        self.pack: Callable[[object], bytes] = msgpack.Packer(default=_plain).pack


_packer = _Packer()


_Convert = Callable[[object], object]
_PLAIN = (bool, int, float, str, bytes)  # as they come


@dataclass(frozen=True, slots=True)
class _Schema:
    """What the fields of a class must be, in order."""

    converts: tuple[_Convert, ...]
    num_required: int
    types: list[type | None]  # of a value that need not be converted, but for what is in it; None: any is converted
    containers: list[int]  # the fields that have something in them


_schemas: dict[type, _Schema] = {}


def _build(cls: type, values: list[object]) -> object:
    schema = _schemas.get(cls)
    if schema is None:
        schema = _schemas[cls] = _schema(cls)
    converts = schema.converts
    if not schema.num_required <= len(values) <= len(converts):
        raise MessageRefused("malformed", f"{cls.__name__} with {len(values)} fields")
    try:
        if list(map(type, values)) != schema.types[: len(values)]:
            return cls(*[convert(value) for convert, value in zip(converts, values, strict=False)])
        # A step's messages have tens of fields: their types are compared at once.
        for index in schema.containers:
            if index < len(values) and values[index]:
                values[index] = converts[index](values[index])
        return cls(*values)
    except (TypeError, ValueError) as error:
        raise MessageRefused("malformed", f"{cls.__name__}: {error}") from error


def _schema(cls: type) -> _Schema:
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    types = [_own_type(hints[f.name]) for f in fields]
    return _Schema(
        converts=tuple(_converter(hints[f.name]) for f in fields),
        num_required=sum(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields),
        types=types,
        containers=[index for index, kind in enumerate(types) if kind in (list, dict)],
    )


def _own_type(hint: Any) -> type | None:  # Any: a type annotation
    """What a value of the field is when nothing of it but its entries must be converted; None: that is not enough."""
    own = get_origin(hint) or hint
    return own if own in (*_PLAIN, list, dict) else None


def _converter(hint: Any) -> _Convert:  # Any: a type annotation
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = _converter(next(arg for arg in get_args(hint) if arg is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is list:
        item = _converter(get_args(hint)[0])
        return lambda value: [item(entry) for entry in _expect(value, list)]
    if origin is dict:
        key, item = (_converter(arg) for arg in get_args(hint))
        return lambda value: {key(k): item(v) for k, v in _expect(value, dict).items()}
    if dataclasses.is_dataclass(hint):
        return lambda value: _build(typing.cast(type, hint), _expect(value, list))
    if hint is float:
        return lambda value: float(_expect(value, (int, float)))
    return lambda value: _expect(value, hint)


def _expect(value: Any, wanted: Any) -> Any:  # Any: what msgpack gave, checked here
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise TypeError(f"{value!r:.40} where {getattr(wanted, '__name__', wanted)} belongs")
    return value
