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

from airside.cluster.demo.exchange import Exchange

_PLAIN_WIDTH = 120
_ROUTINE = re.compile(r"Actor pid=\d+\).* INFO |\(raylet\) A worker died .* The process receives a SIGTERM")
_REPLY_WIDTH_MIN = 18
_COUNT_WIDTH = 4
_PADDING = 6  # around the three columns of the live view
_PLAIN_CHARACTERS = 40  # of a reply, before a line of it is printed


class Screen:
    """The demo's output; everything goes to stdout."""

    def __init__(self) -> None:
        console = Console()
        self._console = console if console.is_terminal else Console(width=_PLAIN_WIDTH)
        self._watched: Sequence[Exchange] = ()
        self._printed: dict[int, int] = {}  # id of an exchange -> characters of its reply printed so far

    def say(self, line: str) -> None:
        """A line of the demo itself."""
        self._console.print(Text(line, style="bold"), soft_wrap=True)  # lines are there to be copied

    def server_line(self, line: str) -> None:
        """A line that the server printed."""
        self._console.print(Text(f"  | {line}", style="dim"), soft_wrap=True)

    def server_news(self, line: str) -> None:
        """The same, but for what its actors log as a matter of course, and Ray about those that were told to end."""
        if not _ROUTINE.search(line):
            self.server_line(line)

    @contextlib.contextmanager
    def watching(self, exchanges: Sequence[Exchange]) -> Iterator[None]:
        """Within, a terminal shows all exchanges as they grow; elsewhere each `refresh` prints what has come."""
        self._watched = exchanges
        try:
            if not self._console.is_terminal:
                yield
                self.refresh()
                return
            with Live(get_renderable=self._growing, console=self._console, refresh_per_second=8):
                yield
        finally:
            self._watched = ()

    def refresh(self) -> None:
        """Prints what has come since the last call, a line per exchange that has enough; a terminal needs none."""
        if self._console.is_terminal:
            return
        for exchange in self._watched:
            done = exchange.finished is not None or bool(exchange.error)
            start = self._printed.get(id(exchange), 0)
            new = exchange.text[start:]
            if new and (done or len(new) >= _PLAIN_CHARACTERS):
                self._printed[id(exchange)] = start + len(new)
                line = f"  {exchange.name:>16} > {_one_line(new)}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def summary(self, groups: Sequence[Sequence[Exchange]]) -> None:
        """The table: one row per request, a blank line between groups."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, expand=True)
        table.add_column("request", no_wrap=True)
        table.add_column("finish", no_wrap=True)
        for heading in ("prompt\ntokens", "output\ntokens", "first\ntoken, s", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("reply", no_wrap=True, overflow="ellipsis", ratio=1, min_width=_REPLY_WIDTH_MIN)
        for group in groups:
            for exchange in group:
                table.add_row(*_row(exchange))
            table.add_section()
        self._console.print(table)

    def _growing(self) -> Table:
        name_width = max((len(exchange.name) for exchange in self._watched), default=0)
        room = self._console.width - name_width - _COUNT_WIDTH - _PADDING
        table = Table(show_header=False, box=None)
        for exchange in self._watched:
            count = Text(f"{exchange.num_tokens:>{_COUNT_WIDTH}}", style="dim")
            table.add_row(Text(exchange.name, style="cyan"), count, Text(window(exchange, room)))
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
        _verdict(exchange) + _one_line(exchange.text),
    ]


def _verdict(exchange: Exchange) -> str:
    if exchange.exhibit is None:
        return ""
    return "✓ " if exchange.is_right else "✗ "


def window(exchange: Exchange, width: int) -> str:
    """What fits of a reply: its end while it grows, its beginning afterwards."""
    line = _one_line(exchange.text)
    if len(line) <= width:
        return line
    return f"{line[: width - 1]}…" if exchange.finished is not None else f"…{line[1 - width :]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
