"""`draftgraph inspect`: the graphs behind an answer, in the terminal or as a file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from draftgraph.cli.errors import complain
from draftgraph.cli.generate import Prompt, show_figures
from draftgraph.cli.options import Settings, option
from draftgraph.cli.terminal import busy, console, load_pair, read_prompt, say_written, stderr_console, write
from draftgraph.errors import DraftGraphError, UsageError

if TYPE_CHECKING:
    from draftgraph.inspect import GraphReport
    from draftgraph.pair import Output
    from draftgraph.trace import Step

INSPECT_DEFAULTS: dict[str, Any] = {"mode": "graph"}  # the paper's graphs are small
DRAFTERS = {
    None: "the draft of the default model",
    "self": "the target itself",
    "none": "no model, copies from the text only",
}

PANEL = "Steps and files"
Format = Literal["json", "dot", "svg", "html"]


def inspect(
    prompt: Prompt,
    settings: Settings,
    format: Annotated[
        Format | None, option(PANEL, "Left out: as --out ends, or for the terminal", "json|dot|svg|html")
    ] = None,
    out: Annotated[str | None, option(PANEL, "Write to a file", "FILE")] = None,
    step: Annotated[int | None, option(PANEL, "Show this step only, 1 being the first", least=1)] = None,
    steps: Annotated[int, option(PANEL, "Stop after so many steps", least=1)] = 8,
) -> None:
    """Show what was drafted, merged, copied, checked and accepted in every step of an answer."""
    text = read_prompt(prompt)
    config, sampling = settings.graph_config(), settings.sampling_arguments()
    if config.mode == "off":
        raise UsageError("mode off drafts nothing to look at: choose --mode graph, auto, tree or chain")
    kind = chosen_format("json" if settings.json and format is None else format, out)
    if out is not None:
        refuse_unwritable(Path(out))
    if settings.draft is None and settings.target is not None:
        settings = replace(settings, draft="self")  # needs no second model
    drafter = DRAFTERS.get(settings.draft) or str(settings.draft)
    stderr_console().print(f"mode {config.mode}, drafted by {drafter}", style="dim")
    pair = load_pair(settings)
    from draftgraph.inspect import GraphReport

    seen: list[Step] = []
    with busy("reading the prompt") as show:
        decoding = pair.start(text, config=config, **sampling)
        for taken in decoding.steps():
            seen.append(taken)
            show(f"step {len(seen)}")
            if len(seen) == (step or steps):
                break
    output = pair.output(decoding)
    facts = {"target": settings.target or "the default model", "draft": drafter}
    report = GraphReport.of(seen, pair.tokenizer.decode, text, config, facts)
    if step is not None and step > len(seen):
        raise UsageError(f"--step must be between 1 and {len(seen)}, the answer's last step, not {step}")
    present(report, output, kind, out, None if step is None else step - 1)
    show_figures(output.stats, settings.stats)


def chosen_format(format: Format | None, out: str | None) -> Format | None:
    """None: for the terminal."""
    if format is not None or out is None:
        return format
    suffix = Path(out).suffix.removeprefix(".").lower()
    if suffix not in get_args(Format):
        raise UsageError(
            f"--out {out} does not say which format: end it in .html, .svg, .dot or .json, or give --format"
        )
    return suffix  # type: ignore[return-value]


def present(report: GraphReport, output: Output, kind: Format | None, out: str | None, step: int | None) -> None:
    if kind is None:
        report.print(console(), step)
        return
    document = rendered(report, output, kind, step)
    if out is None:
        write(document.removesuffix("\n") + "\n")
        return
    from draftgraph.models.cache import replacing

    try:
        with replacing(Path(out)) as partial:
            partial.write_text(document, encoding="utf-8")
    except OSError as error:
        raise DraftGraphError(f"cannot write {out}: {error.strerror or error}") from error
    say_written(out)


def rendered(report: GraphReport, output: Output, kind: Format, step: int | None) -> str:
    if kind == "dot":
        return report.to_dot(step)
    if kind == "svg":
        return report.to_svg(fullest_step(report) if step is None else step)
    part = report if step is None else replace(report, steps=[report.step(step)])
    if kind == "html":
        return part.to_html()
    return json.dumps(json.loads(part.to_json()) | output.to_dict(), ensure_ascii=False)


def fullest_step(report: GraphReport) -> int:
    """The step that accepted the most: a picture shows one."""
    accepted = [len(step.path) for step in report.steps]
    fullest = accepted.index(max(accepted))
    if len(accepted) > 1:
        complain(f"an SVG shows one step: this is {fullest + 1} of {len(accepted)}, --step chooses another")
    return fullest


def refuse_unwritable(path: Path) -> None:
    """Before any work: a file that could not be written at the end."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"--out {path}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--out {path} cannot be written: name another file")
