"""Progress of a long measurement, on stderr: a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[str], None]
"""Says what is measured next; the step before it is done."""


@contextlib.contextmanager
def progress(num_steps: int) -> Iterator[Advance]:
    """Within, each call of what is yielded begins the next of `num_steps` steps."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(console, num_steps)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=num_steps)
        begun = 0

        def advance(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1

        yield advance


def _plain(console: Console, num_steps: int) -> Advance:
    begun = 0

    def advance(what: str) -> None:
        nonlocal begun
        begun += 1
        console.print(f"[{begun}/{num_steps}] {what}", markup=False, highlight=False, soft_wrap=True)

    return advance
