"""What `draftgraph tune` found: latencies of a pair, and what `auto` does with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftgraph.bench.reporting import COLOURS, LINES, by_powers_of_two, new_figure, save_figure, write_files
from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.budget import DraftBudget, nodes_worth_checking
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost
from draftgraph.graph import Floats, Ints, Source, TokenGraph
from draftgraph.proposers.growth import Growing, grow_together, growing

if TYPE_CHECKING:
    from draftgraph.decoder import GraphDecoder


HITS = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Choice:
    """The expected outcome of one step."""

    hit: float  # how often the draft's best token is the target's
    levels: int
    nodes: int  # that the target checks, the root counted
    tokens: float
    ratio: float  # against plain decoding, in tokens per second


class SureProposer:
    """A draft whose best token is right with one probability everywhere, and so is the next best of the rest."""

    source: Source = "draft"
    free = False

    def __init__(self, hit: float, k: int) -> None:
        self.levels = 0
        self._chances = hit * (1.0 - hit) ** np.arange(k)
        self._token = 0

    def begin(self, text: list[int]) -> None: ...

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Growing[tuple[Ints, Floats]]:
        """Children with tokens that occur nowhere else."""
        shape = (len(frontier), len(self._chances))
        tokens = self._token + 1 + np.arange(shape[0] * shape[1]).reshape(shape)
        self._token = int(tokens.max())
        self.levels += 1
        return tokens, np.broadcast_to(self._chances, shape)
        yield  # a generator, as a draft's that makes passes


def choice(cost: CostModel, hit: float, config: GraphConfig) -> Choice:
    """What a step of `auto` would be, with nothing to copy."""
    graph, proposer = TokenGraph(0, config), SureProposer(hit, config.k)
    budget = DraftBudget(cost, graph.max_depth, hit, graph.max_nodes)
    tree = grow_together([growing(graph, [proposer], cost.floor(), budget)], lambda segments: [])[0]
    nodes = nodes_worth_checking(tree, cost, budget.spent)
    tokens = float(tree.scores[:nodes].sum())
    price = budget.spent + float(cost.of_pass(np.array([nodes]))[0])
    return Choice(hit, proposer.levels, nodes, tokens, tokens / price * float(cost.of_pass(np.array([1]))[0]))


@dataclass(frozen=True)
class TuneReport:
    """Latencies of a pair, and what `auto` makes of them."""

    target: str
    draft: str | None
    settings: dict[str, Any]  # device, number format, threads
    latencies: Latencies
    choices: list[Choice]  # behind the shortest text, with nothing to copy
    file: str | None  # where later starts find them; None: nowhere
    used: bool  # False: the model is too small for `auto` to go by them

    @property
    def curves(self) -> dict[str, Curve]:
        named = {"target": self.latencies.target, "draft": self.latencies.draft}
        return {name: curve for name, curve in named.items() if curve is not None}

    def in_passes(self, curve: Curve, context: int, nodes: int) -> float:
        """A pass in passes of the target over one token, behind the same text."""
        return curve.measured(context, nodes) / self.latencies.target.measured(context, 1)

    def to_dict(self) -> dict[str, Any]:
        passes = [
            {
                "model": name,
                "context": context,
                "nodes": nodes,
                "ms": 1000 * curve.measured(context, nodes),
                "one_token_passes": self.in_passes(curve, context, nodes),
            }
            for name, curve in self.curves.items()
            for context in curve.contexts
            for nodes in curve.nodes
        ]
        head = {"target": self.target, "draft": self.draft} | self.settings | {"seconds": self.latencies.took}
        chosen = [asdict(one) for one in self.choices]
        return head | {"file": self.file, "used": self.used, "passes": passes, "choices": chosen}

    def save(self, folder: Path) -> None:
        """Writes latency.json, latency.svg and latency.png."""
        write_files(folder, {"latency.json": self.to_dict()})
        save_figure(drawn(self), folder, "latency")


def tune(decoder: GraphDecoder, config: GraphConfig, target: str, draft: str | None) -> TuneReport:
    """Measures now, whatever is known, and keeps the result for later starts."""
    from draftgraph.cost.prices import SMALLEST, file_of, measured_pricing

    pricing = measured_pricing(decoder.cost_key(decoder.engines))
    latencies = pricing.renew(lambda: decoder.measure(config, decoder.engines))
    cost, file = MeasuredCost(latencies), file_of(pricing.key)
    choices = [choice(cost, hit, config) for hit in HITS] if latencies.draft is not None else []
    settings = {
        "device": pricing.key["device"],
        "dtype": pricing.key["target"]["dtype"].removeprefix("torch."),
        "threads": pricing.key["threads"],
        "engine": pricing.key["target"]["engine"],
    }
    kept, used = str(file) if file.exists() else None, decoder.target_weights >= SMALLEST
    return TuneReport(target, draft, settings, latencies, choices, kept, used)


def drawn(report: TuneReport) -> Any:
    """Milliseconds by nodes, and what `auto` gains with them."""
    names = report.target if report.draft is None else f"{report.target} with {report.draft}"
    figure = new_figure(f"{names}: {report.settings['device']}, {report.settings['dtype']}", 11, 4.6)
    axes, *right = figure.subplots(1, 2 if report.choices else 1, squeeze=False)[0]
    for (name, curve), colour in zip(report.curves.items(), COLOURS, strict=False):
        for context, row, line in zip(curve.contexts, curve.seconds, LINES, strict=False):
            style = {"marker": "o", "linestyle": line, "color": colour}
            axes.plot(curve.nodes, [1000 * seconds for seconds in row], label=f"{name}, text of {context}", **style)
    axes.set(xlabel="nodes of a pass", ylabel="milliseconds", title="How long a pass takes")
    by_powers_of_two(axes)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    if report.choices:
        draw_choices(right[0], report)
    return figure


def draw_choices(axes: Any, report: TuneReport) -> None:
    places = range(len(report.choices))
    axes.bar(places, [one.ratio for one in report.choices], color=COLOURS[2])
    for place, one in enumerate(report.choices):
        axes.annotate(f"levels {one.levels}\nnodes {one.nodes}", (place, one.ratio), ha="center", va="bottom")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"{one.hit:g}" for one in report.choices])
    axes.set(xlabel="how often the draft's best token is right", ylabel="times as fast as off")
    axes.set_title("What auto would do, and what it expects", fontsize="medium")
    axes.set_ylim(top=1.2 * max(one.ratio for one in report.choices))
