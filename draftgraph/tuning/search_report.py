"""What a search found, as data: every trial, the best ones beside `auto`, and which values mattered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.runs import Record
from draftgraph.files import replacing
from draftgraph.tuning import history
from draftgraph.tuning.turns import Outcome

if TYPE_CHECKING:
    from optuna import Study

COMPARED = "compared"


@dataclass
class Rounds:
    """A comparison on its way: these settings and `auto` in turns, all prompts in every round."""

    settings: dict[str, history.Setting]  # by trial
    runs: list[list[Record]] = field(default_factory=list)  # by round

    @property
    def done(self) -> int:
        return len(self.runs)

    def missing(self, rounds: int) -> bool:
        return not self.settings or self.done < rounds


@dataclass(frozen=True)
class Tried:
    """A setting, and how it did; `auto` has no trial and no setting."""

    name: str
    setting: history.Setting
    outcome: Outcome
    paper: bool = False
    pruned: bool = False  # given up after some tasks: its figures are of those

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"step_cost": self.outcome.step_cost}


@dataclass(frozen=True)
class SearchReport:
    """What `search` measured."""

    configuration: Record
    trials: list[Tried]
    compared: list[Tried]  # the paper's setting first, auto last; by trials alone as long as there is no round
    rounds: int
    importance: dict[str, float]  # of values, in all 1; empty: too few trials

    @classmethod
    def of(cls, study: Study, rounds: Rounds) -> SearchReport:
        trials = list(tried(study))
        by_name = {one.name: one for one in trials}
        finalists = [by_name[name] for name in rounds.settings]
        if runs := [run for of_round in rounds.runs for run in of_round]:
            finalists = [Tried(one.name, one.setting, Outcome.of(runs, one.name), one.paper) for one in finalists] + [
                Tried("auto", {"mode": "auto"}, Outcome.of(runs, "auto"))
            ]
        configuration = dict(study.user_attrs["configuration"])
        return cls(configuration, trials, finalists, rounds.done, history.importance(study))

    @property
    def best(self) -> Tried:
        """Of the fixed settings."""
        return max((one for one in self.compared if one.name != "auto"), key=lambda one: one.outcome.speed.ratio)

    @property
    def paper(self) -> Tried | None:
        return next((one for one in self.compared if one.paper), None)

    @property
    def auto(self) -> Tried | None:
        return next((one for one in self.compared if one.name == "auto"), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration,
            "best": self.best.to_dict(),
            "rounds": self.rounds,
            "compared": [one.to_dict() for one in self.compared],
            "importance": self.importance,
            "trials": [one.to_dict() for one in self.trials],
        }

    def save(self, folder: Path) -> None:
        """Writes search.json, search.md and, where there is matplotlib, search.svg and search.png."""
        from draftgraph.tuning.search_plot import save_plot
        from draftgraph.tuning.search_tables import to_markdown

        drawn = save_plot(self, folder)
        for name, content in (
            ("search.json", json.dumps(self.to_dict(), indent=2) + "\n"),
            ("search.md", to_markdown(self, "search.svg" if drawn else None)),
        ):
            with replacing(folder / name) as partial:
                partial.write_text(content, encoding="utf-8")


def tried(study: Study) -> Iterator[Tried]:
    from optuna.trial import TrialState

    for trial in history.finished(study):
        outcome, pruned = Outcome.of(trial.user_attrs["runs"], "trial"), trial.state is TrialState.PRUNED
        is_paper = bool(trial.user_attrs.get("paper"))
        yield Tried(trial_named(trial.number), history.setting_of(trial), outcome, is_paper, pruned)


def trial_named(number: int) -> str:
    return f"trial {number + 1}"
