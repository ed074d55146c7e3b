"""What the study found, answered in a sentence each, and all of it as one report: items that were timed, and answers
that were looked into. Questions and sentences are in findings.toml."""

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
from draftgraph.bench.reporting import Table, read_data, write_files
from draftgraph.bench.runs import FILE, Record, of_kind, records_in
from draftgraph.bench.searching import ROUNDS, marked, need_optuna
from draftgraph.bench.speed_report import ALL, SpeedReport, labelled, settings_of, title_of, total_by_source
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.bench.page import Part

TEXTS: dict[str, dict[str, Any]] = read_data("paper/findings.toml")
COUNTS = [
    "setting",
    "times as fast",
    "tokens per pass",
    "nodes per pass",
    "draft tokens per token",
    "accepted",
    "merged",
]
PAPER_MERGED = 0.30
NEAR = 0.97  # of the best speed: no worse, as far as one can tell
SIZES_FILE = "sizes.json"  # how many weights a pass of each draft reads
DRAFT_TITLES = dict(zip(items.OWN_DRAFTS, ("no draft model", "the pair's draft", "the target itself"), strict=True))
INFLATED_TITLES = DRAFT_TITLES | {items.TARGET_ITSELF: "the target before it was inflated"}
SEARCH = "search"  # its folder
TOLD_VALUES = 3  # that mattered most
VERDICTS = {True: "as the paper has it", False: "not as the paper has it", None: ""}


@dataclass(frozen=True)
class Counts:
    """Of the answers of one mode together."""

    per_pass: float  # tokens per pass of the target
    nodes_per_pass: float
    drafted_per_token: float  # tokens that the draft was fed
    acceptance: float  # how much of what the target checked it accepted, roots apart
    shares: dict[str, float]  # of accepted tokens, by source

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Counts:
        names = ("new_tokens", "steps", "nodes", "draft_tokens")
        tokens, passes, nodes, drafted = (sum(run[name] for run in runs) for name in names)
        by_source = total_by_source(runs, "accepted_by_source")
        accepted = sum(by_source.values())
        shares = {source: count / max(1, accepted) for source, count in by_source.items()}
        return cls(tokens / passes, nodes / passes, drafted / tokens, accepted / max(1, nodes - passes), shares)

    @property
    def merged(self) -> float:
        return self.shares["merged"]


@dataclass(frozen=True)
class Measured:
    """An item: its report, the figures of every mode, and its runs."""

    report: SpeedReport
    modes: dict[str, Counts]
    runs: list[Record]

    def speed(self, mode: str) -> float:
        return self.report.mode(mode).overall.speed.ratio

    @property
    def times(self) -> dict[str, str]:
        """How many times as fast as plain decoding, by mode."""
        return {mode.mode: str(mode.overall.speed) for mode in self.report.modes}

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

    @classmethod
    def of(
        cls,
        name: str,
        header: Sequence[str] = (),
        rows: Sequence[list[str]] = (),
        *,
        said: str = "answer",
        agrees: bool | None = None,
        figures: Mapping[str, float] | None = None,
        timed: bool = True,
        **measured: Any,
    ) -> Finding:
        """With the texts of this name: the sentence `said`, filled in with what was `measured`."""
        texts = TEXTS[name]
        table = Table(texts["table"], list(header), list(rows)) if header else None
        return cls(name, texts["question"], texts[said].format(**measured), table, agrees, dict(figures or {}), timed)


def counts_row(words: str, known: Measured, mode: str) -> list[str]:
    one = known.modes[mode]
    figures = [one.per_pass, one.nodes_per_pass, one.drafted_per_token]
    shares = [f"{one.acceptance:.1%}", f"{one.merged:.1%}"]
    return [words, known.times[mode], *(f"{figure:.2f}" for figure in figures), *shares]


def by_setting_named(name: str, known: Measured, modes: Mapping[str, str], **more: Any) -> Finding:
    """A row for every mode; the text calls them by the words of their rows as well."""
    rows = [counts_row(words, known, mode) for words, mode in modes.items()]
    counts = {words: known.modes[mode] for words, mode in modes.items()}
    times = {words: known.times[mode] for words, mode in modes.items()}
    return Finding.of(name, COUNTS, rows, known=known, counts=counts, times=times, **more)


def beside_chains(name: str, known: Measured, **more: Any) -> Finding:
    """Tree, graph and auto beside the best chain, task by task."""
    chain, groups = known.fastest(CHAINS), [*known.tasks, ALL]
    speeds = {mode: known.report.mode(mode).by_task for mode in (chain, "tree", "graph", "auto")}
    rows = [[mode, *(str(by_task[task].speed) for task in groups)] for mode, by_task in speeds.items()]
    more |= {"known": known, "graph": known.modes["graph"], "chain": chain, "chain_speed": known.times[chain]}
    return Finding.of(name, ["mode", *groups], rows, **more)


def main_table(known: Measured) -> Finding:
    chain = known.speed(known.fastest(CHAINS))
    graph, auto = (known.speed(mode) / chain for mode in ("graph", "auto"))
    figures = {"gsd": known.speed("graph"), "gsd_over_ssd": graph}
    ratios = {"graph_over_chain": graph, "auto_over_chain": auto}
    return beside_chains("main", known, agrees=graph > 1.0, figures=figures, **ratios)


def claims(known: Measured) -> Finding:
    graph, tree, auto = (known.modes[mode] for mode in ("graph", "tree", "auto"))
    saved = 1.0 - graph.drafted_per_token / tree.drafted_per_token
    undrafted = ", ".join(f"{share:.1%} {source}" for source, share in auto.shares.items() if source != "draft")
    told: dict[str, Any] = {"known": known, "paper": PAPER_MERGED, "saved": saved, "undrafted": undrafted}
    told |= {"free": 1.0 - auto.shares["draft"], "figures": {"merged": graph.merged, "saved": saved}}
    return Finding.of("claims", agrees=graph.merged > PAPER_MERGED / 2, **told)


def experiment_1(known: Measured) -> Finding:
    by_degree = {f"k={k}": f"graph:k={k}" for k in items.OUT_DEGREES}
    modes = {"k=2, tau=1": "graph:k=2:tau=1"} | by_degree
    return by_setting_named("experiment-1", known, modes, best=known.fastest(list(by_degree.values())))


def experiment_2(known: Measured) -> Finding:
    modes = {f"tau={tau}": f"graph:tau={tau}" for tau in TAUS}
    shares = {words: known.modes[mode].merged for words, mode in modes.items()}
    if not any(shares.values()):
        return by_setting_named("experiment-2", known, modes, said="nothing")
    falls = shares[f"tau={TAUS[0]}"] > shares[f"tau={TAUS[-1]}"]
    by_tau = ", ".join(f"{share:.1%} at {words}" for words, share in shares.items())
    said = "falls" if falls else "rises"
    return by_setting_named("experiment-2", known, modes, said=said, agrees=falls, by_tau=by_tau)


def experiment_3(known: Measured) -> Finding:
    faster = known.speed(items.PRUNING["both"]) / known.speed(items.PRUNING["none"])
    return by_setting_named("experiment-3", known, items.PRUNING, agrees=faster > 1.0, faster=faster)


def check_1(known: Measured) -> Finding:
    return beside_chains("check-1", known, tasks=" and ".join(known.tasks))


def foreign(known: Measured) -> Finding:
    return beside_chains("foreign", known, tasks=", ".join(known.tasks))


def grid(known: Measured) -> Finding:
    def named(point: tuple[float, float, int]) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(items.GRID, point, strict=True))

    modes = {named(point): mode for point, mode in items.grid_modes().items()}
    best, paper = max(modes, key=lambda words: known.speed(modes[words])), modes[named(items.PAPER_POINT)]
    near = known.speed(paper) > NEAR * known.speed(modes[best])
    told: dict[str, Any] = {"best": best, "best_speed": known.times[modes[best]], "paper_speed": known.times[paper]}
    told |= {"near": "near" if near else "not", "same": sameness(known.runs), "count": len(modes)}
    return by_setting_named("check-3", known, modes, agrees=near, **told)


def temperatures(folder: Path) -> Finding | None:
    places = {"greedy": "main"} | {str(heat): f"temperature-{heat}" for heat in TEMPERATURES}
    there = {heat: one for heat, place in places.items() if (one := measured(folder / place)) is not None}
    if len(there) < 2:
        return None
    modes, rows = ("tree", "graph", "auto"), []
    for heat, one in there.items():
        cells = [one.times[mode] for mode in (one.fastest(CHAINS), *modes)]
        rows.append([heat, *cells, f"{one.modes['graph'].merged:.1%}"])
    told = "; ".join(f"{row[0]}: graph {row[3]}, best chain {row[1]}, auto {row[4]}" for row in rows)
    same = sameness([run for one in there.values() for run in one.runs])
    return Finding.of("question-2", ["temperature", "best chain", *modes, "merged"], rows, same=same, told=told)


def known_sizes(folder: Path) -> dict[str, int]:
    file = folder / items.DRAFTS / SIZES_FILE
    sizes: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return sizes


def draft_sizes(folder: Path) -> Finding | None:
    sizes = known_sizes(folder)
    found = {draft: known for draft in sizes if (known := measured(folder / items.DRAFTS / draft)) is not None}
    if len(found) < 2:
        return None
    rows, told, speeds, titles = [], [], {}, {}
    for draft in sorted(found, key=lambda draft: sizes[draft]):
        known, size = found[draft], f"{sizes[draft] / 1e6:.1f}M"
        title = (DRAFT_TITLES if known.report.label is None else INFLATED_TITLES).get(draft, draft)
        chains = [known.fastest(CHAINS)] if any(mode in known.modes for mode in CHAINS) else []
        for mode in (*chains, *(mode for mode in ("graph", "auto") if mode in known.modes)):
            rows.append([title, size, *counts_row(mode, known, mode)])
        mode = known.fastest((*CHAINS, "graph", "auto"))
        figures = f"{known.modes[mode].per_pass:.2f} tokens per pass, {known.modes[mode].acceptance:.1%} accepted"
        told.append(f"{title}{f' ({size})' if sizes[draft] else ''} {known.times[mode]} with {mode}, {figures}")
        speeds[draft], titles[draft] = known.speed(mode), title
    best = titles[max(speeds, key=lambda draft: speeds[draft])]
    header = ["draft", "weights read", "mode", *COUNTS[1:]]
    return Finding.of("draft-sizes", header, rows, figures=speeds, told="; ".join(told), best=best)


def report_in(folder: Path) -> dict[str, Any]:
    """The content of search.json, or an empty report."""
    file = folder / SEARCH / "search.json"
    nothing: dict[str, Any] = {"trials": [], "rounds": 0}
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else nothing


def best_setting(folder: Path) -> Finding | None:
    """None while the search is not complete; without Optuna, a finding that says so."""
    report = report_in(folder)
    if report["rounds"] >= ROUNDS:
        return best_setting_in(report)
    try:
        need_optuna()
    except UsageError as error:
        return Finding.of("question-3", said="nothing", timed=False, error=error)
    return None


def best_setting_in(report: dict[str, Any]) -> Finding:
    compared = {one["name"]: one for one in report["compared"]}
    best = compared[report["best"]["name"]]
    paper = next(one for one in compared.values() if one["paper"])
    speeds = {name: one["outcome"]["speed"]["ratio"] for name, one in compared.items()}
    figures = {"best": speeds[best["name"]], "paper": speeds[paper["name"]], "auto": speeds["auto"]}
    weights = sorted(report["importance"].items(), key=lambda item: -item[1])[:TOLD_VALUES]
    mattered = ", ".join(f"{value} ({weight:.0%})" for value, weight in weights)
    header = ["setting", "times as fast", "tokens per pass", "nodes per pass", "cost of a step, in passes"]
    rows = []
    for one in compared.values():
        words = marked(setting_named(one), best=one is best, paper=one["paper"])
        per_pass = (one["outcome"]["tokens_per_pass"], one["outcome"]["nodes_per_pass"], one["step_cost"])
        rows.append([words, f"{speeds[one['name']]:.2f}x", *(f"{figure:.2f}" for figure in per_pass)])
    told: dict[str, Any] = {"count": len(report["trials"]), "best": setting_named(best), "speeds": figures}
    told["the_papers"] = ", which is the paper's" if best is paper else f"; the paper's has {figures['paper']:.2f}x"
    told["mattered"] = f"What mattered most: {mattered}." if mattered else "Too few trials to tell which values matter."
    return Finding.of("question-3", header, rows, figures=figures, **told)


def setting_named(one: dict[str, Any]) -> str:
    values = {name: value for name, value in one["setting"].items() if name != "mode"}
    return ", ".join(f"{name}={value}" for name, value in values.items()) or one["name"]


def borrowed(found: Sequence[Record]) -> Finding:
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
    header = ["tau", "merged nodes", "median KL, own from borrowed", "for scale: from another node's"]
    said = "answer" if told else "nothing"
    return Finding.of("experiment-2-borrowed", header, rows, said=said, timed=False, told=", ".join(told))


def shared(found: Sequence[Record]) -> Finding:
    greedy = [pair for record in found if float(record["setting"]) == 0.0 for pair in record["pairs"]]
    related, unrelated = ([pair for pair in greedy if pair["related"] is known] for known in (True, False))
    ordered = sorted(related, key=lambda pair: float(pair["entropy"]))
    third = max(1, len(ordered) // 3)
    sure, unsure = ordered[:third], ordered[-third:]
    groups = {
        "one step, greedy": related,
        "another prompt": unrelated,
        "draft sure at the root": sure,
        "draft between at the root": ordered[third:-third],
        "draft unsure at the root": unsure,
    }
    for kind in sorted({pair["kind"] for pair in related}):
        groups[f"behind: {kind}"] = [pair for pair in related if pair["kind"] == kind]
    for heat in TEMPERATURES:
        sampled = (pair for one in found if float(one["setting"]) == heat for pair in one["pairs"])
        groups[f"temperature {heat}"] = [pair for pair in sampled if pair["related"]]
    rows = []
    for words, pairs in groups.items():
        tokens, bigrams, edits = (mean_of(pairs, name) for name in ("tokens", "bigrams", "edits"))
        cells = [f"{tokens:.1%}", f"{bigrams:.1%}", f"{edits:.2f}"] if pairs else ["", "", ""]
        rows.append([words, str(len(pairs)), *cells])
    named = {"related": related, "unrelated": unrelated, "sure": sure, "unsure": unsure}
    shares: dict[str, Any] = {name: mean_of(pairs, "bigrams") for name, pairs in named.items()}
    header = ["pairs", "number", "tokens shared", "bigrams shared", "edits per token"]
    agrees = shares["related"] > shares["unrelated"]
    return Finding.of("question-1", header, rows, agrees=agrees, timed=False, **shares)


def mean_of(records: Sequence[Record], name: str) -> float:
    return fmean(record[name] for record in records) if records else 0.0


@dataclass(frozen=True)
class Masked:
    """Answers at one setting of wrong masks, beside those of plain decoding."""

    answers: int
    same: float  # share
    ties: int
    changed: int  # not at ties: in half precision passes of other shapes round differently
    per_pass: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> Masked:
        same = [record["first_difference"] is None for record in records]
        ties = [bool(record.get("tie")) for record in records]
        changed = len(records) - sum(map(max, same, ties))
        return cls(len(records), fmean(same), sum(ties), changed, mean_of(records, "tokens_per_pass"))


def by_setting(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Without the last prompt of a stopped study, which was not answered at every setting."""
    answers = Counter((record["task"], record["prompt"]) for record in found)
    whole = [record for record in found if answers[record["task"], record["prompt"]] == len(SETTINGS)]
    return grouped(whole, "setting")


def masks_finding(
    name: str, column: list[str], rows: list[list[str]], known: Mapping[str, Masked], **told: Any
) -> Finding:
    """Wrong masks at the draft, the last setting, must change no answer."""
    right, wrong = known[SETTINGS[0]], known[SETTINGS[-1]]
    done = "CHANGE answers, which must never be" if wrong.changed else "change no answer"
    if wrong.ties and not wrong.changed:
        also = f"right masks, which also round: {right.ties}"
        done = f"change none but at ties ({wrong.ties} of {wrong.answers}; {also})"
    header = ["nodes that see a stranger", *column, "tokens per pass"]
    told |= {"right": right, "wrong": wrong, "by_the_draft": done}
    return Finding.of(name, header, rows, agrees=not wrong.changed, timed=False, **told)


def wrong_masks(found: Sequence[Record]) -> Finding | None:
    """None: no prompt was answered at every setting so far."""
    if not (settings := by_setting(found)):
        return None
    known, rows, told = {setting: Masked.of(here) for setting, here in settings.items()}, [], []
    for setting, here in settings.items():
        places = [record["first_difference"] for record in here if record["first_difference"] is not None]
        worse = fmean(record["surprise"] - record["plain_surprise"] for record in here)
        first = f"{median(places):.0f} ({len(places)} of {len(here)})" if places else f"none ({len(here)} answers)"
        rows.append([setting, first, f"{worse:+.3f}", f"{known[setting].per_pass:.2f}"])
        where, share = setting.split()
        if where == "target" and setting != SETTINGS[0]:
            ties = f" and {known[setting].ties} at a tie" if known[setting].ties else ""
            told.append(f"for {float(share):.0%} of nodes {known[setting].changed} of {len(here)}{ties}")
    return masks_finding("check-2", ["first other token", "surprise, more"], rows, known, told=", ".join(told))


def accuracy(found: Sequence[Record]) -> Finding | None:
    """None: no prompt was answered at every setting so far."""
    if not (settings := by_setting(found)):
        return None
    known = {setting: Masked.of(here) for setting, here in settings.items()}
    plain = mean_of(settings[SETTINGS[0]], "plain_right")
    right = {setting: mean_of(here, "right") for setting, here in settings.items()}
    rows = [["plain decoding", f"{plain:.0%}", "", ""]]
    told: dict[str, list[str]] = {"target": [], "draft": []}
    for setting, one in known.items():
        unchanged = f"{one.same:.0%}" + (f" ({one.ties} part at a tie)" if one.ties else "")
        rows.append([setting, f"{right[setting]:.0%}", unchanged, f"{one.per_pass:.2f}"])
        where, share = setting.split()
        told[where].append(f"{float(share):.0%} of nodes: {right[setting]:.0%} right, {one.same:.0%} unchanged")
    both: dict[str, Any] = {f"at_{where}": "; ".join(words) for where, words in told.items()}
    both |= {"plain": plain, "problems": known[SETTINGS[0]].answers, "figures": {"plain": plain} | right}
    return masks_finding("check-2-accuracy", ["accuracy", "answers unchanged"], rows, known, **both)


TIMED: tuple[tuple[str, Callable[[Measured], Finding]], ...] = (  # by the item that was timed
    ("main", main_table),
    ("main", claims),
    ("k", experiment_1),
    ("tau", experiment_2),
    ("pruning", experiment_3),
    ("unlike", check_1),
    ("grid", grid),
    ("foreign", foreign),
)
PROBED: dict[str, Callable[[Sequence[Record]], Finding | None]] = {  # by the kind of records
    "borrowing": borrowed,
    "overlap": shared,
    "masks": wrong_masks,
    "accuracy": accuracy,
}


def findings_in(folder: Path) -> Iterator[Finding]:
    for item, of_item in TIMED:
        if (known := measured(folder / item)) is not None:
            yield of_item(known)
    yield from filter(None, (of_folder(folder) for of_folder in (draft_sizes, temperatures, best_setting)))
    for kind, of_answers in PROBED.items():
        if (found := probed(folder, kind)) and (finding := of_answers(found)) is not None:
            yield finding


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
        report = known.report
        found = [replace(one, answer=labelled(one.answer, report)) if one.timed else one for one in findings_in(folder)]
        return cls(title_of(report).replace("Speed of", "The paper's study:"), settings_of(report), found)

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
