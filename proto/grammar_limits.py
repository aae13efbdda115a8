"""How much work a grammar may be: for the gateway, which tries it, and for the worker, which builds it again."""

from __future__ import annotations

PARSER_LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 500,  # ways to read the text so far. At most about 10 ms for a token; 200 are usual
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 100_000,  # about 10 ms; 40,000 are usual
    "step_max_items": 4_000,  # at most about 3 ms; 1,800 are usual
    "max_lexer_states": 10_000,  # at most about 1 kB each: 10 MB for a sequence; 5,000 are usual in 64 tokens
    "max_grammar_size": 500_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
"""Keyword arguments of llguidance's `LLParserLimits`. They count work, not time, so that no load changes the answer.

A row has four items for each optional property of an object: 124 of them are the most. "Usual" is the highest that
twenty JSON schemas, nine regular expressions, and grammars of arithmetic, SQL, C, chess and JSON needed over a
vocabulary of 49,000.
"""

RENEW_TOKENS = 64
"""A matcher whose lexer is full after as many tokens or more is made anew, with what the text so far needs; a grammar
whose lexer fills sooner is too much work."""

TRIAL_LIMITS: dict[str, int | bool] = {**PARSER_LIMITS, "step_lexer_fuel": 50_000}
"""The gateway's. The lexer spends less where it has been before, so the limit that ends a sequence should be out of
reach of what the gateway lets pass, wherever its text was rolled back to or built anew."""
