"""What the study found, answered in a sentence each, and all of it as one report: items that were timed, and answers
that were looked into."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper import items
from draftgraph.bench.paper.items import CHAINS, ITEMS, TAUS, TEMPERATURES
from draftgraph.bench.paper.probes import SETTINGS, probed
from draftgraph.bench.reporting import Table, write_files
from draftgraph.bench.runs import FILE, Record, of_kind, records_in
from draftgraph.bench.searching import ROUNDS, need_optuna
from draftgraph.bench.speed_report import ALL, SpeedReport, labelled, settings_of, title_of, total_by_source
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.page import Part

AT_TARGET, AT_DRAFT = "target", "draft"  # where masks are wrong: their settings begin so
CHANGES = "CHANGE answers, which must never be"
SURENESS = ("sure", "between", "unsure")
COUNTS = [
    "setting",
    "times as fast",
    "tokens per pass",
    "nodes per pass",
    "draft tokens per token",
    "accepted",
    "merged",
]
PAPER_SPEED = "1.73x to 1.96x"
PAPER_MERGED = 0.30
NEAR = 0.97  # of the best speed: no worse, as far as one can tell
SIZES_FILE = "sizes.json"  # how many weights a pass of each draft reads
DRAFT_TITLES = dict(zip(items.OWN_DRAFTS, ("no draft model", "the pair's draft", "the target itself"), strict=True))
INFLATED_TITLES = DRAFT_TITLES | {items.TARGET_ITSELF: "the target before it was inflated"}
SEARCH = "search"  # its folder
QUESTION = "Open question 3: which fixed setting is the best?"
TOLD_VALUES = 3  # that mattered most


@dataclass(frozen=True)
class Counts:
    """Sums over the answers of one mode."""

    tokens: int  # of all answers
    passes: int  # of the target
    nodes: int  # that it checked
    drafted: int  # tokens that the draft was fed
    accepted: dict[str, int]  # by source

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Counts:
        return cls(
            sum(run["new_tokens"] for run in runs),
            sum(run["steps"] for run in runs),
            sum(run["nodes"] for run in runs),
            sum(run["draft_tokens"] for run in runs),
            total_by_source(runs, "accepted_by_source"),
        )

    @property
    def per_pass(self) -> float:
        """Tokens per pass of the target."""
        return self.tokens / self.passes

    @property
    def acceptance(self) -> float:
        """How much of what the target checked it accepted, roots apart."""
        return sum(self.accepted.values()) / max(1, self.nodes - self.passes)

    @property
    def drafted_per_token(self) -> float:
        return self.drafted / self.tokens

    @property
    def merged(self) -> float:
        """The share of accepted tokens that came from merged nodes."""
        return self.accepted["merged"] / max(1, sum(self.accepted.values()))


@dataclass(frozen=True)
class Measured:
    """An item: its report, the sums of every mode, and its runs."""

    report: SpeedReport
    modes: dict[str, Counts]
    runs: list[Record]

    def speed(self, mode: str) -> float:
        return self.report.mode(mode).overall.speed.ratio

    def shown(self, mode: str, task: str = ALL) -> str:
        return str(self.report.mode(mode).by_task[task].speed)

    def fastest(self, modes: Sequence[str]) -> str:
        return max((mode for mode in modes if mode in self.modes), key=self.speed)

    @property
    def tasks(self) -> list[str]:
        return [one.task for one in self.report.modes[0].tasks]


def measured(folder: Path) -> Measured | None:
    """The measurements of an item; None while it is not complete."""
    if not (folder / FILE).exists():
        return None
    records = records_in(folder / FILE)
    runs, sessions = of_kind(records, "run"), of_kind(records, "session")
    if not sessions or len(runs) < sessions[-1]["planned"]:
        return None
    modes = {mode: Counts.of(these) for mode, these in grouped(runs, "mode").items()}
    return Measured(SpeedReport.of(records), modes, runs)


def sameness(runs: Sequence[Record]) -> str:
    """Whether answers have the tokens of plain decoding, in words."""
    ties = sum(run["tie"] for run in runs)
    elsewhere = sum(not run["same"] for run in runs) - ties
    words = "the same" + (" but at ties of rounding" if ties else "")
    return words + (f", and NOT in {elsewhere} of {len(runs)} answers" if elsewhere else "")


def grouped(records: Sequence[Record], by: str) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record[by], []).append(record)
    return groups


@dataclass(frozen=True)
class Finding:
    """An item of the paper, what was found, and the table behind it."""

    name: str
    question: str
    answer: str
    table: Table | None = None
    agrees: bool | None = None  # with the paper; None: it says nothing of this
    figures: dict[str, float] = field(default_factory=dict)
    timed: bool = True  # False: looked into with the pair as it is, inflated or not


def counts_row(words: str, known: Measured, mode: str) -> list[str]:
    one = known.modes[mode]
    figures = [one.per_pass, one.nodes / one.passes, one.drafted_per_token]
    shares = [f"{one.acceptance:.1%}", f"{one.merged:.1%}"]
    return [words, known.shown(mode), *(f"{figure:.2f}" for figure in figures), *shares]


def speed_table(known: Measured, chain: str) -> Table:
    groups = [*known.tasks, ALL]
    rows = [[mode, *(known.shown(mode, task) for task in groups)] for mode in (chain, "tree", "graph", "auto")]
    return Table("Times as fast as plain decoding", ["mode", *groups], rows)


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
        speed_table(known, chain),
        graph_over_chain > 1.0,
        {"gsd": known.speed("graph"), "gsd_over_ssd": graph_over_chain},
    )


def claims(name: str, known: Measured) -> Finding:
    graph, tree, auto = (known.modes[mode] for mode in ("graph", "tree", "auto"))
    saved = 1.0 - graph.drafted_per_token / tree.drafted_per_token
    shares = {source: count / max(1, sum(auto.accepted.values())) for source, count in auto.accepted.items()}
    undrafted = ", ".join(f"{share:.1%} {source}" for source, share in shares.items() if source != "draft")
    answer = (
        f"{graph.merged:.1%} of the tokens that mode graph accepts come from merged nodes (paper: about "
        f"{PAPER_MERGED:.0%}); against the tree, which covers {tree.per_pass:.2f} tokens per pass where the graph "
        f"covers {graph.per_pass:.2f}, merging saves {saved:.1%} of the tokens that the draft is fed. In mode auto "
        f"{1.0 - shares['draft']:.1%} of accepted tokens cost no drafting: {undrafted}."
    )
    return Finding(
        name,
        "Claims: accepted tokens from merged nodes, and draft computation that merging saves",
        answer,
        agrees=graph.merged > PAPER_MERGED / 2,
        figures={"merged": graph.merged, "saved": saved},
    )


def experiment_1(name: str, known: Measured) -> Finding:
    small, single = known.modes["graph:k=2:tau=1"], known.modes["graph:k=1"]
    best = known.fastest([f"graph:k={k}" for k in items.OUT_DEGREES])
    rows = [counts_row(f"k={k}", known, f"graph:k={k}") for k in items.OUT_DEGREES]
    table = Table("By out-degree", COUNTS, [counts_row("k=2, tau=1", known, "graph:k=2:tau=1"), *rows])
    answer = (
        f"k=2, tau=1 gives {small.per_pass:.2f} tokens per pass for {small.drafted_per_token:.1f} draft tokens per "
        f"token; one hypothesis alone (k=1) gives {single.per_pass:.2f} for {single.drafted_per_token:.1f}. From k=1 "
        f"to k=8 tokens per pass rise from {single.per_pass:.2f} to {known.modes['graph:k=8'].per_pass:.2f} (k=4: "
        f"{known.modes['graph:k=4'].per_pass:.2f}), and {best} is the fastest."
    )
    return Finding(name, "Experiment 1: k=2, tau=1 against one hypothesis; k from 1 to 8", answer, table)


def experiment_2(name: str, known: Measured) -> Finding:
    shares = {tau: known.modes[f"graph:tau={tau}"].merged for tau in items.TAUS}
    question = "Experiment 2: does a higher tau merge more, or less?"
    rows = [counts_row(f"tau={tau}", known, f"graph:tau={tau}") for tau in items.TAUS]
    table = Table("By tau", COUNTS, rows)
    if not any(shares.values()):
        return Finding(name, question, "No accepted token came from a merged node, at any tau.", table)
    falls = shares[items.TAUS[0]] > shares[items.TAUS[-1]]
    by_tau = ", ".join(f"{share:.1%} at tau={tau}" for tau, share in shares.items())
    answer = (
        f"A higher tau merges {'less' if falls else 'more'}: of accepted tokens merged nodes give {by_tau}. That is "
        f"{'what the definition says' if falls else 'against the definition'}, by which a longer n-gram repeats more "
        f"rarely{'; the summary that says otherwise is wrong' if falls else ''}."
    )
    return Finding(name, question, answer, table, falls)


def experiment_3(name: str, known: Measured) -> Finding:
    none, both, leaves = (items.PRUNING[words] for words in ("none", "both", "both, siblings kept as leaves"))
    without, pruned = known.modes[none], known.modes[both]
    faster = known.speed(both) / known.speed(none)
    rows = [counts_row(words, known, mode) for words, mode in items.PRUNING.items()]
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
    return Finding(name, question, answer, speed_table(known, chain))


def foreign(name: str, known: Measured) -> Finding:
    chain = known.fastest(CHAINS)
    answer = (
        f"Answers in another language ({', '.join(known.tasks)}): graph {known.shown('graph')}, best chain "
        f"{known.shown(chain)}, auto {known.shown('auto')}; {known.modes['graph'].merged:.1%} merged."
    )
    return Finding(name, "Claim: output that is not English", answer, speed_table(known, chain))


def grid(name: str, known: Measured) -> Finding:
    modes = items.grid_modes()
    best = max(modes, key=lambda point: known.speed(modes[point]))
    paper = modes[items.PAPER_POINT]
    near = known.speed(paper) > NEAR * known.speed(modes[best])
    rows = [counts_row(point_named(point), known, mode) for point, mode in modes.items()]
    answer = (
        f"Of {len(modes)} settings the fastest is {point_named(best)} with {known.shown(modes[best])}; the paper's "
        f"defaults have {known.shown(paper)}, so they are {'near' if near else 'not'} the best here; "
        f"auto, which needs none, has {known.shown('auto')}. Output is {sameness(known.runs)} for all."
    )
    question = "Check 3: theta_prob x theta_sib x tau: are the paper's defaults the best?"
    return Finding(name, question, answer, Table("By setting", COUNTS, rows), near)


def point_named(point: tuple[float, float, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(items.GRID, point, strict=True))


def temperatures(name: str, folder: Path) -> Finding | None:
    known = {0.0: measured(folder / "main")}
    known |= {heat: measured(folder / f"temperature-{heat}") for heat in items.TEMPERATURES}
    there = {heat: one for heat, one in known.items() if one is not None}
    if len(there) < 2:
        return None
    modes, rows = ("tree", "graph", "auto"), []
    for heat, one in there.items():
        cells = [one.shown(mode) for mode in (one.fastest(CHAINS), *modes)]
        rows.append([str(heat) if heat else "greedy", *cells, f"{one.modes['graph'].merged:.1%}"])
    told = "; ".join(f"{row[0]}: graph {row[3]}, best chain {row[1]}, auto {row[4]}" for row in rows)
    written = sameness([run for one in there.values() for run in one.runs])
    answer = f"With keyed noise the same graph serves both; with and without drafting tokens are {written}. {told}."
    table = Table("By temperature", ["temperature", "best chain", *modes, "merged"], rows)
    return Finding(name, "Open question 2: greedy against sampling", answer, table)


def known_sizes(folder: Path) -> dict[str, int]:
    file = folder / items.DRAFTS / SIZES_FILE
    sizes: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return sizes


def draft_sizes(name: str, folder: Path) -> Finding | None:
    sizes = known_sizes(folder)
    found = {draft: known for draft in sizes if (known := measured(folder / items.DRAFTS / draft)) is not None}
    if len(found) < 2:
        return None
    ordered = sorted(found, key=lambda draft: sizes[draft])
    rows, told, speeds = [], [], {}
    for draft in ordered:
        known, size = found[draft], f" ({millions(sizes[draft])})" if sizes[draft] else ""
        chains = [known.fastest(CHAINS)] if any(mode in known.modes for mode in CHAINS) else []
        for mode in (*chains, *(mode for mode in ("graph", "auto") if mode in known.modes)):
            rows.append([draft_title(draft, known), millions(sizes[draft]), *counts_row(mode, known, mode)])
        mode = known.fastest((*CHAINS, "graph", "auto"))
        figures = f"{known.modes[mode].per_pass:.2f} tokens per pass, {known.modes[mode].acceptance:.1%} accepted"
        told.append(f"{draft_title(draft, known)}{size} {known.shown(mode)} with {mode}, {figures}")
        speeds[draft] = known.speed(mode)
    best = max(ordered, key=lambda draft: speeds[draft])
    fastest = f"The fastest is {draft_title(best, found[best])}."
    answer = f"By the weights that a pass of the draft reads: {'; '.join(told)}. {fastest}"
    table = Table("By draft", ["draft", "weights read", "mode", *COUNTS[1:]], rows)
    return Finding(name, "Claim: how does the size of the draft matter?", answer, table, figures=speeds)


def draft_title(draft: str, known: Measured) -> str:
    return (DRAFT_TITLES if known.report.label is None else INFLATED_TITLES).get(draft, draft)


def millions(weights: int) -> str:
    """
    >>> millions(134515008)
    '134.5M'
    """
    return f"{weights / 1e6:.1f}M"


def report_in(folder: Path) -> dict[str, Any]:
    """The content of search.json, or an empty report."""
    file = folder / SEARCH / "search.json"
    nothing: dict[str, Any] = {"trials": [], "rounds": 0}
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else nothing


def best_setting(name: str, folder: Path) -> Finding | None:
    """None while the search is not complete; without Optuna, a finding that says so."""
    report = report_in(folder)
    if report["rounds"] >= ROUNDS:
        return best_setting_in(name, report)
    try:
        need_optuna()
    except UsageError as error:
        return Finding(name, QUESTION, f"Not measured: {error}", timed=False)
    return None


def best_setting_in(name: str, report: dict[str, Any]) -> Finding:
    compared = {one["name"]: one for one in report["compared"]}
    best, auto = compared[report["best"]["name"]], compared["auto"]
    paper = next(one for one in compared.values() if one["paper"])
    the_papers = ", which is the paper's" if best is paper else f"; the paper's has {speed_of(paper):.2f}x"
    weights = sorted(report["importance"].items(), key=lambda item: -item[1])[:TOLD_VALUES]
    mattered = ", ".join(f"{value} ({weight:.0%})" for value, weight in weights)
    answer = (
        f"Of {len(report['trials'])} settings tried the best is {setting_named(best)} with {speed_of(best):.2f}x"
        f"{the_papers}; auto, which needs none, has {speed_of(auto):.2f}x. "
    )
    answer += f"What mattered most: {mattered}." if mattered else "Too few trials to tell which values matter."
    header = ["setting", "times as fast", "tokens per pass", "nodes per pass", "cost of a step, in passes"]
    rows = []
    for one in compared.values():
        marks = [mark for mark, holds in (("best", one is best), ("paper", one["paper"])) if holds]
        words = f"{setting_named(one)} ({', '.join(marks)})" if marks else setting_named(one)
        figures = [one["outcome"]["tokens_per_pass"], one["outcome"]["nodes_per_pass"], one["step_cost"]]
        rows.append([words, f"{speed_of(one):.2f}x", *(f"{figure:.2f}" for figure in figures)])
    speeds = {"best": speed_of(best), "paper": speed_of(paper), "auto": speed_of(auto)}
    return Finding(name, QUESTION, answer, Table("Settings beside each other", header, rows), figures=speeds)


def speed_of(one: dict[str, Any]) -> float:
    ratio: float = one["outcome"]["speed"]["ratio"]
    return ratio


def setting_named(one: dict[str, Any]) -> str:
    values = {name: value for name, value in one["setting"].items() if name != "mode"}
    return ", ".join(f"{name}={value}" for name, value in values.items()) or one["name"]


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
        f"{', '.join(told)}; between unrelated nodes of the same graph it is in the last column."
        if told
        else "No merged node borrowed anything."
    )
    header = ["tau", "merged nodes", "median KL, own from borrowed", "for scale: from another node's"]
    question = "Experiment 2: how far is a borrowed distribution from a merged node's own?"
    return Finding(name, question, answer, Table("Borrowed distributions", header, rows), timed=False)


def shared(name: str, found: Sequence[Record]) -> Finding:
    greedy = [pair for record in found if float(record["setting"]) == 0.0 for pair in record["pairs"]]
    related, unrelated = ([pair for pair in greedy if pair["related"] is known] for known in (True, False))
    ordered = sorted(related, key=lambda pair: float(pair["entropy"]))
    third = max(1, len(ordered) // 3)
    sure, between, unsure = ordered[:third], ordered[third:-third], ordered[-third:]
    groups = {"one step, greedy": related, "another prompt": unrelated}
    groups |= {f"draft {how} at the root": some for how, some in zip(SURENESS, (sure, between, unsure), strict=True)}
    for kind in sorted({pair["kind"] for pair in related}):
        groups[f"behind: {kind}"] = [pair for pair in related if pair["kind"] == kind]
    for heat in TEMPERATURES:
        sampled = (pair for one in found if float(one["setting"]) == heat for pair in one["pairs"])
        groups[f"temperature {heat}"] = [pair for pair in sampled if pair["related"]]
    rows = [overlap_row(words, pairs) for words, pairs in groups.items()]
    of_related, of_unrelated, of_sure, of_unsure = (
        fmean(pair["bigrams"] for pair in pairs) if pairs else 0.0 for pairs in (related, unrelated, sure, unsure)
    )
    answer = (
        f"Behind the place where they part, two hypotheses of one step share {of_related:.0%} of their bigrams, "
        f"hypotheses of unrelated contexts {of_unrelated:.0%}: they part in a token and then say the same again, "
        f"because the draft conditions on the same text. Where it is sure they share {of_sure:.0%}, where it is "
        f"not {of_unsure:.0%}."
    )
    header = ["pairs", "number", "tokens shared", "bigrams shared", "edits per token"]
    question = "Open question 1: why do hypotheses share sequences?"
    table = Table("What hypotheses share", header, rows)
    return Finding(name, question, answer, table, of_related > of_unrelated, timed=False)


def overlap_row(words: str, pairs: Sequence[Record]) -> list[str]:
    if not pairs:
        return [words, "0", "", "", ""]
    tokens, bigrams, edits = (fmean(pair[name] for pair in pairs) for name in ("tokens", "bigrams", "edits"))
    return [words, str(len(pairs)), f"{tokens:.1%}", f"{bigrams:.1%}", f"{edits:.2f}"]


def wrong_masks(name: str, found: Sequence[Record]) -> Finding | None:
    """None: no prompt was answered at every setting so far."""
    settings, rows = by_setting(found), []
    if not settings:
        return None
    for setting, here in settings.items():
        places = [record["first_difference"] for record in here if record["first_difference"] is not None]
        worse = fmean(record["surprise"] - record["plain_surprise"] for record in here)
        first = f"{median(places):.0f} ({len(places)} of {len(here)})" if places else f"none ({len(here)} answers)"
        rows.append([setting, first, f"{worse:+.3f}", f"{per_pass_of(here):.2f}"])
    kept, right = draft_changes_nothing(settings), settings[SETTINGS[0]]
    wrong = [setting for setting in settings if setting.startswith(AT_TARGET) and setting != SETTINGS[0]]
    told = ", ".join(f"for {float(one.split()[1]):.0%} of nodes {changed_in(settings[one])}" for one in wrong)
    answer = (
        f"Wrong masks at the target change answers: {told} (table: the place of the first other token, and the "
        "target's surprise at the text, in nats per token more than plain decoding's); at the draft they "
        f"{done_by_the_draft(settings)}, with {per_pass_of(settings[SETTINGS[-1]]):.2f} tokens per pass where right "
        f"masks have {per_pass_of(right):.2f}."
    )
    header = ["nodes that see a stranger", "first other token", "surprise, more", "tokens per pass"]
    question = "Check 2: what do wrong attention masks do over 1,000 tokens?"
    return Finding(name, question, answer, Table("Wrong masks", header, rows), kept, timed=False)


def accuracy(name: str, found: Sequence[Record]) -> Finding | None:
    """None: no prompt was answered at every setting so far."""
    settings = by_setting(found)
    if not settings:
        return None
    first = next(iter(settings.values()))
    plain = fmean(record["plain_right"] for record in first)
    right = {setting: fmean(record["right"] for record in here) for setting, here in settings.items()}
    rows = [["plain decoding", f"{plain:.0%}", "", ""]]
    told: dict[str, list[str]] = {AT_TARGET: [], AT_DRAFT: []}
    for setting, here in settings.items():
        same, ties = fmean(map(is_same, here)), sum(record["tie"] for record in here)
        unchanged = f"{same:.0%}" + (f" ({ties} part at a tie)" if ties else "")
        rows.append([setting, f"{right[setting]:.0%}", unchanged, f"{per_pass_of(here):.2f}"])
        where, share = setting.split()
        told[where].append(f"{float(share):.0%} of nodes: {right[setting]:.0%} right, {same:.0%} unchanged")
    kept = draft_changes_nothing(settings)
    answer = (
        f"Plain decoding solves {plain:.0%} of {len(first)} problems. Wrong masks at the target: "
        f"{'; '.join(told[AT_TARGET])}. At the draft: {'; '.join(told[AT_DRAFT])}; so there they "
        f"{done_by_the_draft(settings)}."
    )
    header = ["nodes that see a stranger", "accuracy", "answers unchanged", "tokens per pass"]
    question = "Check 2: what do wrong attention masks do to accuracy?"
    table = Table("Accuracy under wrong masks", header, rows)
    return Finding(name, question, answer, table, kept, {"plain": plain} | right, timed=False)


def by_setting(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Without the last prompt of a stopped study, which was not answered at every setting."""
    answers = Counter((record["task"], record["prompt"]) for record in found)
    whole = [record for record in found if answers[record["task"], record["prompt"]] == len(SETTINGS)]
    return grouped(whole, "setting")


def per_pass_of(records: Sequence[Record]) -> float:
    return fmean(record["tokens_per_pass"] for record in records)


def is_same(record: Record) -> bool:
    return record["first_difference"] is None


def is_changed(record: Record) -> bool:
    """Differences at ties do not count: in half precision passes of other shapes round differently."""
    return not is_same(record) and not record.get("tie")


def changed_in(records: Sequence[Record]) -> str:
    ties = sum(bool(record.get("tie")) for record in records)
    return f"{sum(map(is_changed, records))} of {len(records)}" + (f" and {ties} at a tie" if ties else "")


def draft_changes_nothing(settings: Mapping[str, Sequence[Record]]) -> bool:
    here = [record for setting, some in settings.items() if setting.startswith(AT_DRAFT) for record in some]
    return not any(map(is_changed, here))


def done_by_the_draft(settings: Mapping[str, Sequence[Record]]) -> str:
    if not draft_changes_nothing(settings):
        return CHANGES
    ties, right = (sum(bool(one.get("tie")) for one in settings[SETTINGS[place]]) for place in (-1, 0))
    if not ties:
        return "change no answer"
    return f"change none but at ties ({ties} of {len(settings[SETTINGS[-1]])}; right masks, which also round: {right})"


def findings_in(folder: Path) -> Iterator[Finding]:
    for name, item, of_item in TIMED:
        if (known := measured(folder / item)) is not None:
            yield of_item(name, known)
    for name, of_several in COMPARED:
        if (finding := of_several(name, folder)) is not None:
            yield finding
    for name, kind, of_answers in PROBED:
        if (found := probed(folder, kind)) and (finding := of_answers(name, found)) is not None:
            yield finding


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
COMPARED: tuple[tuple[str, Callable[[str, Path], Finding | None]], ...] = (
    ("draft-sizes", draft_sizes),
    ("question-2", temperatures),
    ("question-3", best_setting),
)
PROBED: tuple[tuple[str, str, Callable[[str, Sequence[Record]], Finding | None]], ...] = (
    ("experiment-2-borrowed", "borrowing", borrowed),
    ("question-1", "overlap", shared),
    ("check-2", "masks", wrong_masks),
    ("check-2-accuracy", "accuracy", accuracy),
)


VERDICTS = {True: "as the paper has it", False: "not as the paper has it", None: ""}


@dataclass(frozen=True)
class PaperReport:
    title: str
    settings: str
    findings: list[Finding]

    @classmethod
    def of(cls, folder: Path) -> PaperReport | None:
        """None while no item is finished."""
        known = next((one for item in ITEMS if (one := measured(folder / item.name)) is not None), None)
        if known is None:
            return None
        found = [
            replace(one, answer=labelled(one.answer, known.report)) if one.timed else one for one in findings_in(folder)
        ]
        return cls(title_of(known.report).replace("Speed of", "The paper's study:"), settings_of(known.report), found)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        parts = [f"# {self.title}", self.settings]
        for one in self.findings:
            verdict = f" *({VERDICTS[one.agrees]})*" if VERDICTS[one.agrees] else ""
            parts += [f"## {one.question}", f"{one.answer}{verdict}"]
            parts += [one.table.cells] if one.table is not None else []
        return "\n\n".join(parts) + "\n"

    def to_part(self) -> Part:
        from draftgraph.bench.page import paper_part

        return paper_part(self)

    def save(self, folder: Path) -> None:
        """Writes paper.json, paper.md and paper.html."""
        from draftgraph.bench.page import page

        page_of_one = page([self.to_part()])
        write_files(folder, {"paper.json": self.to_dict(), "paper.md": self.to_markdown(), "paper.html": page_of_one})
