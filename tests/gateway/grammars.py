"""Grammars that requests bring, good and bad."""

from __future__ import annotations

import json
from dataclasses import dataclass
from string import ascii_lowercase

from airside.proto import airside_pb2 as pb


def nested(keyword: str, depth: int) -> str:
    """A schema of two alternatives, the first of which is such a schema again: its alternatives overlap."""
    schema: dict[str, object] = {"type": "string", "maxLength": 3}
    for i in range(depth):
        schema = {keyword: [schema, {"type": "object", "properties": {f"k{i}": schema}, "required": [f"k{i}"]}]}
    return json.dumps(schema)


def ref_chain(length: int) -> str:
    """An array of arrays of arrays, each level a definition that refers to the next."""
    levels = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return json.dumps({"$defs": {**levels, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def many_patterns(count: int) -> str:
    """A schema whose patterns must be met together: to see whether any text does takes time exponential in `count`."""
    return json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(count)]})


def large_enum(count: int, length: int) -> str:
    """A schema of `count` texts of `length` characters."""
    return json.dumps({"enum": [f"{i:x>{length}}" for i in range(count)]})


def optional(count: int) -> str:
    """A schema of an object with so many properties, none of which is required."""
    return json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}})


SLOW = pb.Structure(json_schema=many_patterns(30))
"""Would be built for minutes."""

CRASHES = pb.Structure(json_schema=ref_chain(3000))
"""Overflows the stack of whoever builds it."""


AMBIGUOUS = pb.Structure(lark='start: e\ne: e e | e "+" e | /[a-z]/ | "(" e ")"')
"""Its parse grows with the text, and what a token costs with the square of that."""

ARITHMETIC = """start: sum
sum: product | sum "+" product | sum "-" product
product: atom | product "*" atom | product "/" atom
atom: NUMBER | "-" atom | NAME | "(" sum ")"
NUMBER: /[0-9]+(\\.[0-9]+)?/
NAME: /[a-z_]\\w*/
%ignore / /
"""
"""Its parse grows with nothing but signs and brackets, and with them for ever."""

MANY_STATES = pb.Structure(regex="(" + "|".join(f"[a-z]*{c}[a-z]{{{k}}}" for k, c in enumerate(ascii_lowercase)) + ")+")
"""Whose lexer gets new states with each letter."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A structure that is refused: for which field, and with which words."""

    structure: pb.Structure
    field: str
    words: str


BAD = {
    "schema_empty": Bad(pb.Structure(json_schema=""), "json_schema", "is empty"),
    "schema_blank": Bad(pb.Structure(json_schema=" \n"), "json_schema", "is empty"),
    "schema_null": Bad(pb.Structure(json_schema="null"), "json_schema", "not a JSON object"),
    "schema_true": Bad(pb.Structure(json_schema="true"), "json_schema", "not a JSON object"),
    "schema_text": Bad(pb.Structure(json_schema='"string"'), "json_schema", "not a JSON object"),
    "schema_broken": Bad(pb.Structure(json_schema='{"type": '), "json_schema", "EOF"),
    "schema_brackets": Bad(pb.Structure(json_schema='{"a":' * 20_000), "json_schema", "recursion limit"),
    "schema_type": Bad(pb.Structure(json_schema='{"type":"strng"}'), "json_schema", "strng"),
    "schema_keyword": Bad(pb.Structure(json_schema='{"not":{},"if":{}}'), "json_schema", '"if", "not"'),
    "schema_inner_keyword": Bad(
        pb.Structure(json_schema='{"type":"array","items":{"uniqueItems":true}}'), "json_schema", '"uniqueItems"'
    ),
    "schema_lenient": Bad(pb.Structure(json_schema='{"x-guidance":{"lenient":true},"not":{}}'), "json_schema", '"not"'),
    "schema_format": Bad(pb.Structure(json_schema='{"type":"string","format":"foo"}'), "json_schema", "foo"),
    "schema_no_value": Bad(pb.Structure(json_schema='{"enum":[]}'), "json_schema", "Unsatisfiable"),
    "schema_cycle": Bad(pb.Structure(json_schema='{"$ref":"#"}'), "json_schema", "no text is of this form"),
    "schema_two_cycle": Bad(
        pb.Structure(json_schema='{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
        "json_schema",
        "no text is of this form",
    ),
    "schema_min_items": Bad(
        pb.Structure(json_schema='{"type":"array","items":{"type":"array","minItems":18446744073709551615}}'),
        "json_schema",
        "minItems is 18446744073709551615",
    ),
    "schema_min_length": Bad(
        pb.Structure(json_schema='{"minLength":1000000,"type":"string"}'), "json_schema", "minLength"
    ),
    "schema_remote": Bad(pb.Structure(json_schema='{"$ref":"http://localhost/x"}'), "json_schema", "fetch"),
    "schema_one_of_6": Bad(pb.Structure(json_schema=nested("oneOf", 6)), "json_schema", "oneOf"),
    "schema_one_of_10": Bad(pb.Structure(json_schema=nested("oneOf", 10)), "json_schema", "oneOf"),
    "schema_one_of_14": Bad(pb.Structure(json_schema=nested("oneOf", 14)), "json_schema", "at most 262144"),
    "schema_crashes": Bad(CRASHES, "json_schema", "nested too deeply"),
    "schema_large": Bad(pb.Structure(json_schema=large_enum(20_000, 250)), "json_schema", "at most 262144"),
    "object_false": Bad(pb.Structure(json_object=False), "json_object", "is false"),
    "regex_empty": Bad(pb.Structure(regex=""), "regex", "is empty"),
    "regex_unbalanced": Bad(pb.Structure(regex="(a"), "regex", "unclosed group"),
    "regex_class": Bad(pb.Structure(regex="[a"), "regex", "unclosed character class"),
    "regex_anchor": Bad(pb.Structure(regex="a^b"), "regex", "look-around"),
    "regex_look_ahead": Bad(pb.Structure(regex="(?=a)a"), "regex", "look-ahead"),
    "regex_none": Bad(pb.Structure(regex=r"[^\x00-\U0010ffff]"), "regex", "no text is of this form"),
    "regex_deep": Bad(pb.Structure(regex="(" * 5000 + "a" + ")" * 5000), "regex", "maximum number of nested"),
    "regex_large": Bad(pb.Structure(regex="(?:(?:(?:a{1,1000}){1,1000}){1,1000}){1,1000}"), "regex", "too complex"),
    "choice_none": Bad(pb.Structure(choice=pb.Choice()), "choice", "no texts"),
    "choice_empty": Bad(pb.Structure(choice=pb.Choice(texts=["yes", ""])), "choice.texts[1]", "is empty"),
    "lark_empty": Bad(pb.Structure(lark=""), "lark", "is empty"),
    "lark_json": Bad(pb.Structure(lark='{"grammars":[{"json_schema":{}}]}'), "lark", "expecting rule"),
    "lark_syntax": Bad(pb.Structure(lark='start: ("a"'), "lark", "Expected"),
    "lark_no_start": Bad(pb.Structure(lark='other: "a"'), "lark", "start"),
    "lark_undefined": Bad(pb.Structure(lark="start: other"), "lark", "other"),
    "lark_cycle": Bad(pb.Structure(lark="start: start"), "lark", "no text is of this form"),
    "lark_dead_end": Bad(pb.Structure(lark='start: "a" other\nother: other'), "lark", "have no end"),
    "lark_schema": Bad(pb.Structure(lark='start: %json {"type":"strng"}'), "lark", "strng"),
    "lark_lenient": Bad(pb.Structure(lark='start: %json {"x-guidance":{"lenient":true},"not":{}}'), "lark", '"not"'),
    "lark_crashes": Bad(
        pb.Structure(lark="".join(f"r{i}: r{i + 1}\n" for i in range(12_000)) + 'r12000: "a"\nstart: r0'),
        "lark",
        "nested too deeply",
    ),
    "lark_ambiguous": Bad(AMBIGUOUS, "lark", "too much work"),
    "lark_ambiguous_words": Bad(pb.Structure(lark="start: e\ne: e e | /a/"), "lark", "too much work"),
    "lark_ambiguous_threes": Bad(pb.Structure(lark='start: e+\ne: e e | "a" | e e e'), "lark", "too much work"),
    "schema_wide": Bad(pb.Structure(json_schema=optional(200)), "json_schema", "ways to read"),
    "gbnf_cycle": Bad(pb.Structure(gbnf="root ::= root"), "gbnf", "no text is of this form"),
    "gbnf_no_root": Bad(pb.Structure(gbnf='other ::= "a"'), "gbnf", "root"),
    "gbnf_syntax": Bad(pb.Structure(gbnf='root ::= ("a"'), "gbnf", "Expected"),
    "gbnf_lark": Bad(pb.Structure(gbnf='start: "a"'), "gbnf", "Expected"),
    "gbnf_deep": Bad(pb.Structure(gbnf="root ::= " + "(" * 5000), "gbnf", "nested too deeply"),
}


@dataclass(frozen=True, slots=True)
class Good:
    """A structure that is taken: texts of its form, and texts that are not."""

    structure: pb.Structure
    texts: tuple[str, ...]
    others: tuple[str, ...]


_WEIRD = (
    "a",
    "a b",
    "a b c",
    '"q"',
    "\\",
    "x\ny",
    "/",
    "#",
    "é東🙂",
    "{a}",
    "[",
    "(",
    "a-b&c~d",
    "^$",
    "<|end|>",
    "\0",
)

GOOD = {
    "object": Good(pb.Structure(json_object=True), ("{}", '{"a":1}', '{"a": [1, 2]}'), ("[]", "1", "{ }", "{}\n")),
    "schema_any": Good(pb.Structure(json_schema="{}"), ("{}", "null", "1.5e3", '["a",true]'), ("", "nul", " 1", "1 ")),
    "schema_blanks": Good(
        pb.Structure(json_schema='{"type":"array","items":{"type":"integer"}}'),
        ("[1,2]", "[1, 2]"),
        ("[1,  2]", "[ 1]", "[1\n]", "[1 ,2]"),
    ),
    "schema_own_blanks": Good(
        pb.Structure(
            json_schema='{"type":"array","x-guidance":{"whitespace_flexible":true,"whitespace_pattern":"[ ]*"}}'
        ),
        ("[1, 2]",),
        ("[1,  2]", "[ 1]"),
    ),
    "schema_one_of": Good(
        pb.Structure(json_schema='{"oneOf":[{"type":"string"},{"type":"integer"}]}'), ('"a"', "1"), ("1.5", "null")
    ),
    "schema_about_itself": Good(
        pb.Structure(
            json_schema='{"type":"object","properties":{"minItems":{"const":{"minItems":1000000}}},"required":["minItems"]}'
        ),
        ('{"minItems":{"minItems":1000000}}',),
        ('{"minItems":1}', "{}"),
    ),
    "schema_max_items": Good(
        pb.Structure(json_schema='{"type":"array","maxItems":18446744073709551615,"items":{"type":"integer"}}'),
        ("[]", "[1,2,3]"),
        ('["a"]',),
    ),
    "schema_optional": Good(pb.Structure(json_schema=optional(100)), ("{}", '{"p0":1,"p99":2}'), ('{"p1":1,"p0":1}',)),
    "regex_all": Good(pb.Structure(regex="^(|.*)$"), ("", "a", "anything"), ("a\nb",)),
    "regex_anchored": Good(pb.Structure(regex="^ab?$"), ("a", "ab"), ("b", "abb")),
    "regex_nested_plus": Good(pb.Structure(regex="(a+)+$"), ("a", "aaaa"), ("", "ab")),
    "regex_repeat": Good(pb.Structure(regex="a{1,100000}"), ("a", "a" * 300), ("", "b")),
    "regex_slash": Good(pb.Structure(regex="a/\nstart: b"), ("a/\nstart: b",), ("a",)),
    "choice": Good(pb.Structure(choice=pb.Choice(texts=_WEIRD)), _WEIRD, ("", "b", "a ", "a bc")),
    "lark_brackets": Good(pb.Structure(lark=ARITHMETIC), ("1+2*(x-3)", "--x / 4", "((((1))))"), ("", "1+", "(1")),
    "lark": Good(pb.Structure(lark='start: "a" start | "b"'), ("b", "aab"), ("a", "ba")),
    "gbnf": Good(pb.Structure(gbnf='root ::= "a" [0-9]+ | root "!"'), ("a1", "a12!!"), ("a", "1")),
}
