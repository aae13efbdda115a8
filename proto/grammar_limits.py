"""How much work a grammar may be: for the gateway, which checks it, and for the worker, which builds it again."""

from __future__ import annotations

PARSER_LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 2_000,  # branches of the parse at one byte
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 15 ms
    "step_max_items": 50_000,  # about 3 ms
    "max_lexer_states": 50_000,  # about 2 kB each
    "max_grammar_size": 500_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
"""Keyword arguments of llguidance's `LLParserLimits`. They count work, not time, so that no load changes the answer."""
