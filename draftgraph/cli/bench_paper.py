"""`draftgraph bench paper`: the paper's study on a pair of one's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from draftgraph.bench.paper.items import FOREIGN, MAIN, UNLIKE
from draftgraph.bench.tasks import OWN, read_tasks
from draftgraph.cli.bench_run import RUNS, Data, Inflate, Out, Seconds, refuse_unknown_limits, shown_names
from draftgraph.cli.errors import complain
from draftgraph.cli.options import Settings, option
from draftgraph.cli.terminal import busy, console, load_pair, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.paper.report import PaperReport

PAPER_OPTIONS = ("target", "draft", "device", "dtype", "seed", "json", "config", "debug")
SIZES = ["small", "full"]
SizeName = Annotated[str, option(RUNS, "How much is measured: small for a CPU", "|".join(SIZES), SIZES)]


def paper(
    out: Out,
    settings: Settings,
    data: Data = None,
    size: SizeName = "full",
    inflate: Inflate = None,
    seconds: Seconds = None,
) -> None:
    """Repeat the paper's experiments on a pair; stopped at any time, the same command goes on."""
    start = time.monotonic()
    if size not in SIZES:
        raise UsageError(f"there is no size {size}: choose of {', '.join(SIZES)}")
    refuse_unknown_limits(inflate, seconds)
    tasks = {name: found for name, found in read_tasks(data or [OWN]).items() if name in (*MAIN, *UNLIKE, *FOREIGN)}
    pair = load_pair(settings)
    with busy("starting"):
        from draftgraph.bench.paper.report import PaperReport
        from draftgraph.bench.paper.study import SIZES as sizes
        from draftgraph.bench.paper.study import bench_paper
    done = bench_paper(
        pair,
        tasks,
        Path(out),
        size=sizes[size],
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
        console().print(f"[bold]{one.question}[/bold]\n{one.answer}\n", soft_wrap=True)
