"""Runs the study: every item is timed in a folder of its own; what is looked into is kept beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from draftgraph.bench.paper.best_setting import search_best
from draftgraph.bench.paper.draft_sizes import compare_drafts
from draftgraph.bench.paper.items import ITEMS, MAIN, SIZES, Item, Size, refuse_draft_names
from draftgraph.bench.paper.looking import look_into_answers
from draftgraph.bench.runs import FILE, PLAIN, Place, Record, all_places, digest, of_kind, records_in
from draftgraph.bench.speed import Deadline, bench_run, inflated_pair, mark_of
from draftgraph.bench.speed_report import answers_to_rescore
from draftgraph.errors import UsageError
from draftgraph.files import claimed, held_alone
from draftgraph.pair import Pair

LEAST = 1.0  # second: with less nothing is begun


def bench_paper(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    drafts: Mapping[str, Any] | None = None,
    size: Size = SIZES["full"],
    inflate: str | None = None,
    seed: int = 0,
    seconds: float | None = None,
    names: Mapping[str, str | None] | None = None,
) -> bool:
    """Measures what is missing in `out`, until it is done or `seconds` are over: whether it is done.

    `drafts` are further draft models by name, to be compared by their size.

    >>> bench_paper(pair, read_tasks(["prompts/"]), "paper", seconds=540)    # doctest: +SKIP
    """
    if pair.draft is None:
        raise UsageError("the paper's study needs a draft model: load the pair with one")
    if not any(name in tasks for name in MAIN):
        raise UsageError(f"none of the paper's tasks is there: name files after {', '.join(MAIN)}")
    refuse_draft_names(drafts or ())
    folder = Path(out).expanduser()
    study = Study(pair, tasks, folder, size, inflate, seed, dict(names or {}), Deadline(seconds))
    with claimed(folder, "--out"), held_alone(folder, "bench paper"):
        done = [study.times(item) for item in ITEMS]
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
        """Whether all of it is measured."""
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
        asked = {
            (place, digest(prompts[place.task][place.prompt]))
            for place in all_places(prompts, [PLAIN, *item.modes], repeats)
        }
        known = {(Place.of(run), run["prompt_digest"]) for run in of_kind(records, "run")}
        same = records[0] == {"kind": "configuration"} | self.here | names | own
        return same and asked <= known and not answers_to_rescore(records)

    def has_time(self, seconds: float = LEAST) -> bool:
        """For something that takes so long. What takes most of any call is begun early in one."""
        left, given = self.deadline.left, self.deadline.seconds
        return left is None or given is None or left >= max(LEAST, min(seconds, given / 2))

    def usual_seconds(self) -> float:
        """Of an answer in the main item, so far."""
        file = self.folder / "main" / FILE
        runs = of_kind(records_in(file), "run") if file.exists() else []
        return median(run["first_token_seconds"] + run["seconds"] for run in runs) if runs else 0.0

    def large(self, pair: Pair) -> Pair:
        """The pair as it is timed. The last one is kept: most items are timed with the same."""
        if self._large is None or self._large[0] != (pair.target, pair.draft):
            target = self._large[1].target if self._large else inflated_pair(pair, self.inflate).target
            self._large = (pair.target, pair.draft), Pair(target, pair.draft, pair.tokenizer)
        return self._large[1]
