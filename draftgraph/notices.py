"""Notices and progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[float], None]  # takes the share that is done, 0 to 1


def silent(*_: object) -> None:
    """A report of progress that is not shown."""


def notice(line: str) -> None:
    """One line for the user on stderr."""
    print(f"draftgraph: {line}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, total: float | None = 1.0) -> Iterator[Report]:
    """A bar, at a terminal only, for the share that is done; with `total=None`, one that only moves."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
