"""`python -m airside.controller.gateway.grammar_builder`: the child process that tries whether grammars can be built.

A grammar that comes from a client may take minutes, all memory or the whole stack of whoever builds it. Here that costs
a process that holds nothing else. It is told of its vocabulary first and of one grammar after the other then, each as a
line of JSON on its input, and answers each with a line of JSON on its output; it ends with its input.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from airside.proto.grammar_limits import RENEW_TOKENS, TRIAL_LIMITS

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# No whitespace but one optional blank behind a comma or a colon: a model that may write blanks may write them for ever.
# They go before what a schema says of itself under "x-guidance".
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
_MINIMA = ("minItems", "minLength", "minProperties")
_NO_SCHEMAS = ("const", "default", "enum", "examples")  # keywords of values
_STACK_BYTES = 4 * 1024 * 1024  # less than the threads have that build in earnest
_MEMORY_BYTES = 1024 * 1024 * 1024  # beside the vocabulary
_NICE = 5
_WALK_TOKENS = 256
_USUAL_TOKEN_BYTES = 8  # a longer one is often a line of dashes
_TOO_MUCH_MIN = 2  # walks: the parse of an ambiguous grammar grows along most texts, that of brackets along brackets
_DETAIL_CHARS = 240

_CONTEXT = re.compile(r"\n\s*\d* \|.*|<non-verbose/>|; consider making .*", re.DOTALL)  # lines at fault, and hints
_REGEX_QUOTED = re.compile(r'^at \d+\(\d+\): invalid regex ".*" \(in regex\): ', re.DOTALL)
_REGEX_DRAWN = re.compile(r"^regex parse error:.*\nerror: ", re.DOTALL)
_START_OF_REGEX = re.compile(r"; \w+ in regex /.*", re.DOTALL)
_ONE_OF = re.compile(r"^oneOf constraints are not supported.*")
_TOO_MUCH = {  # what llguidance says, and what it means
    r"Current row has \d+ items; max is (\d+)": "there are more than {} ways to read one of its texts so far",
    r"Too many items \(limit (\d+)": "for one token more than {} ways to read it have to be tried",
    r"too many states: \d+ >= (\d+)": "its words have more than {} states after some tokens",
    r"too many expressions constructed()": "its words are too complex",
}
_UNSUPPORTED_KEYS = re.compile(r"^Unimplemented keys: \[(.*)\]")

_LIMITS = llguidance.LLParserLimits(
    **{**TRIAL_LIMITS, "max_lexer_states": TRIAL_LIMITS["max_lexer_states"] * _WALK_TOKENS // RENEW_TOKENS}  # type: ignore[arg-type]  # one type per keyword
)


class Refused(Exception):
    """The grammar cannot be used; the message says why."""


def serialized_grammar(kind: str, text: str, chars_max: int) -> str:
    """llguidance's form of a grammar, not looked into yet.

    Args:
        kind: a field of `Structure`, except that a choice is a JSON array of texts.
        chars_max: what the model's context can hold.
    Raises:
        Refused: it is no such grammar.
    """
    try:
        match kind:
            case "json_schema":
                return _json_schema(text, chars_max)
            case "json_object":
                return _json_schema('{"type": "object"}', chars_max)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(text)
            case "choice":
                texts = (re.escape(choice) for choice in json.loads(text))
                return llguidance.LLMatcher.grammar_from_regex("|".join(texts))
            case "lark":
                return _lark(text)
            case "gbnf":
                return _lark(_lark_from_gbnf(text))
            case _:
                raise AssertionError(f"no kind of grammar is called {kind}")
    except ValueError as error:
        raise Refused(str(error)) from error


class _TooMuch(Refused):
    """There are too many ways to read a text."""


class GrammarTrial:
    """Tries grammars as decoding would: builds them, and goes along some texts of theirs.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: llguidance.LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._end_ids = _bits(vocabulary.eos_tokens)
        self._any_ids = (1 << vocabulary.vocab_size) - 1
        ids_by_length: dict[int, list[int]] = {}
        for token in range(vocabulary.vocab_size):
            ids_by_length.setdefault(len(vocabulary.decode_bytes([token])), []).append(token)
        self._by_length = [_bits(ids_by_length.get(length, [])) for length in range(_USUAL_TOKEN_BYTES, 0, -1)]
        self._usual_ids = functools.reduce(operator.or_, self._by_length)

    def check(self, grammar: str) -> None:
        """Raises Refused for one that cannot be built, of which a part would be ignored, that soon gets stuck, or that
        is soon too much work."""
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._vocabulary, limits=_LIMITS
        )
        if is_error or messages:
            raise Refused("; ".join(messages))
        dice = random.Random(0)
        too_much: list[_TooMuch] = []
        for choose in (_lowest, _highest, self._longest, lambda mask: self._any(mask, dice)):
            try:
                self._walk(grammar, choose)
            except _TooMuch as reason:
                too_much.append(reason)
        if len(too_much) >= _TOO_MUCH_MIN:
            raise too_much[0]

    def _walk(self, grammar: str, choose: Callable[[int], int]) -> None:
        """Raises Refused where there is no way on. Ends a text only where it must."""
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        for step in range(_WALK_TOKENS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little") & self._any_ids
            if matcher.is_error():
                if matcher.get_error().startswith("NoExtension"):
                    raise Refused(
                        "no text is of this form" if step == 0 else "some beginnings that it allows have no end"
                    )
                raise _refusal(matcher)
            if matcher.is_stopped():
                return
            if not mask:
                raise Refused("no token of this model's vocabulary can begin or continue it")
            if not mask & ~self._end_ids:
                return
            if not matcher.consume_token(choose(mask & ~self._end_ids)):
                raise _refusal(matcher)

    def _any(self, mask: int, dice: random.Random) -> int:
        usual = mask & self._usual_ids or mask
        return _lowest(usual >> (place := dice.randrange(usual.bit_length())) << place)

    def _longest(self, mask: int) -> int:
        return _highest(next((ids & mask for ids in self._by_length if ids & mask), mask))


def _bits(token_ids: Iterable[int]) -> int:
    """A number with the bits of these token ids set."""
    text = bytearray(b"0" * (max(token_ids := [*token_ids], default=0) + 1))
    for token in token_ids:
        text[-1 - token] = ord("1")
    return int(text, 2)


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _highest(mask: int) -> int:
    return mask.bit_length() - 1


def _refusal(matcher: llguidance.LLMatcher) -> Refused:
    error = matcher.get_error()
    return _TooMuch(error) if "Current row has " in error or "Too many items " in error else Refused(error)


def _json_schema(text: str, chars_max: int) -> str:
    if not text.lstrip().startswith("{"):
        raise Refused('it is not a JSON object; a schema that takes any value is {}, one for null {"type": "null"}')
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    _check_minima(json.loads(text), chars_max)
    return grammar


def _check_minima(schema: object, chars_max: int) -> None:
    """Raises Refused where something must be longer than any text of this model: such a text never ends."""
    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key in _MINIMA and isinstance(value, int | float) and value > chars_max:
                    raise Refused(f"{key} is {value}, and no text of this model has more than {chars_max} characters")
                if key not in _NO_SCHEMAS:
                    rest.append(value)


def _lark(text: str) -> str:
    """Spelled out, since a text that is JSON would be taken for llguidance's own form."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _lark_from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except RecursionError as error:
        raise Refused("it is nested too deeply") from error
    except Exception as error:
        # The converter raises bare Exceptions.
        raise Refused(str(error)) from error


def shown(error: str) -> str:
    """llguidance's message in one line, without what a client knows already or need not know."""
    keys = _UNSUPPORTED_KEYS.match(error)
    if keys:
        return f"the keyword {keys[1]} is not supported" if "," not in keys[1] else f"not supported: {keys[1]}"
    if _ONE_OF.match(error):
        return "oneOf is supported only where no value can meet two of its schemas; write anyOf"
    for pattern, words in _TOO_MUCH.items():
        if too_much := re.search(pattern, error):
            return f"it is too much work: {words.format(too_much[1])}"
    for noise in (_CONTEXT, _REGEX_QUOTED, _REGEX_DRAWN, _START_OF_REGEX):
        error = noise.sub("", error)
    line = " ".join(error.split())
    return line if len(line) <= _DETAIL_CHARS else line[:_DETAIL_CHARS] + "…"


def _limit_resources() -> None:
    """From here on: so much memory more than now, a small stack, no core dumps."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    memory_bytes = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answers(lines: Iterator[str], trial: GrammarTrial, chars_max: int, timeout_s: float) -> Iterator[dict[str, str]]:
    for line in lines:
        request = json.loads(line)
        # The default action ends the process, also amid native code and when nobody is left to do it. Its own time
        # counts: a machine that stands still is no fault of the grammar's.
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        try:
            grammar = serialized_grammar(request["kind"], request["text"], chars_max)
            trial.check(grammar)
            answer = {"grammar": grammar}
        except Refused as refused:
            answer = {"refused": shown(str(refused))}
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield answer


def _tell(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Serves until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the input
    os.nice(_NICE)
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return 0
    try:
        vocabulary = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["end_ids"])
        trial = GrammarTrial(vocabulary)
    except ValueError as error:
        _tell({"failed": shown(str(error))})
        return 1
    _limit_resources()
    _tell({"ready": ""})
    try:
        for answer in _answers(sys.stdin, trial, setup["chars_max"], setup["timeout_s"]):
            _tell(answer)
    except MemoryError:
        os.abort()  # as native code does when it gets no more
    return 0


if __name__ == "__main__":
    sys.exit(main())
