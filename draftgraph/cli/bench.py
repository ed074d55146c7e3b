"""Commands that measure: `bench`, how fast the modes are, how good a draft is, the paper's study and its reports;
`tune`, how long passes take here and what `auto` makes of it, or the fastest setting of mode graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from draftgraph.bench.load_report import LoadReport
from draftgraph.bench.paper.items import FOREIGN, MAIN, SIZES, UNLIKE, refuse_draft_names
from draftgraph.bench.reporting import MEAN, REASON
from draftgraph.bench.reporting import Table as Titled
from draftgraph.bench.runs import FILE, read_records
from draftgraph.bench.speed_report import SpeedReport
from draftgraph.bench.structures import DEFAULT, MODES, PEERS, SUITES, chosen, mode_named, suite_named
from draftgraph.bench.tasks import OWN, read_tasks
from draftgraph.cli.options import MODELS, REPORTS, SPLIT, Settings, refuse_outside, register
from draftgraph.cli.terminal import (
    busy,
    complain,
    console,
    load_pair,
    plain_table,
    right,
    say_written,
    unwritable_part,
    write_json,
)
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.page import Part
    from draftgraph.bench.paper.findings import PaperReport
    from draftgraph.bench.tune import TuneReport

WIDTH = 120  # of tables that no terminal shows
FIRST = 8  # characters of the first column, at least
WRAPPED = 24  # of a column of sentences, at least
ALL_MODES = ",".join(MODES)
SHAPES = ["llama-2-7b", "llama-2-13b", "llama-33b", "llama-2-70b"]

CHOICES = ("draft's best\ntoken right", "draft\nlevels", "checked\nnodes", "tokens\nper pass", "times as\nfast as off")
FOLDER = "search"

HELP = "Measure: how fast the modes are, and how good a draft is for a target."
app = typer.Typer(name="bench", help=HELP, pretty_exceptions_enable=False)


def draft(
    folder: str,
    data: list[str],
    settings: Settings,
    tasks: str | None = None,
    prompts: int = 30,
    temperatures: str = "0,0.7",
    max_new_tokens: int = 128,
    structures: str | None = None,
    out: str | None = None,
) -> None:
    """Measure how often a draft agrees with the target, and the tokens per pass that it gives."""
    found, wanted = read_tasks(data, listed(tasks), prompts), chosen(listed(structures))
    degrees = numbers("temperatures", temperatures, 0)
    if out is not None:
        refuse_unwritable(Path(out))
    pair = load_pair(replace(settings, draft=folder))
    from draftgraph.bench.draft import bench_draft

    measured = bench_draft(
        pair,
        found,
        structures=wanted,
        temperatures=degrees,
        max_new_tokens=max_new_tokens,
        seed=settings.seed or 0,
    )
    if (place := Path(folder).expanduser()).exists():
        measured = replace(measured, draft=place.absolute().name)
    if out is not None:
        measured.save(Path(out))
        say_written(Path(out) / "results.md")
    if settings.json:
        write_json(measured.to_dict())
    else:
        show_tables(measured.tables(), measured.explanation)


def run(
    out: str,
    settings: Settings,
    suite: str | None = None,
    data: list[str] | None = None,
    inflate: str | None = None,
    tasks: str | None = None,
    prompts: int | None = None,
    new_tokens: int | None = None,
    modes: str | None = None,
    repeats: int | None = None,
    transformers: bool = False,
    vllm: str | None = None,
    llama: str | None = None,
    seconds: float | None = None,
) -> None:
    """Time the modes on prompts, in turns; stopped at any time, the same command goes on."""
    start = time.monotonic()
    wanted = suite_named(suite).changed(
        prompts=prompts, new_tokens=new_tokens, repeats=repeats, modes=None if modes is None else listed(modes)
    )
    refuse_unknown_shape(inflate)
    if not wanted.modes:
        raise UsageError(f"modes must name at least one, as in {ALL_MODES}")
    for word in wanted.modes:
        if word not in PEERS:
            mode_named(word)
    found, sampling = read_tasks(data or [OWN], listed(tasks), wanted.prompts), settings.sampling_arguments()
    profile = None if settings.profile is None else settings.graph_config()
    pair = load_pair(settings)
    with busy("starting"):
        from draftgraph.bench.speed import bench_run
        from draftgraph.models.fetch import own_file
    measured = bench_run(
        pair,
        found,
        Path(out),
        modes=wanted.modes,
        inflate=inflate,
        max_new_tokens=wanted.new_tokens,
        repeats=wanted.repeats,
        temperature=sampling.get("temperature"),
        top_p=sampling.get("top_p"),
        seed=sampling.get("seed", 0),
        transformers=transformers,
        vllm=vllm,
        llama=llama,
        gguf=own_file(settings.target),
        seconds=time_left(seconds, start),
        names=shown_names(settings),
        profile=profile,
    )
    if measured.measured < measured.planned:
        kept = f"{measured.measured} of {measured.planned} measurements are in {Path(out) / FILE}"
        complain(f"{kept}: the same command goes on")
    elif measured.unscored:
        complain(f"{measured.unscored} answers are not scored in float32 yet: the same command goes on")
    show_report(measured, settings)


def load(
    out: str,
    settings: Settings,
    data: list[str] | None = None,
    inflate: str | None = None,
    tasks: str | None = None,
    prompts: int = 8,
    new_tokens: int = 128,
    modes: str = "off,auto",
    clients: str = "1,4,16,64",
    arrivals: str = "closed",
    repeats: int = 3,
    first_ms: float = 1000.0,
    token_ms: float = 100.0,
    vllm: str | None = None,
    seconds: float | None = None,
) -> None:
    """Put modes under the load of many clients, in turns; stopped at any time, the same command goes on."""
    start = time.monotonic()
    refuse_unknown_shape(inflate)
    found, sampling = read_tasks(data or [OWN], listed(tasks), prompts), settings.sampling_arguments()
    levels = whole_numbers("clients", clients, 1)
    pair = load_pair(settings)
    with busy("starting"):
        from draftgraph.bench.load import Promise, bench_load
    measured = bench_load(
        pair,
        found,
        Path(out),
        modes=listed(modes),
        clients=levels,
        arrivals=listed(arrivals),
        inflate=inflate,
        max_new_tokens=new_tokens,
        repeats=repeats,
        temperature=sampling.get("temperature"),
        top_p=sampling.get("top_p"),
        seed=sampling.get("seed", 0),
        promise=Promise(first_ms, token_ms),
        vllm=vllm,
        seconds=time_left(seconds, start),
        names=shown_names(settings),
    )
    if measured.measured < measured.planned:
        kept = f"{measured.measured} of {measured.planned} measurements are in {Path(out) / FILE}"
        complain(f"{kept}: the same command goes on")
    show_report(measured, settings)


def paper(
    out: str,
    settings: Settings,
    data: list[str] | None = None,
    size: str = "full",
    inflate: str | None = None,
    also_draft: list[str] | None = None,
    seconds: float | None = None,
) -> None:
    """Repeat the paper's experiments on a pair; stopped at any time, the same command goes on."""
    start = time.monotonic()
    if size not in SIZES:
        raise UsageError(f"there is no size {size}: choose of {', '.join(SIZES)}")
    refuse_unknown_shape(inflate)
    others = by_name(also_draft or [])
    tasks = {name: found for name, found in read_tasks(data or [OWN]).items() if name in (*MAIN, *UNLIKE, *FOREIGN)}
    pair = load_pair(settings)
    with busy("starting"):
        from draftgraph.bench.paper.findings import PaperReport
        from draftgraph.bench.paper.study import bench_paper
    done = bench_paper(
        pair,
        tasks,
        Path(out),
        drafts={name: draft_alike(pair.target, model, settings) for name, model in others.items()},
        size=SIZES[size],
        inflate=inflate,
        seed=settings.seed or 0,
        seconds=time_left(seconds, start),
        names=shown_names(settings),
    )
    if not done:
        complain(f"the study in {out} is not complete: the same command goes on")
    if (study := PaperReport.of(Path(out).expanduser())) is None:
        return
    study.save(Path(out).expanduser())
    show_report(study, settings)


def report(folders: list[str], settings: Settings, out: str | None = None) -> None:
    """Show what bench run and bench paper measured, and write their reports again; several as one page."""
    places = [Path(folder).expanduser() for folder in folders]
    if len(places) > 1 and out is None:
        raise UsageError("several folders make one page: name it, as in --out report.html")
    if out is not None and not out.endswith(".html"):
        raise UsageError(f"--out {out} must end in .html")
    found = [read_report(place) for place in places]
    for place, one in zip(places, found, strict=True):
        try:
            one.save(place)
        except OSError as error:
            complain(f"the report is not written to {place}: {error.strerror or error}")
    if out is not None:
        parts = [one.to_part().named(place.resolve().name) for place, one in zip(places, found, strict=True)]
        write_page(parts, "\n".join(one.to_markdown() for one in found), Path(out).expanduser())
    if settings.json and len(found) > 1:
        write_json([one.to_dict() for one in found])
        return
    for one in found:
        show_report(one, settings)


def read_report(folder: Path) -> SpeedReport | LoadReport | PaperReport:
    """Of a run, of a load, or of a study, which has a folder for every item."""
    if not (folder / FILE).exists() and any(folder.glob(f"*/{FILE}")):
        from draftgraph.bench.paper.findings import PaperReport

        if (study := PaperReport.of(folder)) is not None:
            return study
    records = read_records(folder)
    return LoadReport.of(records) if records[0].get("measures") == "load" else SpeedReport.of(records)


def write_page(parts: list[Part], markdown: str, file: Path) -> None:
    from draftgraph.bench.page import page
    from draftgraph.files import replacing

    documents = {file: page(parts), file.with_suffix(".md"): markdown}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for place, content in documents.items():
            with replacing(place) as partial:
                partial.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {file} cannot be written: {error.strerror or error}") from error
    say_written(file)


def listed(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def numbers(name: str, text: str, least: float) -> list[float]:
    """Each once."""
    try:
        values = [float(value) for value in listed(text)]
    except ValueError as error:
        raise UsageError(f"{name} must be numbers with commas between, as in 1,4, not {text!r}") from error
    for value in values:
        refuse_outside(name, value, least)
    if not values:
        raise UsageError(f"{name} must hold at least one number, as in 1,4")
    return list(dict.fromkeys(values))


def whole_numbers(name: str, text: str, least: float) -> list[int]:
    values = numbers(name, text, least)
    for value in values:
        if not value.is_integer():
            raise UsageError(f"{name} must be whole numbers with commas between, as in 1,4, not {value:g}")
    return [int(value) for value in values]


def time_left(seconds: float | None, start: float) -> float | None:
    return None if seconds is None else seconds - (time.monotonic() - start)


def refuse_unwritable(folder: Path) -> None:
    """Before any work: a folder, or a plot, that could not be written at the end."""
    from draftgraph.bench.reporting import need_matplotlib

    need_matplotlib()
    if unwritable_part(folder) is not None:
        raise UsageError(f"--out {folder} cannot be written: name another folder")


def refuse_unknown_shape(inflate: str | None) -> None:
    if inflate is not None and inflate not in SHAPES:
        raise UsageError(f"there is no shape {inflate}: choose of {', '.join(SHAPES)}")


def shown_names(settings: Settings) -> dict[str, str | None]:
    """Models as they were given, but for the way to a folder or file."""
    names: dict[str, str | None] = {
        name: shown_name(model) for name, model in settings.given("target", "draft").items()
    }
    if settings.target is None and settings.draft is None:
        names["draft"] = "the default's"
    if settings.draft == "none":
        names["draft"] = None
    return names


def shown_name(model: str) -> str:
    place = Path(model).expanduser()
    return place.absolute().name if place.exists() else model


def show_report(one: SpeedReport | LoadReport | PaperReport, settings: Settings) -> None:
    from draftgraph.bench.speed_report import explanation_of, settings_of, tables, title_of

    if settings.json:
        write_json(one.to_dict())
    elif isinstance(one, LoadReport):
        show_tables(one.tables(), f"{one.explanation}\n{one.title}; {one.settings}")
    elif not isinstance(one, SpeedReport):
        for finding in one.findings:
            console().print(finding.question, style="bold", soft_wrap=True)
            console().print(f"{finding.answer}\n", soft_wrap=True)
    elif one.modes:
        lines = f"{explanation_of(one)}\n{title_of(one)}; {settings_of(one)}"
        show_tables(tables(one), lines, no_wrap=one.label is None)


def by_name(models: Sequence[str]) -> dict[str, str]:
    """Drafts by the last part of how they were given: each has a folder of that name."""
    named: dict[str, str] = {}
    for model in models:
        name = shown_name(model).rpartition("/")[2]
        if name in named:
            raise UsageError(f"two drafts are named {name}: {named[name]} and {model}; rename one")
        named[name] = model
    refuse_draft_names(named)
    return named


def draft_alike(target: Any, model: str, settings: Settings) -> Any:
    """Another draft with the target's tokenizer."""
    from draftgraph.pair import load

    pair = load(target, model, **settings.given("device", "dtype"))
    if pair.draft_tokenizer is not None:
        raise UsageError(f"the draft {model} does not share the target's tokenizer: only drafts that do are compared")
    return pair.draft


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
    shown = plain_table()
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


def tune(
    settings: Settings,
    out: str | None = None,
    search: bool = False,
    data: list[str] | None = None,
    tasks: str | None = None,
    prompts: int = 4,
    trials: int = 40,
    new_tokens: int = 64,
    seconds: float | None = None,
    save_profile: str | None = None,
) -> None:
    """Measure how long passes take on this machine, now, for mode auto to decide by; or search settings of graph."""
    start = time.monotonic()
    if not search:
        for name, value in (("data", data), ("save-profile", save_profile)):
            if value is not None:
                raise UsageError(f"--{name} belongs to a search: add --search")
        measure(settings, out)
        return
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
    from draftgraph.bench.searching import PROFILE, explanation_of, settings_of, tables, title_of
    from draftgraph.bench.searching import search as searched

    report = searched(
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


def measure(settings: Settings, out: str | None) -> None:
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


SIZED: dict[str, Iterable[str]] = {"suite": SUITES, "inflate": SHAPES, "size": SIZES}
register(app, draft, only=("target", "device", "dtype", "seed", *REPORTS))
only = (*MODELS, SPLIT, "temperature", "top_p", "seed", "profile", *REPORTS)
register(app, run, only=only, choices=SIZED, usual=DEFAULT, modes=ALL_MODES)
register(app, load, only=(*MODELS, "temperature", "top_p", "seed", *REPORTS), choices=SIZED)
register(app, report, only=REPORTS)
register(app, paper, only=(*MODELS, "seed", *REPORTS), choices=SIZED)
