"""Every item of the study, answered in a sentence with its figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from draftgraph.bench.paper.counts import Measured, measured
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
from draftgraph.bench.paper.study import probed
from draftgraph.bench.report import Table
from draftgraph.bench.runs import Record

PAPER_SPEED = "1.73x to 1.96x"
PAPER_MERGED = 0.30


@dataclass(frozen=True)
class Finding:
    """An item of the paper, what was found, and the table behind it."""

    name: str
    question: str
    answer: str
    table: Table | None = None
    agrees: bool | None = None  # with the paper; None: it says nothing of this
    figures: dict[str, float] = field(default_factory=dict)


def findings(folder: Path) -> list[Finding]:
    """Of all that has been measured so far."""
    found: list[Finding] = []
    for name, item, finding in TIMED:
        if (known := measured(folder / item)) is not None:
            found.append(finding(name, known))
    return found + list(probe_findings(folder))


def main_table(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    table = speed_table(known, (chain, "tree", "graph", "auto"))
    plain, over_chain = known.speed("graph"), known.speed("graph") / known.speed(chain)
    answer = (
        f"Over plain decoding {chain} (SSD) is {known.speed(chain):.2f}x, the tree (TSD) "
        f"{known.speed('tree'):.2f}x and "
        f"the graph (GSD) {plain:.2f}x; the graph is {over_chain:.2f} times as fast as the best chain (paper: GSD "
        f"{PAPER_SPEED}), and auto is {known.speed('auto'):.2f}x, "
        f"{known.speed('auto') / known.speed(chain):.2f} times "
        "the best chain."
    )
    question = "Main table: how fast are standard (SSD), tree (TSD) and graph (GSD) speculative decoding?"
    return Finding(name, question, answer, table, over_chain > 1.0, {"gsd": plain, "gsd_over_ssd": over_chain})


def experiment_1(name: str, known: Measured) -> Finding:
    small, wide = known.modes["graph:k=2:tau=1"], known.modes["graph:k=4"]
    single = known.modes["graph:k=1"]
    best = known.fastest([f"graph:k={k}" for k in OUT_DEGREES])
    rows = [counts_row(f"k={k}", known, f"graph:k={k}") for k in OUT_DEGREES]
    answer = (
        f"k=2, tau=1 gives {small.per_pass:.2f} tokens per pass for {small.drafted_per_token:.1f} draft tokens "
        "per token; "
        f"one hypothesis alone (k=1) gives {single.per_pass:.2f} for {single.drafted_per_token:.1f}. From k=1 "
        "to k=8 tokens "
        f"per pass rise from {single.per_pass:.2f} to {known.modes['graph:k=8'].per_pass:.2f} (k=4: "
        f"{wide.per_pass:.2f}), "
        f"and {best} is the fastest."
    )
    header = Table("By out-degree", COUNTS, [counts_row("k=2, tau=1", known, "graph:k=2:tau=1"), *rows])
    return Finding(name, "Experiment 1: k=2, tau=1 against one hypothesis; k from 1 to 8", answer, header)


def experiment_2(name: str, known: Measured) -> Finding:
    shares = {tau: known.modes[f"graph:tau={tau}"].merged for tau in TAUS}
    falls = shares[TAUS[0]] > shares[TAUS[-1]]
    merges = "less" if falls else "more"
    rows = [counts_row(f"tau={tau}", known, f"graph:tau={tau}") for tau in TAUS]
    answer = (
        f"A higher tau merges {merges}: of accepted tokens {shares[1]:.1%} come from merged nodes at tau=1, "
        f"{shares[2]:.1%} "
        f"at 2, {shares[3]:.1%} at 3 and {shares[4]:.1%} at 4. That is what the definition says (a longer "
        "n-gram repeats "
        "more rarely); the summary that says otherwise is wrong."
        if falls
        else f"A higher tau merges {merges} here: {shares[1]:.1%} at tau=1, {shares[4]:.1%} at 4, against the "
        "definition."
    )
    question = "Experiment 2: does a higher tau merge more, or less?"
    return Finding(name, question, answer, Table("By tau", COUNTS, rows), falls)


def experiment_3(name: str, known: Measured) -> Finding:
    none, both = known.modes[PRUNING["none"]], known.modes[PRUNING["both"]]
    leaves = known.modes[PRUNING["both, siblings kept as leaves"]]
    rows = [counts_row(words, known, mode) for words, mode in PRUNING.items()]
    faster = known.speed(PRUNING["both"]) / known.speed(PRUNING["none"])
    answer = (
        f"Without pruning the draft is fed {none.drafted_per_token:.1f} tokens per token, with both kinds "
        f"{both.drafted_per_token:.1f}; tokens per pass go from {none.per_pass:.2f} to {both.per_pass:.2f}, "
        "and speed "
        f"changes by {faster:.2f} times. Kept as leaves, weak siblings make {leaves.per_pass:.2f} tokens per pass "
        f"({known.speed(PRUNING['both, siblings kept as leaves']):.2f}x against {known.speed(PRUNING['both']):.2f}x)."
    )
    question = "Experiment 3: what does pruning save?"
    return Finding(name, question, answer, Table("By pruning", COUNTS, rows), faster > 1.0)


def check_1(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    merged = known.modes["graph"].merged
    answer = (
        f"On {' and '.join(known.tasks)} the graph is {known.speed('graph'):.2f}x, the best chain "
        f"{known.speed(chain):.2f}x "
        f"and auto {known.speed('auto'):.2f}x; {merged:.1%} of the graph's accepted tokens come from merged nodes."
    )
    question = "Check 1: text low in repetition (poetry, stories) against SSD"
    return Finding(name, question, answer, speed_table(known, (chain, "tree", "graph", "auto")))


def foreign(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    answer = (
        f"Answers in another language ({', '.join(known.tasks)}): graph {known.speed('graph'):.2f}x, best chain "
        f"{known.speed(chain):.2f}x, auto {known.speed('auto'):.2f}x; {known.modes['graph'].merged:.1%} merged."
    )
    return Finding(
        name, "Claim: output that is not English", answer, speed_table(known, (chain, "tree", "graph", "auto"))
    )


def grid(name: str, known: Measured) -> Finding:
    modes = grid_modes()
    best = max(modes, key=lambda point: known.speed(modes[point]))
    paper = known.speed(modes[PAPER_POINT])
    rows = [
        counts_row(", ".join(f"{name}={value}" for name, value in zip(GRID, point, strict=True)), known, mode)
        for point, mode in modes.items()
    ]
    named = ", ".join(f"{name}={value}" for name, value in zip(GRID, best, strict=True))
    answer = (
        f"Of {len(modes)} settings the fastest is {named} with {known.speed(modes[best]):.2f}x; the paper's "
        "defaults have "
        f"{paper:.2f}x, so they are "
        f"{'near the best' if paper > 0.97 * known.speed(modes[best]) else 'not the best'} here; "
        f"auto, which needs none, has {known.speed('auto'):.2f}x. Output is "
        f"{'the same for all' if known.same else 'NOT the same for all'}."
    )
    question = "Check 3: theta_prob x theta_sib x tau: are the paper's defaults the best?"
    return Finding(name, question, answer, Table("By setting", COUNTS, rows), paper > 0.97 * known.speed(modes[best]))


def claims(name: str, known: Measured) -> Finding:
    graph, tree = known.modes["graph"], known.modes["tree"]
    saved = 1.0 - graph.drafted_per_token / tree.drafted_per_token
    auto = known.modes["auto"]
    undrafted = 1.0 - auto.accepted["draft"] / max(1, sum(auto.accepted.values()))
    answer = (
        f"{graph.merged:.1%} of the tokens that mode graph accepts come from merged nodes (paper: about "
        f"{PAPER_MERGED:.0%}); against the tree, which covers {tree.per_pass:.2f} tokens per pass where the "
        "graph covers "
        f"{graph.per_pass:.2f}, merging saves {saved:.1%} of the tokens that the draft is fed. In mode auto "
        f"{undrafted:.1%} of accepted tokens cost no drafting: {', '.join(shares_of(auto.accepted))}."
    )
    question = "Claims: accepted tokens from merged nodes, and draft computation that merging saves"
    return Finding(
        name, question, answer, None, graph.merged > PAPER_MERGED / 2, {"merged": graph.merged, "saved": saved}
    )


def temperatures(name: str, folder: Path) -> Finding | None:
    known = {0.0: measured(folder / "main")}
    known |= {heat: measured(folder / f"temperature-{heat}") for heat in TEMPERATURES}
    there = {heat: one for heat, one in known.items() if one is not None}
    if len(there) < 2:
        return None
    modes = ("tree", "graph", "auto")
    rows = []
    for heat, one in there.items():
        chain = one.fastest(CHAINS)
        cells = [f"{one.speed(mode):.2f}x" for mode in (chain, *modes)]
        rows.append(["greedy" if not heat else str(heat), *cells, f"{one.modes['graph'].merged:.1%}"])
    told = "; ".join(f"{row[0]}: graph {row[3]}, best chain {row[1]}, auto {row[4]}" for row in rows)
    answer = f"With keyed noise the same graph serves both, and tokens are the same as without drafting. {told}."
    table = Table("By temperature", ["temperature", "best chain", *modes, "merged"], rows)
    return Finding(name, "Open question 2: greedy against sampling", answer, table)


def probe_findings(folder: Path) -> Iterable[Finding]:
    if (heat := temperatures("question-2", folder)) is not None:
        yield heat
    for name, kind, finding in PROBED:
        if found := probed(folder, kind):
            yield finding(name, found)


def borrowed(name: str, found: Sequence[Record]) -> Finding:
    rows, told = [], []
    for tau in TAUS:
        here = [record for record in found if record["setting"] == str(tau)]
        merges = [merge for record in here for merge in record["merges"]]
        if not merges:
            rows.append([str(tau), "0", "", ""])
            continue
        own, scale = (median(merge[what] for merge in merges) for what in ("divergence", "unrelated"))
        nodes = sum(record["nodes"] for record in here)
        rows.append([str(tau), f"{len(merges)} of {nodes}", f"{own:.2f}", f"{scale:.2f}"])
        told.append(f"{own:.2f} nats at tau={tau}")
    answer = (
        "The median divergence of what a merged node borrows from what the draft would say there is "
        f"{', '.join(told)}; "
        "between unrelated nodes of the same graph it is in the last column."
    )
    header = ["tau", "merged nodes", "median KL, own from borrowed", "for scale: from another node's"]
    question = "Experiment 2: how far is a borrowed distribution from a merged node's own?"
    return Finding(name, question, answer, Table("Borrowed distributions", header, rows))


def shared(name: str, found: Sequence[Record]) -> Finding:
    greedy = [pair for record in found if float(record["setting"]) == 0.0 for pair in record["pairs"]]
    related, unrelated = ([pair for pair in greedy if pair["related"] is known] for known in (True, False))
    rows = [overlap_row("one step, greedy", related), overlap_row("another prompt", unrelated)]
    ordered = sorted(related, key=lambda pair: float(pair["entropy"]))
    third = max(1, len(ordered) // 3)
    for words, some in (("sure", ordered[:third]), ("between", ordered[third:-third]), ("unsure", ordered[-third:])):
        rows.append(overlap_row(f"draft {words} at the root", some))
    for kind in sorted({pair["kind"] for pair in related}):
        rows.append(overlap_row(f"behind: {kind}", [pair for pair in related if pair["kind"] == kind]))
    for heat in TEMPERATURES:
        sampled = [pair for one in found if float(one["setting"]) == heat for pair in one["pairs"] if pair["related"]]
        rows.append(overlap_row(f"temperature {heat}", sampled))
    mean = {
        words: fmean(pair["bigrams"] for pair in some) if some else 0.0
        for words, some in (
            ("related", related),
            ("unrelated", unrelated),
            ("sure", ordered[:third]),
            ("unsure", ordered[-third:]),
        )
    }
    answer = (
        f"Behind the place where they part, two hypotheses of one step share {mean['related']:.0%} of their bigrams, "
        f"hypotheses of unrelated contexts {mean['unrelated']:.0%}: they part in a token and then say the same "
        "again, "
        f"because the draft conditions on the same text. Where it is sure they share {mean['sure']:.0%}, where "
        "it is not "
        f"{mean['unsure']:.0%}."
    )
    header = ["pairs", "number", "tokens shared", "bigrams shared", "edits per token"]
    question = "Open question 1: why do hypotheses share sequences?"
    return Finding(
        name, question, answer, Table("What hypotheses share", header, rows), mean["related"] > mean["unrelated"]
    )


def wrong_masks(name: str, found: Sequence[Record]) -> Finding:
    rows, parted = [], []
    for setting in dict.fromkeys(record["setting"] for record in found):
        here = [record for record in found if record["setting"] == setting]
        places = [record["first_difference"] for record in here if record["first_difference"] is not None]
        worse = fmean(record["surprise"] - record["plain_surprise"] for record in here)
        first = f"{median(places):.0f} ({len(places)} of {len(here)})" if places else f"none ({len(here)} answers)"
        rows.append([setting, first, f"{worse:+.3f}", f"{fmean(record['tokens_per_pass'] for record in here):.2f}"])
        parted.append((setting, bool(places)))
    drafts = [places for setting, places in parted if setting.startswith("draft")]
    told = "leaves every answer as it is" if not any(drafts) else "CHANGES answers, which must never be"
    answer = (
        "A wrong mask at the target changes the text and its perplexity (table: the place of the first other "
        "token, and "
        "the target's surprise at the text, in nats per token more than plain decoding's); one at the draft "
        f"{told}, and "
        "only costs acceptance."
    )
    header = ["nodes that see a stranger", "first other token", "surprise, more", "tokens per pass"]
    question = "Check 2: what do wrong attention masks do over 1,000 tokens?"
    return Finding(name, question, answer, Table("Wrong masks", header, rows), not any(drafts))


COUNTS = [
    "setting",
    "times as fast",
    "tokens per pass",
    "nodes per pass",
    "draft tokens per token",
    "accepted",
    "merged",
]


def counts_row(words: str, known: Measured, mode: str) -> list[str]:
    one = known.modes[mode]
    figures = [one.per_pass, one.nodes / one.passes, one.drafted_per_token]
    shares = [f"{one.acceptance:.1%}", f"{one.merged:.1%}"]
    return [words, f"{known.speed(mode):.2f}x", *(f"{figure:.2f}" for figure in figures), *shares]


def speed_table(known: Measured, modes: Sequence[str]) -> Table:
    rows = [
        [mode, *(f"{known.speed(mode, task):.2f}x" for task in known.tasks), f"{known.speed(mode):.2f}x"]
        for mode in modes
    ]
    return Table("Times as fast as plain decoding", ["mode", *known.tasks, "all"], rows)


def overlap_row(words: str, pairs: Sequence[Record]) -> list[str]:
    if not pairs:
        return [words, "0", "", "", ""]
    means = {name: fmean(pair[name] for pair in pairs) for name in ("tokens", "bigrams", "edits")}
    return [words, str(len(pairs)), f"{means['tokens']:.1%}", f"{means['bigrams']:.1%}", f"{means['edits']:.2f}"]


def shares_of(accepted: dict[str, int]) -> list[str]:
    total = max(1, sum(accepted.values()))
    return [f"{count / total:.1%} {source}" for source, count in accepted.items() if source != "draft"]


TIMED: tuple[tuple[str, str, Callable[[str, Measured], Finding]], ...] = (
    ("main", "main", main_table),
    ("claims", "main", claims),
    ("experiment-1", "k", experiment_1),
    ("experiment-2", "tau", experiment_2),
    ("experiment-3", "pruning", experiment_3),
    ("check-1", "unlike", check_1),
    ("check-3", "grid", grid),
    ("foreign", "foreign", foreign),
)
PROBED: tuple[tuple[str, str, Callable[[str, Sequence[Record]], Finding]], ...] = (
    ("experiment-2-borrowed", "borrowing", borrowed),
    ("question-1", "overlap", shared),
    ("check-2", "masks", wrong_masks),
)
