"""`draftgraph tune`: how long passes take here, and what `auto` makes of it; or the fastest setting of mode graph."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from draftgraph.bench.tasks import read_tasks
from draftgraph.cli.bench import listed, refuse_unwritable, show_tables, shown_names, time_left
from draftgraph.cli.errors import complain
from draftgraph.cli.options import MODELS, OUTPUT, REPORTS, Settings, option
from draftgraph.cli.terminal import busy, console, load_pair, plain_table, right, say_written, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.tuning.report import TuneReport

TUNE_OPTIONS = (*MODELS, "k", "max_nodes", "max_depth", "seed", *REPORTS)
CHOICES = ("draft's best\ntoken right", "draft\nlevels", "checked\nnodes", "tokens\nper pass", "times as\nfast as off")
SEARCH, FOLDER = "Search", "search"


def tune(
    settings: Settings,
    out: Annotated[
        str | None,
        option(OUTPUT, "Write latency.json and plots there; of a search, all it finds: search", "FOLDER"),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search the fastest setting of mode graph", rich_help_panel=SEARCH)
    ] = False,
    data: Annotated[list[str] | None, option(SEARCH, "JSON lines, a folder of them, own or hub:NAME", "PATH")] = None,
    tasks: Annotated[str | None, option(SEARCH, "Files of the folder by name; left out: all", "NAME,NAME")] = None,
    prompts: Annotated[int, option(SEARCH, "Prompts of each task, the first ones", least=1)] = 4,
    trials: Annotated[int, option(SEARCH, "Settings to try, the paper's first", least=1)] = 40,
    new_tokens: Annotated[int, option(SEARCH, "Tokens of an answer at most", least=1)] = 64,
    seconds: Annotated[float | None, option(SEARCH, "Stop in time; the same command goes on", "N", least=1)] = None,
    save_profile: Annotated[
        str | None, option(OUTPUT, "Write the best setting there; left out: profile.toml in --out", "FILE")
    ] = None,
) -> None:
    """Measure how long passes take on this machine, now, for mode auto to decide by; or search settings of graph."""
    if search:
        search_settings(settings, data, tasks, prompts, trials, new_tokens, seconds, save_profile, out)
        return
    for name, value in (("data", data), ("save-profile", save_profile)):
        if value is not None:
            raise UsageError(f"--{name} belongs to a search: add --search")
    config = settings.graph_config()
    if out is not None:
        refuse_unwritable(Path(out))
    pair = load_pair(settings)
    with busy("measuring"):
        from draftgraph.bench.draft import name_of
        from draftgraph.tuning.report import tune as measured

        target = settings.target or name_of(pair.target)
        report = measured(pair.decoder, config, target, None if pair.draft is None else settings.draft or "its own")
    if out is not None:
        report.save(Path(out))
        say_written(Path(out) / "latency.svg")
    if settings.json:
        write_json(report.to_dict())
    else:
        show(report)


def show(report: TuneReport) -> None:
    terminal = console()
    pair = report.target if report.draft is None else f"{report.target}, draft {report.draft}"
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    terminal.print(f"{pair}\n{settings}\n", soft_wrap=True)
    terminal.print(passes_table(report), "")
    if report.choices:
        terminal.print(choices_table(report), "")
    kept = "not kept: the cache folder cannot be written" if report.file is None else f"kept in {report.file}"
    used = "" if report.used else "; auto does without them: the model is too small"
    terminal.print(f"measured in {report.latencies.took:.1f} s, {kept}{used}", soft_wrap=True)


def passes_table(report: TuneReport) -> Table:
    """Milliseconds, and passes of the target over one token behind the same text."""
    columns = [(name, curve, context) for name, curve in report.curves.items() for context in curve.contexts]
    table = plain_table(right("nodes"))
    for name, _, context in columns:
        table.add_column(f"{name}, text\nof {context}, ms", justify="right")
        table.add_column("one-token\npasses", justify="right", style="dim")
    for nodes in sorted({nodes for curve in report.curves.values() for nodes in curve.nodes}):
        cells = [str(nodes)]
        for _, curve, context in columns:
            known = nodes in curve.nodes
            cells.append(f"{1000 * curve.measured(context, nodes):.2f}" if known else "")
            cells.append(f"{report.in_passes(curve, context, nodes):.2f}" if known else "")
        table.add_row(*cells)
    return table


def choices_table(report: TuneReport) -> Table:
    table = plain_table(*map(right, CHOICES))
    for one in report.choices:
        table.add_row(f"{one.hit:.0%}", str(one.levels), str(one.nodes), f"{one.tokens:.2f}", f"{one.ratio:.2f}")
    return table


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
    if given := settings.given("k", "max_nodes", "max_depth"):
        raise UsageError(f"{next(iter(given))} is searched: leave it out with --search")
    if not data:
        raise UsageError("a search needs prompts: give --data a file of JSON lines, or a folder of them")
    found = read_tasks(data, listed(tasks), prompts)
    with busy("starting"):
        from draftgraph.tuning.history import need_optuna

        need_optuna()
    folder = Path(out or FOLDER)
    pair = load_pair(settings)
    from draftgraph.tuning.search_tables import explanation_of, settings_of, tables, title_of
    from draftgraph.tuning.searching import PROFILE, search

    report = search(
        pair,
        found,
        folder,
        trials=trials,
        max_new_tokens=new_tokens,
        seconds=time_left(seconds, start),
        seed=settings.seed or 0,
        names=shown_names(settings),
        profile=save_profile,
    )
    if len(report.trials) < trials:
        complain(f"{len(report.trials)} of {trials} trials are in {folder}: the same command goes on")
    say_written(folder / "search.md", save_profile or folder / PROFILE)
    if settings.json:
        write_json(report.to_dict())
    else:
        show_tables(tables(report), f"{explanation_of(report)}\n{title_of(report)}; {settings_of(report)}")
