"""Runs the study: every item is timed in a folder of its own; what is looked into is kept beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from draftgraph.bench.paper import items
from draftgraph.bench.paper.findings import SEARCH, SIZES_FILE, known_sizes, report_in
from draftgraph.bench.paper.items import Item, Size
from draftgraph.bench.paper.probes import look_into_answers
from draftgraph.bench.reporting import write_files
from draftgraph.bench.runs import FILE, PLAIN, Deadline, Place, Record, all_places, digest, of_kind, records_in
from draftgraph.bench.searching import ROUNDS, OutOfTime, answers_of_a_round, asked_for, need_optuna, search
from draftgraph.bench.speed import bench_run, inflated_pair, mark_of
from draftgraph.bench.speed_report import answers_to_rescore, label_of
from draftgraph.decoder import weights_read
from draftgraph.errors import UsageError
from draftgraph.files import claimed, held_alone
from draftgraph.notices import notice
from draftgraph.pair import Pair

LEAST = 1.0  # second: with less nothing is begun


def bench_paper(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    drafts: Mapping[str, Any] | None = None,
    size: Size = items.SIZES["full"],
    inflate: str | None = None,
    seed: int = 0,
    seconds: float | None = None,
    names: Mapping[str, str | None] | None = None,
) -> bool:
    """Measures what is missing in `out`, for `seconds` at most; returns whether the study is complete.

    `drafts` are further draft models by name, to be compared by their size.

    >>> bench_paper(pair, read_tasks(["prompts/"]), "paper", seconds=540)    # doctest: +SKIP
    """
    if pair.draft is None:
        raise UsageError("the paper's study needs a draft model: load the pair with one")
    if pair.draft_tokenizer is not None:
        raise UsageError("the paper's study needs a draft with the target's tokenizer: this one has another")
    if not any(name in tasks for name in items.MAIN):
        raise UsageError(f"none of the paper's tasks is there: name files after {', '.join(items.MAIN)}")
    items.refuse_draft_names(drafts or ())
    folder = Path(out).expanduser()
    study = Study(pair, tasks, folder, size, inflate, seed, dict(names or {}), Deadline(seconds))
    with claimed(folder, "--out"), held_alone(folder, "bench paper"):
        done = [study.times(item) for item in items.ITEMS]
        done += [compare_drafts(study, drafts or {}), search_best(study)]
        long_answer = study.usual_seconds() * size.long_tokens / size.new_tokens
        done += [study.has_time(long_answer) and look_into_answers(pair, tasks, folder, size, seed, study.deadline)]
    return all(done)


@dataclass
class Study:
    """What all parts of a study have in common."""

    pair: Pair
    tasks: Mapping[str, Sequence[str]]
    folder: Path
    size: Size
    inflate: str | None
    seed: int
    names: Mapping[str, str | None]
    deadline: Deadline
    here: Record = field(default_factory=dict)  # the configuration of the first item that was opened in this call
    _large: tuple[tuple[Any, Any], Pair] | None = None

    def times(self, item: Item, pair: Pair | None = None, names: Mapping[str, str | None] | None = None) -> bool:
        """Times an item; returns whether all of it is measured."""
        pair, names = pair or self.pair, dict(self.names) | dict(names or {})
        prompts = item.prompts_of(self.tasks, self.size.prompts)
        repeats = self.size.repeats if item.name == "main" else 1
        if not prompts or self.is_finished(item, prompts, repeats, pair, names):
            return True
        if not self.has_time():
            return False
        report = bench_run(
            pair,
            prompts,
            self.folder / item.name,
            inflate=self.inflate,
            large=self.large(pair),
            modes=item.modes,
            max_new_tokens=self.size.new_tokens,
            repeats=repeats,
            temperature=item.temperature,
            seed=self.seed,
            seconds=self.deadline.left,
            names=names,
        )
        self.here = self.here or report.configuration
        return report.measured == report.planned and not report.unscored

    def is_finished(
        self, item: Item, prompts: Mapping[str, Sequence[str]], repeats: int, pair: Pair, names: Record
    ) -> bool:
        """Whether an item need not be opened: that inflates the target, makes engines and draws its report again. Its
        circumstances must be those of the item that was opened."""
        folder = self.folder / item.name
        if not self.here or not (folder / FILE).exists() or not (folder / "report.json").exists():
            return False
        records = records_in(folder / FILE)
        weights = None if pair.draft is None else mark_of(pair.draft)
        own = {"modes": [PLAIN, *item.modes], "temperature": item.temperature, "draft_weights": weights}
        places = all_places(prompts, [PLAIN, *item.modes], repeats)
        asked = {(place, digest(prompts[place.task][place.prompt])) for place in places}
        known = {(Place.of(run), run["prompt_digest"]) for run in of_kind(records, "run")}
        same = records[0] == {"kind": "configuration"} | self.here | names | own
        return same and asked <= known and not answers_to_rescore(records)

    def has_time(self, seconds: float = LEAST) -> bool:
        """Whether there is time for work that takes so long; long work is begun in the first half of a call."""
        left, given = self.deadline.left, self.deadline.seconds
        return left is None or given is None or left >= max(LEAST, min(seconds, given / 2))

    def usual_seconds(self) -> float:
        """The median time of an answer in the main item."""
        file = self.folder / "main" / FILE
        runs = of_kind(records_in(file), "run") if file.exists() else []
        return median(run["first_token_seconds"] + run["seconds"] for run in runs) if runs else 0.0

    def large(self, pair: Pair) -> Pair:
        """The pair as it is timed. The last one is kept: most items are timed with the same."""
        if self._large is None or self._large[0] != (pair.target, pair.draft):
            target = self._large[1].target if self._large else inflated_pair(pair, self.inflate).target
            self._large = (pair.target, pair.draft), Pair(target, pair.draft, pair.tokenizer)
        return self._large[1]


def compare_drafts(study: Study, others: Mapping[str, Any]) -> bool:
    """Times every draft; returns whether all are measured."""
    pair = study.pair
    drafts = {items.NO_DRAFT: None, items.PAIRS_DRAFT: pair.draft, items.TARGET_ITSELF: pair.target} | dict(others)
    if pair.draft is pair.target:
        del drafts[items.TARGET_ITSELF]
    sizes = {name: 0 if draft is None else weights_read(draft) for name, draft in drafts.items()}
    write_files(study.folder / items.DRAFTS, {SIZES_FILE: known_sizes(study.folder) | sizes})
    done = []
    for name, draft in drafts.items():
        names = {} if name == items.PAIRS_DRAFT else {"draft": None if draft is None else name}
        done.append(study.times(items.draft_item(name), Pair(pair.target, draft, pair.tokenizer), names))
    return all(done)


def search_best(study: Study) -> bool:
    """Returns whether the search is complete; without Optuna it is left out."""
    try:
        need_optuna()
    except UsageError as error:
        notice(f"open question 3 is left out: {error}")
        return True
    prompts = items.first_prompts(study.tasks, items.MAIN, study.size.searched_prompts)
    known = report_in(study.folder)
    if len(known["trials"]) >= study.size.trials and known["rounds"] >= ROUNDS:
        found, asked = known["configuration"], asked_for(prompts, study.size.new_tokens, study.seed)
        here = {name: value for name, value in study.here.items() if name in found}
        if found == found | here | asked:  # it need not be opened: its circumstances are those of the items
            return True
    # A round is the longest that a search does without looking at the clock.
    if not study.has_time(answers_of_a_round(sum(map(len, prompts.values()))) * study.usual_seconds()):
        return False
    try:
        report = search(
            study.large(study.pair),
            prompts,
            study.folder / SEARCH,
            trials=study.size.trials,
            max_new_tokens=study.size.new_tokens,
            seconds=study.deadline.left,
            seed=study.seed,
            names=dict(study.names) | {"inflated": label_of(study.inflate)},
            compare_early=False,
        )
    except OutOfTime:
        return False
    return len(report.trials) >= study.size.trials and report.rounds >= ROUNDS
