"""`draftgraph bench report`: what was measured, shown again and written as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftgraph.bench.runs import FILE, read_records
from draftgraph.bench.speed_report import SpeedReport
from draftgraph.cli.bench_paper import show_study
from draftgraph.cli.bench_run import show
from draftgraph.cli.errors import complain
from draftgraph.cli.options import Settings, option
from draftgraph.cli.terminal import stderr_console, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.page import Part
    from draftgraph.bench.paper.findings import PaperReport

REPORT_OPTIONS = ("json", "config", "debug")
Folders = Annotated[list[str], typer.Argument(metavar="DIR...", help="What bench run or bench paper had as --out")]
Out = Annotated[str | None, option("Input and output", "Write one page of all that is named, and Markdown", "FILE")]


def report(folders: Folders, settings: Settings, out: Out = None) -> None:
    """Show what bench run and bench paper measured, and write their reports again; several as one page."""
    places = [Path(folder).expanduser() for folder in folders]
    if len(places) > 1 and out is None:
        raise UsageError("several folders make one page: name it, as in --out report.html")
    if out is not None and not out.endswith(".html"):
        raise UsageError(f"--out {out} must end in .html")
    found = [read(place) for place in places]
    for place, one in zip(places, found, strict=True):
        try:
            one.save(place)
        except OSError as error:
            complain(f"the report is not written to {place}: {error.strerror or error}")
    if out is not None:
        parts = [one.to_part().named(place.resolve().name) for place, one in zip(places, found, strict=True)]
        write_page(parts, "\n".join(one.to_markdown() for one in found), Path(out).expanduser())
    if settings.json:
        write_json([one.to_dict() for one in found] if len(found) > 1 else found[0].to_dict())
        return
    for one in found:
        if isinstance(one, SpeedReport):
            show(one, settings)
        else:
            show_study(one)


def read(folder: Path) -> SpeedReport | PaperReport:
    """Of a run, or of a study, which has a folder for every item."""
    if not (folder / FILE).exists() and any(folder.glob(f"*/{FILE}")):
        from draftgraph.bench.paper.findings import PaperReport

        if (study := PaperReport.of(folder)) is not None:
            return study
    return SpeedReport.of(read_records(folder))


def write_page(parts: list[Part], markdown: str, file: Path) -> None:
    from draftgraph.bench.page import page
    from draftgraph.models.cache import replacing

    documents = {file: page(parts), file.with_suffix(".md"): markdown}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for place, content in documents.items():
            with replacing(place) as partial:
                partial.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {file} cannot be written: {error.strerror or error}") from error
    stderr_console().print(f"wrote {file}", soft_wrap=True)
