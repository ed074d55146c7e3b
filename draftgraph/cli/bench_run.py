"""`draftgraph bench run`: how fast the modes are on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftgraph.bench.runs import FILE
from draftgraph.bench.structures import DEFAULT, MODES, PEERS, SUITES, mode_named, suite_named
from draftgraph.bench.tasks import OWN, read_tasks
from draftgraph.cli.bench import TASKS, Tasks, listed, show_tables
from draftgraph.cli.errors import complain
from draftgraph.cli.options import Settings, option, refuse_outside, shown_range
from draftgraph.cli.terminal import busy, load_pair, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.speed_report import SpeedReport

RUN_OPTIONS = (
    "target",
    "draft",
    "device",
    "dtype",
    "temperature",
    "top_p",
    "seed",
    "profile",
    "json",
    "config",
    "debug",
)
ALL_MODES = ",".join(MODES)
SHAPES = ["llama-2-7b", "llama-2-13b", "llama-33b", "llama-2-70b"]

RUNS, OUTPUT = "Measurements", "Input and output"
Suite = Annotated[
    str | None, option(RUNS, "How much to measure; other options win over it", "|".join(SUITES), [*SUITES])
]
Data = Annotated[
    list[str] | None,
    option(TASKS, "JSON lines, a folder of them, own or hub:NAME; may be given again; left out: own", "PATH"),
]
Prompts = Annotated[int | None, option(TASKS, f"Prompts of each task, {DEFAULT.prompts}", shown_range(1))]
Inflate = Annotated[str | None, option("Model", "Put the target into a large shape", "|".join(SHAPES), SHAPES)]
NewTokens = Annotated[int | None, option(RUNS, f"Tokens of an answer at most, {DEFAULT.new_tokens}", shown_range(1))]
Modes = Annotated[
    str | None,
    option(RUNS, f"chain-6: six levels; tree-32: so many nodes; hf, vllm: others'; left out: {ALL_MODES}", "MODE,MODE"),
]
Repeats = Annotated[int | None, option(RUNS, f"Answers of each mode to each prompt, {DEFAULT.repeats}", shown_range(1))]
Transformers = Annotated[bool, typer.Option("--transformers", help="Also all modes hf-...", rich_help_panel=RUNS)]
Vllm = Annotated[str | None, option(RUNS, "For modes vllm-...: python of an environment that has it", "PYTHON")]
Seconds = Annotated[float | None, option(RUNS, "Stop in time; the same command goes on", "N")]
Out = Annotated[str, option(OUTPUT, "Keep every measurement there, and write report.html, .md, .json and .png", "DIR")]


def run(
    out: Out,
    settings: Settings,
    suite: Suite = None,
    data: Data = None,
    inflate: Inflate = None,
    tasks: Tasks = None,
    prompts: Prompts = None,
    new_tokens: NewTokens = None,
    modes: Modes = None,
    repeats: Repeats = None,
    transformers: Transformers = False,
    vllm: Vllm = None,
    seconds: Seconds = None,
) -> None:
    """Time the modes on prompts, in turns; stopped at any time, the same command goes on."""
    start = time.monotonic()
    given = {"prompts": prompts, "new_tokens": new_tokens, "repeats": repeats}
    wanted = suite_named(suite).changed(**given, modes=None if modes is None else listed(modes))
    for name in given:
        refuse_outside(name, getattr(wanted, name), 1)
    refuse_unknown_limits(inflate, seconds)
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
        seconds=None if seconds is None else seconds - (time.monotonic() - start),
        names=shown_names(settings),
        profile=profile,
    )
    if measured.measured < measured.planned:
        kept = f"{measured.measured} of {measured.planned} measurements are in {Path(out) / FILE}"
        complain(f"{kept}: the same command goes on")
    elif measured.unscored:
        complain(f"{measured.unscored} answers are not scored in float32 yet: the same command goes on")
    show(measured, settings)


def refuse_unknown_limits(inflate: str | None, seconds: float | None) -> None:
    if seconds is not None:
        refuse_outside("seconds", seconds, 1)
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


def show(measured: SpeedReport, settings: Settings) -> None:
    from draftgraph.bench.speed_report import explanation_of, settings_of, tables, title_of

    if settings.json:
        write_json(measured.to_dict())
    elif measured.modes:
        lines = f"{explanation_of(measured)}\n{title_of(measured)}; {settings_of(measured)}"
        show_tables(tables(measured), lines, no_wrap=measured.label is None)
