"""`draftgraph bench paper`: the paper's study on a pair of one's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from draftgraph.bench.paper.items import FOREIGN, MAIN, SIZES, UNLIKE, refuse_draft_names
from draftgraph.bench.tasks import OWN, read_tasks
from draftgraph.cli.bench_run import RUNS, Data, Inflate, Out, Seconds, refuse_unknown_limits, shown_name, shown_names
from draftgraph.cli.errors import complain
from draftgraph.cli.options import Settings, option
from draftgraph.cli.terminal import busy, console, load_pair, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.paper.findings import PaperReport

PAPER_OPTIONS = ("target", "draft", "device", "dtype", "seed", "json", "config", "debug")
SizeName = Annotated[str, option(RUNS, "How much is measured: small for a CPU", "|".join(SIZES), [*SIZES])]
AlsoDraft = Annotated[
    list[str] | None, option("Model", "Another draft, to compare by size; may be given again", "MODEL")
]


def paper(
    out: Out,
    settings: Settings,
    data: Data = None,
    size: SizeName = "full",
    inflate: Inflate = None,
    also_draft: AlsoDraft = None,
    seconds: Seconds = None,
) -> None:
    """Repeat the paper's experiments on a pair; stopped at any time, the same command goes on."""
    start = time.monotonic()
    if size not in SIZES:
        raise UsageError(f"there is no size {size}: choose of {', '.join(SIZES)}")
    refuse_unknown_limits(inflate, seconds)
    others = by_name(also_draft or [])
    tasks = {name: found for name, found in read_tasks(data or [OWN]).items() if name in (*MAIN, *UNLIKE, *FOREIGN)}
    pair = load_pair(settings)
    with busy("starting"):
        from draftgraph.bench.paper.findings import PaperReport
        from draftgraph.bench.paper.study import bench_paper
        from draftgraph.pair import load
    done = bench_paper(
        pair,
        tasks,
        Path(out),
        drafts={
            name: load(pair.target, model, **settings.given("device", "dtype")).draft for name, model in others.items()
        },
        size=SIZES[size],
        inflate=inflate,
        seed=settings.seed or 0,
        seconds=None if seconds is None else seconds - (time.monotonic() - start),
        names=shown_names(settings),
    )
    if not done:
        complain(f"the study in {out} is not complete: the same command goes on")
    report = PaperReport.of(Path(out).expanduser())
    if report is None:
        return
    report.save(Path(out).expanduser())
    if settings.json:
        write_json(report.to_dict())
        return
    show_study(report)


def show_study(report: PaperReport) -> None:
    for one in report.findings:
        console().print(one.question, style="bold", soft_wrap=True)
        console().print(f"{one.answer}\n", soft_wrap=True)


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
