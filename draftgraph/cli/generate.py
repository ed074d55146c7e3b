"""`draftgraph generate`: one prompt, one answer; `draftgraph compare`: the same, timed against plain decoding."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from draftgraph.bench.sameness import first_difference
from draftgraph.cli.errors import FAILED, complain
from draftgraph.cli.options import Settings, option
from draftgraph.cli.terminal import (
    busy,
    console,
    load_pair,
    plain_table,
    read_prompt,
    right,
    stderr_console,
    write,
    write_json,
)
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.config import GraphConfig
    from draftgraph.pair import Output, Pair
    from draftgraph.stats import Stats

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
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin")]
Repeat = Annotated[int, option("Graph", "Timed runs of each mode, taken in turns", least=1)]


def generate(prompt: Prompt, settings: Settings) -> None:
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


def compare(prompt: Prompt, settings: Settings, repeat: Repeat = 3) -> None:
    """Time a mode against plain decoding and check that the tokens are the same."""
    text = read_prompt(prompt)
    plain, chosen = Timed(settings.graph_config(mode="off")), Timed(settings.graph_config())
    if chosen.config.mode == "off":
        raise UsageError("compare runs mode off and another one: choose --mode auto, graph, tree or chain")
    sampling = settings.sampling_arguments()
    pair = load_pair(settings)
    from draftgraph.decoder import fresh_seed

    arguments = {"seed": fresh_seed()} | sampling
    decoding = pair.start(text, config=chosen.config, **arguments)  # refuses now what cannot be generated
    chosen.prices, cost = decoding.prices, decoding.pricing.at(0, decoding.stats)
    chosen.config = replace(chosen.config, cost=cost)  # not measured again between timed runs
    with busy("warming up") as show:
        for timed in (plain, chosen):
            short = min(WARM_UP_TOKENS, settings.max_new_tokens or WARM_UP_TOKENS)
            pair.generate(text, config=timed.config, **arguments | {"max_new_tokens": short})
        for turn in range(repeat):
            for timed in (plain, chosen):
                show(f"{timed.config.mode}, run {turn + 1} of {repeat}")
                timed.run(pair, text, arguments)
    report(pair, plain, chosen, settings)


def report(pair: Pair, plain: Timed, chosen: Timed, settings: Settings) -> None:
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
        }
        write_json(output.to_dict() | figures)
    else:
        verdict = f"the {len(output.token_ids)} tokens are the same" if differs is None else "the tokens DIFFER"
        terminal = console()
        terminal.print(comparison_table(plain, chosen))
        by = "" if chosen.prices is None else f" ({chosen.prices} prices)"
        terminal.print(f"\n{chosen.config.mode} is {ratio:.2f} times as fast as off{by}; {verdict}")
        if settings.stats:
            show_figures(output.stats, True)
    if differs is not None:
        hint = "" if str(pair.target.dtype) in ("torch.float32", "torch.float64") else ": --dtype float32 rounds alike"
        complain(f"the answers differ from token {differs + 1} on{hint}")
        raise typer.Exit(FAILED)


def comparison_table(plain: Timed, chosen: Timed) -> Table:
    table = plain_table(f"median of {len(plain.seconds)}", right(plain.config.mode), right(chosen.config.mode))
    table.add_row("tokens per second", *(f"{timed.tokens_per_second:.1f}" for timed in (plain, chosen)))
    table.add_row("tokens per pass", *(f"{timed.tokens_per_pass:.2f}" for timed in (plain, chosen)))
    table.add_row("seconds", *(f"{median(timed.seconds):.2f}" for timed in (plain, chosen)))
    return table
