"""Commands that answer one prompt: `generate`, `compare` with plain decoding, and `inspect`, the graphs behind it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

import typer
from rich.table import Table

from draftgraph.bench.sameness import first_difference
from draftgraph.cli.options import Settings
from draftgraph.cli.terminal import (
    FAILED,
    busy,
    complain,
    console,
    load_pair,
    plain_table,
    read_prompt,
    right,
    say_written,
    stderr_console,
    write,
    write_json,
)
from draftgraph.errors import DraftGraphError, UsageError

if TYPE_CHECKING:
    from draftgraph.bench.methods import Llama
    from draftgraph.config import GraphConfig
    from draftgraph.inspect import GraphReport
    from draftgraph.pair import Output, Pair
    from draftgraph.stats import Stats, Step

WARM_UP_TOKENS = 8
SOURCES = {
    "draft": "drafted by the model",
    "merged": "merged: drafted once, used on several paths",
    "copied": "copied from the text",
    "recycled": "recycled from earlier checks",
}
REASONS = {
    "k": "not among the draft's k best",
    "theta_prob": "draft too unsure to go on (theta-prob)",
    "theta_sib": "dropped beside a better sibling (theta-sib)",
    "budget": "past the budget, or not worth a place in it",
    "not drafted": "proposed by nobody",
}
PHASES = {
    "prefill": "reading the prompt",
    "draft": "drafting",
    "verify": "checking (target passes)",
    "other": "choosing and keeping tokens",
}
DRAFTERS = {
    None: "the draft of the default model",
    "mtp": "the MTP layer of the target's checkpoint",
    "self": "the target itself",
    "none": "no model, copies from the text only",
}
Format = Literal["json", "dot", "svg", "html"]


def generate(prompt: str, settings: Settings) -> None:
    """Answer a prompt: text on stdout as it comes."""
    text = read_prompt(prompt)
    config, sampling = settings.graph_config(), settings.sampling_arguments()
    pair = load_pair(settings)
    decoding = pair.start(text, config=config, **sampling)
    begun = False
    # a terminal that shows no text shows figures meanwhile
    with busy("reading the prompt", wanted=settings.json or not sys.stdout.isatty()) as show:
        try:
            for piece in pair.pieces(decoding):
                if not settings.json:
                    write(piece)
                    begun = True
                show(summary(decoding.stats))
        finally:
            if not settings.json and (begun or decoding.finish_reason):
                write("\n")
    if settings.json:
        write_json(pair.output(decoding).to_dict())
    show_figures(decoding.stats, settings.stats, decoding.prices)


def show_figures(stats: Stats, all_of_them: bool, prices: str | None = None) -> None:
    terminal = stderr_console()
    if all_of_them:
        terminal.print(figures_table(stats))
        if prices is not None:
            terminal.print(f"\nHow much to draft and check was decided by {prices} prices of passes")
    elif terminal.is_terminal:
        terminal.print(summary(stats), style="dim")


def summary(stats: Stats) -> str:
    """The speed of an answer.

    >>> summary(pair.generate("Why is the sky blue?").stats)    # doctest: +SKIP
    '96 tokens · 41.2 tok/s · 2.31 tokens per pass · 38% of accepted from text'
    """
    parts = [
        f"{stats.new_tokens} token{'s' * (stats.new_tokens != 1)}",
        f"{stats.tokens_per_second:.1f} tok/s",
        f"{stats.mean_accepted_length:.2f} tokens per pass",
    ]
    if stats.accepted:
        parts.append(f"{stats.accepted_by_source['copied'] / stats.accepted:.0%} of accepted from text")
    return " · ".join(parts)


def figures_table(stats: Stats) -> Table:
    """Where the tokens and the time of an answer came from, and why not more came at once."""
    figures = plain_table("Answer", right(""), right("", style="dim"))

    def section(title: str, rows: list[tuple[str, str, str]]) -> None:
        if rows:
            figures.add_section()
            figures.add_row(title, style="bold")
            for row in rows:
                figures.add_row(f"  {row[0]}", *row[1:])

    for name, value in (
        ("tokens", f"{stats.new_tokens}"),
        ("tokens per second", f"{stats.tokens_per_second:.1f}"),
        ("tokens per pass", f"{stats.mean_accepted_length:.2f}"),
        ("target passes", f"{stats.steps}"),
        ("nodes that the target checked", f"{stats.verified_tokens}"),
        ("tokens that the draft model read", f"{stats.draft_tokens}"),
        ("tokens of the prompt", f"{stats.prompt_tokens}"),
    ):
        figures.add_row(name, value, "")
    section("Accepted, by source", counted(stats.accepted_by_source, SOURCES))
    depths = {str(depth): count for depth, count in sorted(stats.accepted_by_depth.items())}
    names = {depth: f"at depth {depth} or deeper" for depth in depths}
    section("Accepted, by depth (share of passes)", counted(depths, names, stats.steps))
    section("Why no more was accepted: the target's token was", counted(stats.rejected_by, REASONS))
    total = sum(stats.seconds.values()) or 1.0
    times = [(PHASES[phase], f"{value:.2f} s", f"{value / total:.0%}") for phase, value in stats.seconds.items()]
    section("Time", times)
    return figures


def counted(counts: dict[str, int], names: dict[str, str], total: int = 0) -> list[tuple[str, str, str]]:
    total = total or sum(counts.values())
    return [(names.get(key, key), str(count), f"{count / total:.0%}") for key, count in counts.items() if count]


@dataclass
class Timed:
    """Runs of one mode. Speed is that of the whole answer, prefill included: a draft reads the prompt as well."""

    config: GraphConfig
    outputs: list[Output] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prices: str | None = None  # of passes, by which it decides how much to draft

    def run(self, pair: Pair, prompt: str, arguments: dict[str, Any]) -> None:
        start = time.perf_counter()
        output = pair.generate(prompt, config=self.config, **arguments)
        self.seconds.append(time.perf_counter() - start)
        self.outputs.append(output)

    @property
    def tokens_per_second(self) -> float:
        pairs = zip(self.outputs, self.seconds, strict=True)
        return median(len(output.token_ids) / seconds for output, seconds in pairs)

    @property
    def tokens_per_pass(self) -> float:
        return self.outputs[0].stats.mean_accepted_length


@dataclass
class TimedLlama:
    """llama.cpp on the same prompt. It computes with quantised numbers, so its tokens may be others, but as many."""

    peer: Llama
    library: str
    tokens: int
    seconds: list[float] = field(default_factory=list)

    def run(self, prompt: str) -> None:
        answer = self.peer.answer(prompt)
        self.seconds.append(answer.first_seconds + answer.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        shown = ("library", "tokens", "tokens_per_second", "seconds")
        return {name: getattr(self, name) for name in shown}


@contextmanager
def llama_beside(pair: Pair, prompt: str, arguments: dict[str, Any], gguf: Path | None) -> Iterator[TimedLlama | None]:
    """llama.cpp from this environment, started; None: it cannot be, and why is told."""
    from draftgraph.bench.methods import Exports, Llama, MethodFailed
    from draftgraph.bench.stopwatch import Stopwatch

    exports = Exports(pair, pair.target, Path(tempfile.gettempdir()), gguf)
    peer = Llama("llama", Stopwatch(pair, {}, arguments), exports, sys.executable)
    with closing(exports), closing(peer):
        try:
            started = TimedLlama(peer, peer.warm_up(prompt)["library"], arguments["max_new_tokens"])
        except MethodFailed as error:
            complain(f"llama.cpp is left out: {error}")
            started = None
        yield started


def compare(prompt: str, settings: Settings, repeat: int = 3, llama_cpp: bool | None = None) -> None:
    """Time a mode against plain decoding and check that the tokens are the same."""
    text = read_prompt(prompt)
    plain, chosen = Timed(settings.graph_config(mode="off")), Timed(settings.graph_config())
    if chosen.config.mode == "off":
        raise UsageError("compare runs mode off and another one: choose --mode auto, graph, tree or chain")
    sampling = settings.sampling_arguments()
    pair = load_pair(settings)
    from draftgraph.decoder import fresh_seed
    from draftgraph.models.fetch import own_file

    arguments = {"seed": fresh_seed()} | sampling
    decoding = pair.start(text, config=chosen.config, **arguments)  # refuses now what cannot be generated
    chosen.prices, cost = decoding.prices, decoding.pricing.at(0)
    chosen.config = replace(chosen.config, cost=cost)  # not measured again between timed runs
    gguf = own_file(settings.target)
    if llama_cpp is None:
        llama_cpp = find_spec("xllamacpp") is not None and gguf is not None and pair.target.device.type == "cpu"
    llama: TimedLlama | None = None
    with ExitStack() as stack, busy("warming up") as show:
        for timed in (plain, chosen):
            short = min(WARM_UP_TOKENS, settings.max_new_tokens or WARM_UP_TOKENS)
            pair.generate(text, config=timed.config, **arguments | {"max_new_tokens": short})
        for turn in range(repeat):
            for timed in (plain, chosen):
                show(f"{timed.config.mode}, run {turn + 1} of {repeat}")
                timed.run(pair, text, arguments)
            if llama_cpp and not turn:
                show("starting llama.cpp")
                length = dict.fromkeys(("min_new_tokens", "max_new_tokens"), len(plain.outputs[0].token_ids))
                llama = stack.enter_context(llama_beside(pair, text, arguments | length, gguf))
            if llama is not None:
                show(f"llama.cpp, run {turn + 1} of {repeat}")
                llama.run(text)
    report(pair, plain, chosen, llama, settings)


def report(pair: Pair, plain: Timed, chosen: Timed, llama: TimedLlama | None, settings: Settings) -> None:
    differs = first_difference([output.token_ids for output in plain.outputs + chosen.outputs])
    ratio = chosen.tokens_per_second / plain.tokens_per_second
    output = chosen.outputs[0]
    if settings.json:
        both = {"off": plain, chosen.config.mode: chosen}
        figures = {
            "mode": chosen.config.mode,
            "prices": chosen.prices,
            "same_tokens": differs is None,
            "first_difference": differs,
            "ratio": ratio,
            "tokens_per_second": {mode: timed.tokens_per_second for mode, timed in both.items()},
            "tokens_per_pass": {mode: timed.tokens_per_pass for mode, timed in both.items()},
            "seconds": {mode: timed.seconds for mode, timed in both.items()},
            "llama": None if llama is None else llama.to_dict(),
        }
        write_json(output.to_dict() | figures)
    else:
        verdict = f"the {len(output.token_ids)} tokens are the same" if differs is None else "the tokens DIFFER"
        terminal = console()
        terminal.print(comparison_table(plain, chosen, llama))
        by = "" if chosen.prices is None else f" ({chosen.prices} prices)"
        if llama is not None:
            by += f" and {chosen.tokens_per_second / llama.tokens_per_second:.2f} times as fast as llama.cpp"
        terminal.print(f"\n{chosen.config.mode} is {ratio:.2f} times as fast as off{by}; {verdict}", soft_wrap=True)
        if settings.stats:
            show_figures(output.stats, True)
    if differs is not None:
        hint = "" if str(pair.target.dtype) in ("torch.float32", "torch.float64") else ": --dtype float32 rounds alike"
        complain(f"the answers differ from token {differs + 1} on{hint}")
        raise typer.Exit(FAILED)


def comparison_table(plain: Timed, chosen: Timed, llama: TimedLlama | None) -> Table:
    ours: dict[str, Timed] = {timed.config.mode: timed for timed in (plain, chosen)}
    every: dict[str, Timed | TimedLlama] = {**ours, **({"llama.cpp": llama} if llama else {})}
    table = plain_table(f"median of {len(plain.seconds)}", *map(right, every))
    table.add_row("tokens per second", *(f"{timed.tokens_per_second:.1f}" for timed in every.values()))
    table.add_row("tokens per pass", *(f"{timed.tokens_per_pass:.2f}" for timed in ours.values()))
    table.add_row("seconds", *(f"{median(timed.seconds):.2f}" for timed in every.values()))
    return table


def inspect(
    prompt: str,
    settings: Settings,
    format: Format | None = None,
    out: str | None = None,
    step: int | None = None,
    steps: int = 8,
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
    from draftgraph.files import replacing

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
