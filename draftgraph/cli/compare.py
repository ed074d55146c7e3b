"""`draftgraph compare`: plain decoding against a mode, on one prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from draftgraph.bench.sameness import first_difference
from draftgraph.cli.errors import FAILED, complain
from draftgraph.cli.generate import Prompt, show_figures
from draftgraph.cli.options import Settings, option, refuse_outside, shown_range
from draftgraph.cli.terminal import busy, console, load_pair, read_prompt, write_json
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.config import GraphConfig
    from draftgraph.pair import Output, Pair

WARM_UP_TOKENS = 8
Repeat = Annotated[int, option("Graph", "Timed runs of each mode, taken in turns", shown_range(1))]


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
    refuse_outside("repeat", repeat, 1)
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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"median of {len(plain.seconds)}")
    for timed in (plain, chosen):
        table.add_column(timed.config.mode, justify="right")
    table.add_row("tokens per second", *(f"{timed.tokens_per_second:.1f}" for timed in (plain, chosen)))
    table.add_row("tokens per pass", *(f"{timed.tokens_per_pass:.2f}" for timed in (plain, chosen)))
    table.add_row("seconds", *(f"{median(timed.seconds):.2f}" for timed in (plain, chosen)))
    return table
