"""From a YAML file, the environment and `--set` to a `Config`, with every problem named at once and in its place.

Precedence: `--set engine.max_num_seqs=8`, then AIRSIDE_ENGINE__MAX_NUM_SEQS=8, then the file, then the default.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from airside.cluster.config.schema import Config

ENVIRONMENT_PREFIX = "AIRSIDE_"

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it was written, which key, and why."""

    origin: str  # "file:line", "environment AIRSIDE_..." or "--set ..."
    key: KeyPath
    why: str

    def __str__(self) -> str:
        key = ".".join(self.key)
        return f"{self.origin}: {key}: {self.why}" if key else f"{self.origin}: {self.why}"


class ConfigError(ValueError):
    """Everything that is wrong with a configuration; the message has one line per problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


@dataclass(slots=True)
class _Layers:
    """Values merged so far, and where each key was written last."""

    values: dict[str, Any] = field(default_factory=dict)  # Any: YAML
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, key: KeyPath) -> str:
        """Of the key, or of the nearest one around it."""
        while key not in self.origins:
            key = key[:-1]
        return self.origins[key]

    def put(self, key: KeyPath, value: object, origin: str) -> None:
        """Sets one key, making the blocks around it."""
        block = self.values
        for depth, name in enumerate(key[:-1], start=1):
            self.origins.setdefault(key[:depth], origin)
            inner = block.get(name)
            if not isinstance(inner, dict):
                inner = block[name] = {}
            block = inner
        block[key[-1]] = value
        self.origins[key] = origin


def load_config(path: Path, environment: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file and what overrides it.

    Args:
        path: a YAML file.
        environment: variables; those named AIRSIDE_BLOCK__KEY count.
        overrides: `block.key=value`, as given to `--set`.
    Raises:
        ConfigError: naming everything that is wrong.
    """
    layers = _Layers(origins={(): str(path)})
    _read_file(path, layers)
    _read_environment(environment, layers)
    _read_overrides(overrides, layers)
    config: Config | None = None
    try:
        config = Config.model_validate(layers.values)
    except ValidationError as error:
        layers.problems += _explain(error, layers)
    if layers.problems or config is None:
        raise ConfigError(sorted(layers.problems, key=lambda problem: _line(problem.origin)))
    return config


def _line(origin: str) -> float:
    """For sorting: problems of the file in the order of its lines, then those of the other layers."""
    line = origin.rpartition(":")[2]
    return int(line) if line.isdigit() else math.inf


def _read_file(path: Path, layers: _Layers) -> None:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        layers.problems.append(Problem(str(path), (), f"cannot be read: {error}"))
        return
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        layers.problems.append(Problem(f"{path}:{line}", (), f"not YAML: {error.problem or error.context}"))
        return
    except yaml.YAMLError as error:
        layers.problems.append(Problem(str(path), (), f"not YAML: {error}"))
        return
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        layers.problems.append(Problem(f"{path}:{root.start_mark.line + 1}", (), "must be a mapping of blocks"))
        return
    layers.values = _mapping(root, (), path, layers)


def _mapping(node: yaml.MappingNode, at: KeyPath, path: Path, layers: _Layers) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = (*at, str(key_node.value))
        origin = f"{path}:{key_node.start_mark.line + 1}"
        if key[-1] in block:
            first = layers.origins[key].rpartition(":")[2]
            layers.problems.append(Problem(origin, key, f"is given twice, first on line {first}"))
            continue
        layers.origins[key] = origin
        value = _value(value_node, key, path, layers)
        if value is None and _block_at(key) is not None:
            value = {}  # "engine:" with every key under it commented out
        block[key[-1]] = value
    return block


def _value(node: yaml.Node, key: KeyPath, path: Path, layers: _Layers) -> object:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, key, path, layers)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*key, str(index)), path, layers) for index, item in enumerate(node.value)]
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError):
        layers.problems.append(Problem(f"{path}:{node.start_mark.line + 1}", key, "is not a plain value"))
        return None


def _read_environment(environment: Mapping[str, str], layers: _Layers) -> None:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            _put_text(key, environment[name], f"environment {name}", layers)


def _read_overrides(overrides: Sequence[str], layers: _Layers) -> None:
    for override in overrides:
        name, equals, text = override.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            layers.problems.append(Problem(f"--set {override}", (), "must be block.key=value"))
            continue
        _put_text(key, text, f"--set {override}", layers)


def _put_text(key: KeyPath, text: str, origin: str, layers: _Layers) -> None:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        layers.problems.append(Problem(origin, key, f"not a YAML value: {text}"))
        return
    layers.put(key, value, origin)


def _explain(error: ValidationError, layers: _Layers) -> Iterator[Problem]:
    for entry in error.errors(include_url=False):
        key = tuple(str(part) for part in entry["loc"])
        if entry["type"] == "extra_forbidden":
            why = _unknown(key)
        elif entry["type"] == "value_error":
            why = str(entry["ctx"]["error"])
        elif entry["type"] in ("model_type", "dataclass_type", "model_attributes_type"):
            why = f"must be a block of keys, not {entry['input']!r}"
        else:
            why = f"{_lower_first(entry['msg'])}, not {entry['input']!r:.60}"
        yield Problem(layers.origin(key), key, why)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _unknown(key: KeyPath) -> str:
    """Says that a key does not exist, and which one was probably meant: among its neighbours first, then anywhere."""
    block = _block_at(key[:-1])
    near = difflib.get_close_matches(key[-1], list(block.model_fields) if block else [], n=1)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    leaves = {path[-1]: path for path in _all_keys(Config)}
    near = difflib.get_close_matches(key[-1], list(leaves), n=1, cutoff=0.75)
    if near:
        return f"unknown key; did you mean {'.'.join(leaves[near[0]])}?"
    return f"unknown key; known here: {', '.join(block.model_fields) if block else 'none'}"


def _all_keys(block: type[BaseModel], at: KeyPath = ()) -> Iterator[KeyPath]:
    for name in block.model_fields:
        yield (*at, name)
        inner = _block_at((*at, name))
        if inner is not None:
            yield from _all_keys(inner, (*at, name))


def _block_at(key: KeyPath) -> type[BaseModel] | None:
    """The model class of a block, or None when the key is a value or does not exist."""
    block: type[BaseModel] = Config
    for name in key:
        info = block.model_fields.get(name)
        if info is None or not isinstance(info.annotation, type) or not issubclass(info.annotation, BaseModel):
            return None
        block = info.annotation
    return block
