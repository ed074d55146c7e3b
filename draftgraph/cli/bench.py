"""`draftgraph bench`: how good a draft model is for a target; `run` and `report` are in `bench_run.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from draftgraph.bench.reporting import MEAN, REASON, need_matplotlib
from draftgraph.bench.reporting import Table as Titled
from draftgraph.bench.structures import chosen
from draftgraph.bench.tasks import read_tasks
from draftgraph.cli.command import register
from draftgraph.cli.options import Settings, option, refuse_outside, shown_range
from draftgraph.cli.terminal import console, load_pair, stderr_console, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.draft import DraftReport

WIDTH = 120  # of tables that no terminal shows
FIRST = 8  # characters of the first column, at least
WRAPPED = 24  # of a column of sentences, at least
OPTIONS = ("target", "device", "dtype", "seed", "json", "config", "debug")

TASKS, OUTPUT = "Tasks", "Input and output"
Draft = Annotated[str, typer.Argument(metavar="DIR", help="The draft: a folder, hub name or GGUF file")]
Data = Annotated[list[str], option(TASKS, "JSON lines, a folder of them, own or hub:NAME; may be given again", "PATH")]
Tasks = Annotated[str | None, option(TASKS, "Files of the folder by name; left out: all", "NAME,NAME")]
Prompts = Annotated[int, option(TASKS, "Prompts of each task, the first ones", shown_range(1))]
Temperatures = Annotated[str, option(TASKS, "0: greedy", "N,N")]
NewTokens = Annotated[int, option(TASKS, "Tokens of an answer at most", shown_range(1))]
Structures = Annotated[str | None, option(TASKS, "What to grow: chain-4, tree-64, ...; left out: all", "NAME,NAME")]
Out = Annotated[str | None, option(OUTPUT, "Write results.json, results.md, plot.svg and plot.png there", "DIR")]

HELP = "Measure: how fast the modes are, and how good a draft is for a target."
app = typer.Typer(name="bench", help=HELP, pretty_exceptions_enable=False)


def draft(
    folder: Draft,
    data: Data,
    settings: Settings,
    tasks: Tasks = None,
    prompts: Prompts = 30,
    temperatures: Temperatures = "0,0.7",
    max_new_tokens: NewTokens = 128,
    structures: Structures = None,
    out: Out = None,
) -> None:
    """Measure how often a draft agrees with the target, and the tokens per pass that it gives."""
    refuse_outside("prompts", prompts, 1)
    refuse_outside("max_new_tokens", max_new_tokens, 1)
    found, wanted, degrees = read_tasks(data, listed(tasks), prompts), chosen(listed(structures)), numbers(temperatures)
    if out is not None:
        refuse_unwritable(Path(out))
    pair = load_pair(replace(settings, draft=folder))
    from draftgraph.bench.draft import bench_draft

    report = bench_draft(
        pair,
        found,
        structures=wanted,
        temperatures=degrees,
        max_new_tokens=max_new_tokens,
        seed=settings.seed or 0,
    )
    if (place := Path(folder).expanduser()).exists():
        report = replace(report, draft=place.absolute().name)
    if out is not None:
        report.save(Path(out))
        stderr_console().print(f"wrote {Path(out) / 'results.md'}", soft_wrap=True)
    if settings.json:
        write_json(report.to_dict())
    else:
        show(report)


register(app, draft, only=OPTIONS)


def listed(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def numbers(text: str) -> list[float]:
    """Temperatures, each once."""
    try:
        values = [float(value) for value in listed(text)]
    except ValueError as error:
        raise UsageError(f"temperatures must be numbers with commas between, as in 0,0.7, not {text!r}") from error
    for value in values:
        refuse_outside("temperatures", value, 0)
    if not values:
        raise UsageError("temperatures must name at least one, as in 0,0.7")
    return list(dict.fromkeys(values))


def refuse_unwritable(folder: Path) -> None:
    """Before any work: a folder, or a plot, that could not be written at the end."""
    need_matplotlib()
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"--out {folder} cannot be written: name another folder")


def show(report: DraftReport) -> None:
    show_tables(report.tables(), report.explanation)


def show_tables(tables: Iterable[Titled], explanation: str, no_wrap: bool = True) -> None:
    terminal = console()
    if not terminal.is_terminal:
        terminal.width = max(terminal.width, WIDTH)
    for table in tables:
        terminal.print(table.title, style="italic", soft_wrap=True)
        for piece in narrowed(table, terminal.width, no_wrap):
            terminal.print(drawn(piece, no_wrap), "")
    terminal.print(explanation)


def narrowed(table: Titled, width: int, no_wrap: bool) -> Iterator[Titled]:
    """A table in so many pieces, one under the other, that each fits the width; all have the first column."""
    size = len if no_wrap else longest_word
    columns = zip(table.header, *table.lines, strict=True)
    needed = [WRAPPED if name == REASON else max([longest_word(name), *map(size, cells)]) for name, *cells in columns]
    first, start, used = max(needed[0], FIRST), 1, 0
    for place in range(1, len(needed)):
        if place > start and first + used + needed[place] + 1 > width:
            yield with_columns(table, [0, *range(start, place)])
            start, used = place, 0
        used += needed[place] + 1
    yield with_columns(table, [0, *range(start, len(needed))])


def with_columns(table: Titled, places: list[int]) -> Titled:
    lines = [[cells[place] for place in places] for cells in table.lines]
    return Titled(table.title, [table.header[place] for place in places], lines)


def longest_word(words: str) -> int:
    return max(map(len, words.split()), default=0)


def drawn(table: Titled, no_wrap: bool) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown.padding = 0  # all of it in 80 columns: the box leaves a space between them
    shown.add_column(table.header[0], overflow="fold", min_width=FIRST)
    for name in table.header[1:]:
        sentences = name == REASON
        shown.add_column(
            name.replace(" ", "\n"), justify="left" if sentences else "right", no_wrap=no_wrap and not sentences
        )
    for cells in table.lines:
        if cells[0] == MEAN:
            shown.add_section()
        shown.add_row(*cells)
    return shown
