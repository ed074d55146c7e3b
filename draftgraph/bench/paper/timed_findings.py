"""What was timed in the items of the study, answered in a sentence each."""

from __future__ import annotations

from functools import reduce
from operator import add
from pathlib import Path

from draftgraph.bench.paper.counts import Measured, measured
from draftgraph.bench.paper.finding import COUNTS, Finding, counts_row, speed_table
from draftgraph.bench.paper.items import (
    CHAINS,
    GRID,
    OUT_DEGREES,
    PAPER_POINT,
    PRUNING,
    TAUS,
    TEMPERATURES,
    grid_modes,
)
from draftgraph.bench.report import Table

PAPER_SPEED = "1.73x to 1.96x"
PAPER_MERGED = 0.30
NEAR = 0.97  # of the best speed: no worse, as far as one can tell


def main_table(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    graph_over_chain, auto_over_chain = (known.speed(mode) / known.speed(chain) for mode in ("graph", "auto"))
    answer = (
        f"Over plain decoding {chain} (SSD) is {known.shown(chain)}, the tree (TSD) {known.shown('tree')} and the "
        f"graph (GSD) {known.shown('graph')}; the graph is {graph_over_chain:.2f} times as fast as the best chain "
        f"(paper: GSD {PAPER_SPEED}), and auto is {known.shown('auto')}, {auto_over_chain:.2f} times the best chain."
    )
    return Finding(
        name,
        "Main table: how fast are standard (SSD), tree (TSD) and graph (GSD) speculative decoding?",
        answer,
        speed_table(known, (chain, "tree", "graph", "auto")),
        graph_over_chain > 1.0,
        {"gsd": known.speed("graph"), "gsd_over_ssd": graph_over_chain},
    )


def claims(name: str, known: Measured) -> Finding:
    graph, tree, auto = (known.modes[mode] for mode in ("graph", "tree", "auto"))
    saved = 1.0 - graph.drafted_per_token / tree.drafted_per_token
    undrafted = 1.0 - auto.accepted["draft"] / max(1, sum(auto.accepted.values()))
    answer = (
        f"{graph.merged:.1%} of the tokens that mode graph accepts come from merged nodes (paper: about "
        f"{PAPER_MERGED:.0%}); against the tree, which covers {tree.per_pass:.2f} tokens per pass where the graph "
        f"covers {graph.per_pass:.2f}, merging saves {saved:.1%} of the tokens that the draft is fed. In mode auto "
        f"{undrafted:.1%} of accepted tokens cost no drafting: {', '.join(shares_of(auto.accepted))}."
    )
    return Finding(
        name,
        "Claims: accepted tokens from merged nodes, and draft computation that merging saves",
        answer,
        agrees=graph.merged > PAPER_MERGED / 2,
        figures={"merged": graph.merged, "saved": saved},
    )


def shares_of(accepted: dict[str, int]) -> list[str]:
    total = max(1, sum(accepted.values()))
    return [f"{count / total:.1%} {source}" for source, count in accepted.items() if source != "draft"]


def experiment_1(name: str, known: Measured) -> Finding:
    small, single = known.modes["graph:k=2:tau=1"], known.modes["graph:k=1"]
    best = known.fastest([f"graph:k={k}" for k in OUT_DEGREES])
    rows = [counts_row(f"k={k}", known, f"graph:k={k}") for k in OUT_DEGREES]
    table = Table("By out-degree", COUNTS, [counts_row("k=2, tau=1", known, "graph:k=2:tau=1"), *rows])
    answer = (
        f"k=2, tau=1 gives {small.per_pass:.2f} tokens per pass for {small.drafted_per_token:.1f} draft tokens per "
        f"token; one hypothesis alone (k=1) gives {single.per_pass:.2f} for {single.drafted_per_token:.1f}. From k=1 "
        f"to k=8 tokens per pass rise from {single.per_pass:.2f} to {known.modes['graph:k=8'].per_pass:.2f} (k=4: "
        f"{known.modes['graph:k=4'].per_pass:.2f}), and {best} is the fastest."
    )
    return Finding(name, "Experiment 1: k=2, tau=1 against one hypothesis; k from 1 to 8", answer, table)


def experiment_2(name: str, known: Measured) -> Finding:
    shares = {tau: known.modes[f"graph:tau={tau}"].merged for tau in TAUS}
    question = "Experiment 2: does a higher tau merge more, or less?"
    rows = [counts_row(f"tau={tau}", known, f"graph:tau={tau}") for tau in TAUS]
    table = Table("By tau", COUNTS, rows)
    if not any(shares.values()):
        return Finding(name, question, "No accepted token came from a merged node, at any tau.", table)
    falls = shares[TAUS[0]] > shares[TAUS[-1]]
    by_tau = ", ".join(f"{share:.1%} at tau={tau}" for tau, share in shares.items())
    answer = (
        f"A higher tau merges {'less' if falls else 'more'}: of accepted tokens merged nodes give {by_tau}. That is "
        f"{'what the definition says' if falls else 'against the definition'}, by which a longer n-gram repeats more "
        f"rarely{'; the summary that says otherwise is wrong' if falls else ''}."
    )
    return Finding(name, question, answer, table, falls)


def experiment_3(name: str, known: Measured) -> Finding:
    none, both, leaves = (PRUNING[words] for words in ("none", "both", "both, siblings kept as leaves"))
    without, pruned = known.modes[none], known.modes[both]
    faster = known.speed(both) / known.speed(none)
    rows = [counts_row(words, known, mode) for words, mode in PRUNING.items()]
    answer = (
        f"Without pruning the draft is fed {without.drafted_per_token:.1f} tokens per token, with both kinds "
        f"{pruned.drafted_per_token:.1f}; tokens per pass go from {without.per_pass:.2f} to {pruned.per_pass:.2f}, and "
        f"speed changes by {faster:.2f} times. Kept as leaves, weak siblings make {known.modes[leaves].per_pass:.2f} "
        f"tokens per pass ({known.shown(leaves)} against {known.shown(both)})."
    )
    question = "Experiment 3: what does pruning save?"
    return Finding(name, question, answer, Table("By pruning", COUNTS, rows), faster > 1.0)


def check_1(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    answer = (
        f"On {' and '.join(known.tasks)} the graph is {known.shown('graph')}, the best chain {known.shown(chain)} and "
        f"auto {known.shown('auto')}; {known.modes['graph'].merged:.1%} of the graph's accepted tokens come from "
        "merged nodes."
    )
    question = "Check 1: text low in repetition (poetry, stories) against SSD"
    return Finding(name, question, answer, speed_table(known, (chain, "tree", "graph", "auto")))


def foreign(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    answer = (
        f"Answers in another language ({', '.join(known.tasks)}): graph {known.shown('graph')}, best chain "
        f"{known.shown(chain)}, auto {known.shown('auto')}; {known.modes['graph'].merged:.1%} merged."
    )
    table = speed_table(known, (chain, "tree", "graph", "auto"))
    return Finding(name, "Claim: output that is not English", answer, table)


def grid(name: str, known: Measured) -> Finding:
    modes = grid_modes()
    best = max(modes, key=lambda point: known.speed(modes[point]))
    near = known.speed(modes[PAPER_POINT]) > NEAR * known.speed(modes[best])
    rows = [counts_row(point_named(point), known, mode) for point, mode in modes.items()]
    answer = (
        f"Of {len(modes)} settings the fastest is {point_named(best)} with {known.shown(modes[best])}; the paper's "
        f"defaults have {known.shown(modes[PAPER_POINT])}, so they are {'near' if near else 'not'} the best here; "
        f"auto, which needs none, has {known.shown('auto')}. Output is {known.sameness} for all."
    )
    question = "Check 3: theta_prob x theta_sib x tau: are the paper's defaults the best?"
    return Finding(name, question, answer, Table("By setting", COUNTS, rows), near)


def point_named(point: tuple[float, float, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(GRID, point, strict=True))


def temperatures(name: str, folder: Path) -> Finding | None:
    known = {0.0: measured(folder / "main")}
    known |= {heat: measured(folder / f"temperature-{heat}") for heat in TEMPERATURES}
    there = {heat: one for heat, one in known.items() if one is not None}
    if len(there) < 2:
        return None
    modes, rows = ("tree", "graph", "auto"), []
    for heat, one in there.items():
        cells = [one.shown(mode) for mode in (one.fastest(CHAINS), *modes)]
        rows.append([str(heat) if heat else "greedy", *cells, f"{one.modes['graph'].merged:.1%}"])
    told = "; ".join(f"{row[0]}: graph {row[3]}, best chain {row[1]}, auto {row[4]}" for row in rows)
    written = reduce(add, (one.sameness for one in there.values()))
    answer = f"With keyed noise the same graph serves both; with and without drafting tokens are {written}. {told}."
    table = Table("By temperature", ["temperature", "best chain", *modes, "merged"], rows)
    return Finding(name, "Open question 2: greedy against sampling", answer, table)
