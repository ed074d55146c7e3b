"""How big should a draft be? Sets what drafts of several sizes are worth against what they cost.

    draftgraph distill --layers 4 --out drafts/4 ...                      # for every size
    draftgraph bench draft drafts/4 --data FOLDER --out results/4 ...
    python benchmarks/draft_cost.py --layers 1,2,4,6 --json > cost.json
    python benchmarks/draft_sizes.py drafts/* --results results/* --cost cost.json --out docs/sizes

Writes draft_sizes.md, .svg and .png. A step of decoding drafts some levels and verifies them in one pass of the target:

    expected speedup = tokens per pass / (levels * cost of a level + cost of verifying)

with costs in one-token passes of the target. Tokens per pass are those of `bench draft`. Where its results say how
often each depth was accepted (`accepted_by_depth` of a structure), shorter chains and flatter trees are estimated by
cutting the longest; else only the measured ones are compared. The large target costs as much as a large model and says
what this one says.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEST_FIRST_NODES = 64
LEVEL = 8  # nodes of a level of the best-first tree: 64 nodes over 8 levels
LONGEST_CHAIN = 8
BIG_NAME = "7B-cost"
BIG_MS = {1: 4.73, 8: 5.00, 64: 5.58}  # 7B shape on the static engine, bf16 on an H200
MEAN = "mean"  # the row of a report over all tasks
STYLES = {"tree": ("#2f7d4f", "D"), "chain": ("#8a5aa8", "s")}  # colour and marker
TITLE = {"fontsize": "medium", "loc": "left"}


@dataclass(frozen=True)
class Structure:
    """What a draft grew, in the mean over the target's passes."""

    tokens_per_pass: float
    levels: float
    reached: list[float]  # share of passes that accepted so many tokens or more, from 1 on; empty if unknown

    def cut_to(self, levels: int) -> Structure:
        return Structure(1.0 + sum(self.reached[:levels]), levels, self.reached[:levels])


@dataclass(frozen=True)
class Draft:
    name: str
    layers: int
    weights: int
    agreement: float
    structures: dict[str, Structure]
    ms: dict[int, float]  # of a level, by its nodes

    def tokens_per_pass(self, structure: str) -> float | None:
        found = self.structures.get(structure)
        return found.tokens_per_pass if found else None


@dataclass(frozen=True)
class Target:
    name: str
    ms: dict[int, float]  # of a pass, by its nodes

    def cost_of_verifying(self, nodes: int) -> float:
        return at_width(self.ms, nodes) / self.ms[1]

    def cost_of_level(self, draft: Draft, nodes: int) -> float:
        return at_width(draft.ms, nodes) / self.ms[1]


@dataclass(frozen=True)
class Choice:
    """A depth to draft to, and what it would give."""

    levels: float
    speedup: float


def at_width(ms: dict[int, float], nodes: int) -> float:
    """Passes come in a few widths: the time of the next one up; endless where none is known."""
    return min(((width, time) for width, time in ms.items() if width >= nodes), default=(nodes, math.inf))[1]


def chains(draft: Draft) -> Iterator[tuple[int, Structure]]:
    """Chains by length: measured, or cut from the longest."""
    measured = {int(name.removeprefix("chain-")): one for name, one in numbered(draft, "chain")}
    longest = measured[max(measured)] if measured else None
    for length in range(1, LONGEST_CHAIN + 1):
        if length in measured:
            yield length, measured[length]
        elif longest is not None and length <= len(longest.reached):
            yield length, longest.cut_to(length)


def numbered(draft: Draft, kind: str) -> list[tuple[str, Structure]]:
    return [(name, one) for name, one in draft.structures.items() if re.fullmatch(rf"{kind}-\d+", name)]


def best_chain(draft: Draft, target: Target) -> Choice | None:
    level = target.cost_of_level(draft, 1)
    choices = [
        Choice(length, one.tokens_per_pass / (one.levels * level + target.cost_of_verifying(length + 1)))
        for length, one in chains(draft)
    ]
    return fastest(choices)


def best_tree(draft: Draft, target: Target) -> Choice | None:
    """Of the best-first tree as measured and cut after fewer levels; nodes so saved are not spent elsewhere."""
    measured = draft.structures.get(f"tree-{BEST_FIRST_NODES}")
    if measured is None:
        return None
    level, verify = target.cost_of_level(draft, LEVEL), target.cost_of_verifying(BEST_FIRST_NODES)
    shorter = [measured.cut_to(levels) for levels in range(1, len(measured.reached) + 1) if levels < measured.levels]
    choices = [Choice(one.levels, one.tokens_per_pass / (one.levels * level + verify)) for one in (measured, *shorter)]
    return fastest(choices)


def fastest(choices: list[Choice]) -> Choice | None:
    """None where no cost is known."""
    return max((one for one in choices if one.speedup > 0), key=lambda choice: choice.speedup, default=None)


def read_draft(folder: Path, results: Path, cost: dict[str, Any], temperature: float, selection: str) -> Draft:
    layers = json.loads((folder / "training.json").read_text())["recipe"]["layers"]
    file = results / "results.json" if results.is_dir() else results
    rows = json.loads(file.read_text())["rows"]
    wanted = (MEAN, temperature, selection)
    found = [row for row in rows if (row["task"], row["temperature"], row["selection"]) == wanted]
    if not found:
        raise SystemExit(f"{file} has no answers at temperature {temperature:g} ({selection}): measure it there")
    name = folder.resolve().name
    priced = {draft["name"]: draft for draft in cost["drafts"] if draft["layers"] == layers}
    if not priced:
        raise SystemExit(f"the costs have no draft of {layers} layers: run draft_cost.py --layers {layers}")
    own = priced.get(name) or next(iter(priced.values()))
    structures = {name: structure_of(figures) for name, figures in found[0]["structures"].items()}
    return Draft(name, layers, own["weights"], found[0]["agreement"], structures, widths(own["ms"]))


def structure_of(figures: dict[str, Any]) -> Structure:
    """Counts of accepted depths become shares of passes: all accepted tokens but the target's own are among them."""
    tokens = figures["tokens_per_pass"]
    counts = figures.get("accepted_by_depth") or {}
    by_depth = [counts[depth] for depth in sorted(counts, key=int)] if isinstance(counts, dict) else counts
    total = sum(by_depth)
    return Structure(tokens, figures["draft_levels"], [(tokens - 1) * count / total for count in by_depth if total])


def widths(ms: dict[str, float]) -> dict[int, float]:
    return {int(nodes): time for nodes, time in ms.items()}


def read_costs(file: Path, way: str | None) -> dict[str, Any]:
    """One way of running passes, or of each pass the fastest."""
    comparisons = json.loads(file.read_text())["comparisons"]
    chosen = [one for one in comparisons if way in (None, one["way"])]
    if not chosen:
        raise SystemExit(f"{file} has no way {way!r}: choose of {', '.join(one['way'] for one in comparisons)}")

    def least(costs: list[dict[str, Any]]) -> dict[str, Any]:
        return costs[0] | {"ms": {nodes: min(cost["ms"][nodes] for cost in costs) for nodes in costs[0]["ms"]}}

    drafts = zip(*(one["drafts"] for one in chosen), strict=True)
    if not all({"1", str(LEVEL)} <= set(one["target"]["ms"]) for one in chosen):
        raise SystemExit(f"{file} lacks passes over 1 and {LEVEL} nodes: run draft_cost.py without --nodes")
    return {
        "target": least([one["target"] for one in chosen]),
        "drafts": [least(list(costs)) for costs in drafts],
    }


def table(drafts: list[Draft], targets: list[Target]) -> str:
    tree = f"tree-{BEST_FIRST_NODES}"
    header = ["layers", "own weights", "agreement", f"chain of {LONGEST_CHAIN}", f"tree of {BEST_FIRST_NODES}"]
    header += [f"level, {target.name}" for target in targets]
    header += [f"{target.name}, {kind}" for target in targets for kind in ("chain", "tree")]
    lines = [header, ["---:"] * len(header)]
    for draft in drafts:
        lengths = (draft.tokens_per_pass(name) for name in (f"chain-{LONGEST_CHAIN}", tree))
        choices = (pick(draft, target) for target in targets for pick in (best_chain, best_tree))
        lines.append(
            [
                label_of(draft, drafts),
                f"{draft.weights / 1e6:.1f}M",
                f"{draft.agreement:.3f}",
                *("" if length is None else f"{length:.2f}" for length in lengths),
                *(f"{target.cost_of_level(draft, LEVEL):.3f}" for target in targets),
                *("" if one is None else f"{one.speedup:.2f} ({one.levels:.2g})" for one in choices),
            ]
        )
    explanation = (
        f"Agreement: share of places where the target's token is the draft's best. Chain of {LONGEST_CHAIN}, tree of "
        f"{BEST_FIRST_NODES}: tokens per pass of the target, the bonus token included; the tree is grown best first. "
        f"Level: what a draft pass over {LEVEL} nodes costs, in one-token passes of the target. Last columns: expected "
        "speedup over plain decoding with the best number of levels, in brackets: tokens per pass / (levels * cost of "
        "a level + cost of verifying)."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{explanation}\n"


def label_of(draft: Draft, drafts: list[Draft]) -> str:
    alone = sum(other.layers == draft.layers for other in drafts) == 1
    return f"{draft.layers}" if alone else f"{draft.layers} ({draft.name})"


def on_frontier(points: list[tuple[float, float]]) -> list[bool]:
    """Of (cost, worth): whether no other point costs as little or less and is worth more."""
    return [not any(x <= cost and y > worth for x, y in points) for cost, worth in points]


def plot(drafts: list[Draft], targets: list[Target]) -> Any:
    """Worth against cost on the left; on the right the speedup for each of the two targets."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4"}):
        figure = Figure(figsize=(12, 6), layout="constrained", facecolor="white")
        (upper_left, upper_right), (lower_left, lower_right) = figure.subplots(2, 2, sharex="col")
    draw_worth(upper_left, lower_left, drafts, targets[0])
    small, big = targets
    upper_right.sharey(lower_right)
    draw_speedups(upper_right, drafts, big)
    draw_speedups(lower_right, drafts, small)
    upper_right.set_title("Expected speedup over plain decoding (numbers: levels drafted)", **TITLE)
    lower_right.set_xlabel("layers of the draft")
    lower_right.set_ylim(bottom=min(0.8, lower_right.get_ylim()[0]))
    return figure


def draw_worth(upper: Any, lower: Any, drafts: list[Draft], target: Target) -> None:
    """What drafts are worth against what a level of theirs costs; points off the frontier are hollow."""
    costs = [target.cost_of_level(draft, LEVEL) for draft in drafts]
    labels = [label_of(draft, drafts) for draft in drafts]
    draw_frontier(upper, costs, [draft.agreement for draft in drafts], labels, "#333333", "o")
    for kind, size, name in (("tree", BEST_FIRST_NODES, "best-first tree"), ("chain", LONGEST_CHAIN, "chain")):
        lengths = [draft.tokens_per_pass(f"{kind}-{size}") for draft in drafts]
        known = [index for index, length in enumerate(lengths) if length is not None]
        if known:
            picked = ([values[index] for index in known] for values in (costs, lengths, labels))
            draw_frontier(lower, *picked, *STYLES[kind], f"{name} of {size}")
    upper.set_title("Worth of a draft against its cost (numbers: its layers)", **TITLE)
    upper.set_ylabel("agreement")
    lower.set_ylabel("tokens per pass")
    lower.set_xlabel(f"cost of a level of {LEVEL} nodes, in one-token passes of the {target.name} target")
    lower.set_xlim(0, max(costs) * 1.1)
    lower.legend(loc="best", framealpha=1.0, fontsize="small")
    for axes in (upper, lower):
        axes.margins(y=0.22)


def draw_frontier(
    axes: Any, costs: list[float], worth: list[float], labels: list[str], colour: str, marker: str, name: str = ""
) -> None:
    kept = on_frontier(list(zip(costs, worth, strict=True)))
    line = sorted((x, y) for x, y, keep in zip(costs, worth, kept, strict=True) if keep)
    axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.2, marker=marker, label=name or None, zorder=3)
    for x, y, label, keep in zip(costs, worth, labels, kept, strict=True):
        if not keep:
            axes.plot(x, y, marker, color=colour, markerfacecolor="white", zorder=3)
        note(axes, label, (x, y), xytext=(0, 7), ha="center")


def draw_speedups(axes: Any, drafts: list[Draft], target: Target) -> None:
    """Over the layers of drafts; at each point its levels."""
    for pick, kind, above in ((best_tree, "tree", True), (best_chain, "chain", False)):
        found = [(draft.layers, choice) for draft in drafts if (choice := pick(draft, target)) is not None]
        if not found:
            continue
        colour, marker = STYLES[kind]
        axes.plot(*zip(*((layers, choice.speedup) for layers, choice in found), strict=True), marker, color=colour)
        axes.lines[-1].set(linestyle="solid", linewidth=1.2, zorder=3)
        for layers, choice in found:
            placed = {"ha": "center", "va": "bottom" if above else "top", "xytext": (0, 6 if above else -6)}
            note(axes, f"{choice.levels:.0f}", (layers, choice.speedup), color="black", **placed)
        note(axes, kind, (found[-1][0], found[-1][1].speedup), xytext=(9, 0), color=colour, va="center")
    axes.axhline(1.0, color="#666666", linewidth=1, linestyle="dotted")
    corner = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top", "xytext": (-4, -3)}
    note(axes, "plain decoding", (1.0, 1.0), color="#666666", **corner)
    axes.set_ylabel(f"{target.name} target, times as fast")
    axes.set_xticks(sorted({draft.layers for draft in drafts}))
    axes.margins(x=0.1, y=0.18)


def note(axes: Any, text: str, place: tuple[float, float], **options: Any) -> None:
    axes.annotate(text, place, textcoords="offset points", fontsize="small", **options)


def save(drafts: list[Draft], targets: list[Target], folder: Path) -> str:
    """Writes the table and the picture; gives the table."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    text = table(drafts, targets)
    (folder / "draft_sizes.md").write_text(text, encoding="utf-8")
    figure = plot(drafts, targets)
    figure.savefig(folder / "draft_sizes.png", dpi=150)
    with rc_context({"svg.hashsalt": "draft_sizes"}):
        figure.savefig(folder / "draft_sizes.svg", metadata={"Date": None})
    return text


def verify_ms(text: str) -> dict[int, float]:
    """Milliseconds by nodes, as in 8:5.00,64:5.58; a number alone is that of the whole tree."""
    parts = (part.rpartition(":") for part in text.split(","))
    return {int(nodes or BEST_FIRST_NODES): float(time) for nodes, _, time in parts}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", type=Path, nargs="+", help="folders that `draftgraph distill` wrote")
    parser.add_argument(
        "--results", type=Path, nargs="+", help="of `draftgraph bench draft --out`, in the same order; default: drafts"
    )
    parser.add_argument("--cost", type=Path, required=True, help="JSON of draft_cost.py")
    parser.add_argument("--way", help="of running passes: captured, ...; left out: of each pass the fastest")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--without-loops", action="store_true", help="leave looping answers out")
    parser.add_argument("--big-name", default=BIG_NAME)
    parser.add_argument("--big-target-ms", type=float, default=BIG_MS[1], help="a one-token pass of the large target")
    parser.add_argument(
        "--big-verify-ms",
        type=verify_ms,
        default={nodes: time for nodes, time in BIG_MS.items() if nodes > 1},
        metavar="NODES:MS,...",
        help="wider passes of it; default 8:5.00,64:5.58",
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args(arguments)
    results = options.results or options.drafts
    if len(results) != len(options.drafts):
        parser.error(f"{len(options.drafts)} drafts need as many --results, not {len(results)}")
    cost = read_costs(options.cost, options.way)
    selection = "without loops" if options.without_loops else "all"
    drafts = [
        read_draft(folder, found, cost, options.temperature, selection)
        for folder, found in zip(options.drafts, results, strict=True)
    ]
    measured = Target(f"{cost['target']['weights'] / 1e6:.0f}M", widths(cost["target"]["ms"]))
    big = Target(options.big_name, {1: options.big_target_ms, **options.big_verify_ms})
    print(save(sorted(drafts, key=lambda draft: draft.layers), [measured, big], options.out))


if __name__ == "__main__":
    main()
