"""What the demo shows: tokens as they come, live in a terminal and line by line elsewhere, and a table at the end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from airside.cluster.demo_exchange import Exchange

_PLAIN_WIDTH = 120
_ROUTINE = re.compile(r"Actor pid=\d+\).* INFO ")
_REPLY_WIDTH = 72
_PLAIN_CHARACTERS = 40  # of a reply, before a line of it is printed


class Screen:
    """The demo's output; everything goes to stdout."""

    def __init__(self) -> None:
        console = Console()
        self._console = console if console.is_terminal else Console(width=_PLAIN_WIDTH)
        self._printed: dict[int, int] = {}  # id of an exchange -> characters of its reply printed so far

    def say(self, line: str) -> None:
        """A line of the demo itself."""
        self._console.print(Text(line, style="bold"), soft_wrap=True)  # lines are there to be copied

    def server_line(self, line: str) -> None:
        """A line that the server printed."""
        self._console.print(Text(f"  | {line}", style="dim"), soft_wrap=True)

    def server_news(self, line: str) -> None:
        """The same, but for what its actors log as a matter of course."""
        if not _ROUTINE.search(line):
            self.server_line(line)

    @property
    def is_live(self) -> bool:
        """A terminal, whose lines can be redrawn."""
        return self._console.is_terminal

    @contextlib.contextmanager
    def watching(self, exchanges: Sequence[Exchange]) -> Iterator[None]:
        """Within, a terminal shows all exchanges as they grow; elsewhere call `print_new` now and then."""
        if not self.is_live:
            yield
            self.print_new(exchanges)
            return
        with Live(get_renderable=lambda: _growing(exchanges), console=self._console, refresh_per_second=8):
            yield

    def print_new(self, exchanges: Sequence[Exchange]) -> None:
        """Prints what has come since the last call, a line per exchange that has enough of it."""
        for exchange in exchanges:
            done = exchange.finished is not None or bool(exchange.error)
            start = self._printed.get(id(exchange), 0)
            new = exchange.text[start:]
            if new and (done or len(new) >= _PLAIN_CHARACTERS):
                self._printed[id(exchange)] = start + len(new)
                self._console.print(f"  {exchange.name:>16} > {_one_line(new)}", markup=False, highlight=False)

    def summary(self, exchanges: Sequence[Exchange]) -> None:
        """The table: one row per request."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        table.add_column("request", no_wrap=True)
        table.add_column("finish", no_wrap=True)
        for heading in ("prompt tokens", "output tokens", "first token, s", "tokens /s"):
            table.add_column(heading, justify="right", min_width=6)
        table.add_column("reply", no_wrap=True, overflow="ellipsis", min_width=18)
        for exchange in exchanges:
            table.add_row(*_row(exchange))
        self._console.print(table)


def _growing(exchanges: Sequence[Exchange]) -> Table:
    table = Table(show_header=False, box=None)
    for exchange in exchanges:
        tail = _one_line(exchange.text)[-_REPLY_WIDTH:]
        table.add_row(Text(exchange.name, style="cyan"), Text(str(exchange.num_tokens), style="dim"), Text(tail))
    return table


def _row(exchange: Exchange) -> list[str]:
    usage = exchange.finished.usage if exchange.finished is not None else None
    first, speed = exchange.time_to_first_token_s, exchange.tokens_per_s
    return [
        exchange.name,
        exchange.finished.reason if exchange.finished is not None else exchange.error,
        str(usage.prompt_tokens) if usage is not None else "-",
        str(usage.completion_tokens) if usage is not None else "-",
        f"{first:.2f}" if first is not None else "-",
        f"{speed:.1f}" if speed is not None else "-",
        _verdict(exchange) + _shortened(exchange.text),
    ]


def _verdict(exchange: Exchange) -> str:
    if exchange.picture is None:
        return ""
    return "✓ " if exchange.read_right else "✗ "


def _shortened(text: str, width: int = 40) -> str:
    line = _one_line(text)
    return line if len(line) <= width else line[: width - 1] + "…"


def _one_line(text: str) -> str:
    return " ".join(text.split())
