"""`draftgraph tune --search`: the fastest setting of mode graph for a pair, prompts and this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftgraph.bench.tasks import read_tasks
from draftgraph.cli.bench import listed, show_tables
from draftgraph.cli.bench_run import shown_names
from draftgraph.cli.errors import complain
from draftgraph.cli.options import Settings, option, refuse_outside, shown_range
from draftgraph.cli.terminal import busy, load_pair, stderr_console, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.searching import SearchReport

PANEL, OUTPUT, FOLDER = "Search", "Input and output", "search"
Search = Annotated[
    bool, typer.Option("--search", help="Search the fastest setting of mode graph", rich_help_panel=PANEL)
]
Data = Annotated[list[str] | None, option(PANEL, "JSON lines, a folder of them, own or hub:NAME", "PATH")]
Tasks = Annotated[str | None, option(PANEL, "Files of the folder by name; left out: all", "NAME,NAME")]
Prompts = Annotated[int, option(PANEL, "Prompts of each task, the first ones", shown_range(1))]
Trials = Annotated[int, option(PANEL, "Settings to try, the paper's first", shown_range(1))]
NewTokens = Annotated[int, option(PANEL, "Tokens of an answer at most", shown_range(1))]
Seconds = Annotated[float | None, option(PANEL, "Stop in time; the same command goes on", "N")]
SaveProfile = Annotated[
    str | None, option(OUTPUT, "Write the best setting there; left out: profile.toml in --out", "FILE")
]


def search_settings(
    settings: Settings,
    data: list[str] | None,
    tasks: str | None,
    prompts: int,
    trials: int,
    new_tokens: int,
    seconds: float | None,
    save_profile: str | None,
    out: str | None,
) -> None:
    start = time.monotonic()
    for name, value in (("prompts", prompts), ("trials", trials), ("new_tokens", new_tokens)):
        refuse_outside(name, value, 1)
    if seconds is not None:
        refuse_outside("seconds", seconds, 1)
    if given := settings.given("k", "max_nodes", "max_depth"):
        raise UsageError(f"{next(iter(given))} is searched: leave it out with --search")
    if not data:
        raise UsageError("a search needs prompts: give --data a file of JSON lines, or a folder of them")
    found = read_tasks(data, listed(tasks), prompts)
    with busy("starting"):
        from draftgraph.bench.searching import need_optuna

        need_optuna()
    folder = Path(out or FOLDER)
    pair = load_pair(settings)
    from draftgraph.bench.searching import PROFILE, search

    report = search(
        pair,
        found,
        folder,
        trials=trials,
        max_new_tokens=new_tokens,
        seconds=None if seconds is None else seconds - (time.monotonic() - start),
        seed=settings.seed or 0,
        names=shown_names(settings),
        profile=save_profile,
    )
    if len(report.trials) < trials:
        complain(f"{len(report.trials)} of {trials} trials are in {folder}: the same command goes on")
    stderr_console().print(f"wrote {folder / 'search.md'} and {save_profile or folder / PROFILE}", soft_wrap=True)
    if settings.json:
        write_json(report.to_dict())
    else:
        show(report)


def show(report: SearchReport) -> None:
    from draftgraph.bench.searching import explanation_of, settings_of, tables, title_of

    show_tables(tables(report), f"{explanation_of(report)}\n{title_of(report)}; {settings_of(report)}")
