"""`draftgraph tune`: how long passes take here, and what `auto` makes of it; `--search` is in `search.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich import box
from rich.table import Table

from draftgraph.cli.bench import refuse_unwritable
from draftgraph.cli.options import Settings, option
from draftgraph.cli.search import Data, NewTokens, Prompts, SaveProfile, Search, Seconds, Tasks, Trials, search_settings
from draftgraph.cli.terminal import busy, console, load_pair, stderr_console, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.tune import TuneReport

TUNE_OPTIONS = ("target", "draft", "device", "dtype", "k", "max_nodes", "max_depth", "seed", "json", "config", "debug")
CHOICES = ("draft's best\ntoken right", "draft\nlevels", "checked\nnodes", "tokens\nper pass", "times as\nfast as off")
Out = Annotated[
    str | None,
    option("Input and output", "Write latency.json and plots there; of a search, all it finds: search", "FOLDER"),
]


def tune(
    settings: Settings,
    out: Out = None,
    search: Search = False,
    data: Data = None,
    tasks: Tasks = None,
    prompts: Prompts = 4,
    trials: Trials = 40,
    new_tokens: NewTokens = 64,
    seconds: Seconds = None,
    save_profile: SaveProfile = None,
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
        from draftgraph.bench.speed import name_of
        from draftgraph.bench.tune import tune as measured

        target = settings.target or name_of(pair.target)
        report = measured(pair.decoder, config, target, None if pair.draft is None else settings.draft or "its own")
    if out is not None:
        report.save(Path(out))
        stderr_console().print(f"wrote {Path(out) / 'latency.svg'}", soft_wrap=True)
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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("nodes", justify="right")
    columns = [(name, curve, context) for name, curve in report.curves.items() for context in curve.contexts]
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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in CHOICES:
        table.add_column(header, justify="right")
    for one in report.choices:
        table.add_row(f"{one.hit:.0%}", str(one.levels), str(one.nodes), f"{one.tokens:.2f}", f"{one.ratio:.2f}")
    return table
