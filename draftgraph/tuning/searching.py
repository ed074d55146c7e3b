"""Which setting of mode `graph` is fastest for a pair on this machine: a search, and the best beside the paper's and
`auto`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from draftgraph.bench.runs import Record, digest
from draftgraph.bench.speed import pair_key, refuse_unreadable
from draftgraph.config import GraphConfig
from draftgraph.errors import DraftGraphError
from draftgraph.files import claimed, held_alone
from draftgraph.notices import notice, progress_bar
from draftgraph.pair import Pair
from draftgraph.profile import Profile
from draftgraph.tuning import history
from draftgraph.tuning.search_report import COMPARED, Rounds, SearchReport, trial_named
from draftgraph.tuning.turns import Outcome, Turns

if TYPE_CHECKING:
    from optuna import Study

FINALISTS = 3  # of a noisy search the first need not be the best: so many are measured again, beside each other
ROUNDS = 3
SPARE = 1.5
PROFILE = "profile.toml"
WIDE = GraphConfig(mode="graph", growth="best-first", k=8, theta_prob=0.0, theta_sib=0.0)


class OutOfTime(DraftGraphError):
    """Not a single trial was done."""


class Limit:
    """Nothing is begun that would not be done in time, if answers take as long as they usually did, and half as long
    again."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._seconds: list[float] = []  # of an answer, by task or round

    def allows(self, answers: int) -> bool:
        usual = median(self._seconds) if self._seconds else 0.0
        return self._end is None or time.monotonic() + SPARE * answers * usual < self._end

    @contextmanager
    def watch(self, answers: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds.append((time.monotonic() - start) / answers)


def search(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    trials: int = 40,
    max_new_tokens: int = 64,
    seconds: float | None = None,
    seed: int = 0,
    names: Mapping[str, str | None] | None = None,
    profile: str | Path | None = None,
    compare_early: bool = True,
) -> SearchReport:
    """Tries settings of mode `graph`, the paper's first, and times the best beside it and `auto`.

    Every trial is kept in `out`: called again with the same arguments, or more `trials`, it goes on where it was;
    `seconds` stops it in time. The best setting is written to `profile`, or to profile.toml in `out`; `names` are
    those to show for the target and the draft. Where time is up before all trials are done, the best so far are
    compared all the same; not with `compare_early=False`, for callers that will go on.

    >>> report = search(pair, {"sky": ["Why is the sky blue?"]}, "search", trials=20)    # doctest: +SKIP
    >>> report.best.setting, report.best.outcome.speed.ratio                             # doctest: +SKIP
    """
    history.need_optuna()
    limit, folder = Limit(seconds), Path(out).expanduser()
    refuse_unreadable(pair, tasks, max_new_tokens)
    place = folder / PROFILE if profile is None else Path(profile).expanduser()
    with claimed(folder, "--out"), held_alone(folder, "tune --search"), history.quiet_optuna():
        key = pair_key(pair)
        study = history.opened(folder, key | dict(names or {}) | asked_for(tasks, max_new_tokens, seed), seed)
        try:
            turns = Turns(pair, tasks, max_new_tokens)
            if len(history.finished(study)) < trials or rounds_of(study).missing(ROUNDS):
                turns.modes |= {"paper": GraphConfig(mode="graph"), "wide": WIDE}
                turns.warm_up()
                try_settings(study, turns, trials, limit, answers_of_a_round(turns.prompts) if compare_early else 0)
                if compare_early or len(history.finished(study)) >= trials:
                    compare_best(study, turns, limit)
        except KeyboardInterrupt:
            if history.complete(study):
                keep(study, folder, place, key)
                notice(f"stopped: what was found so far is in {folder}, and the same command goes on")
            raise
        if not history.complete(study):
            raise OutOfTime("there was no time for a single trial: give it more seconds")
        return keep(study, folder, place, key)


def asked_for(tasks: Mapping[str, Sequence[str]], max_new_tokens: int, seed: int) -> Record:
    """What trials must have in common to stand beside each other, the pair and the machine apart."""
    return {
        "tasks": ", ".join(tasks),
        "prompts": sum(map(len, tasks.values())),
        "prompts_digest": digest({task: list(prompts) for task, prompts in tasks.items()}),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }


def try_settings(study: Study, turns: Turns, trials: int, limit: Limit, reserved: int) -> None:
    """Until so many are done, or time is left only for the answers that it is reserved for."""
    with progress_bar(f"{trials} trials") as report:
        while (done := len(history.finished(study))) < trials:
            report(done / trials)
            if not limit.allows(2 * turns.prompts + (reserved if done else 0)):
                return
            try_one(study, turns, limit)


def try_one(study: Study, turns: Turns, limit: Limit) -> None:
    """A setting on one task after the other; given up when it is behind the median of others on the tasks so far."""
    from optuna.trial import TrialState

    trial = study.ask(history.space())
    runs: list[Record] = []
    try:
        turns.modes["trial"] = GraphConfig(**history.setting_of(trial))
        for step, task in enumerate(turns.tasks):
            with limit.watch(2 * len(turns.tasks[task])):
                runs += turns.task(task, ["trial"])
            ratio = Outcome.of(runs, "trial").speed.ratio
            trial.report(ratio, step)
            trial.set_user_attr("runs", runs)
            if step + 1 < len(turns.tasks) and trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                return
        study.tell(trial, ratio)
    except BaseException:
        study.tell(trial, state=TrialState.FAIL)
        raise


def rounds_of(study: Study) -> Rounds:
    """The comparison to be made now: of the paper's setting, the best ones and `auto`."""
    from optuna.trial import TrialState

    paper = history.of_paper(study, TrialState.COMPLETE)
    chosen = {} if paper is None else {trial_named(paper.number): history.setting_of(paper)}
    for trial in history.complete(study):
        if (setting := history.setting_of(trial)) not in chosen.values() and len(chosen) <= FINALISTS:
            chosen[trial_named(trial.number)] = setting
    known = study.user_attrs.get(COMPARED, {})
    return Rounds(chosen, known["runs"] if known.get("settings") == chosen else [])


def answers_of_a_round(prompts: int) -> int:
    """At most: the finalists, the paper's setting, `auto` and plain decoding."""
    return (FINALISTS + 3) * prompts


def compare_best(study: Study, turns: Turns, limit: Limit) -> None:
    """Rounds over all prompts, each kept when it is done."""
    rounds = rounds_of(study)
    turns.modes |= {name: GraphConfig(**setting) for name, setting in rounds.settings.items()}
    modes = [*rounds.settings, "auto"]
    answers = (1 + len(modes)) * turns.prompts
    with progress_bar(f"the best {len(rounds.settings)} beside auto") as report:
        for done in range(rounds.done, ROUNDS):
            report(done / ROUNDS)
            if not limit.allows(answers):
                return
            with limit.watch(answers):
                rounds.runs.append([run for task in turns.tasks for run in turns.task(task, modes, done)])
            study.set_user_attr(COMPARED, {"settings": rounds.settings, "runs": rounds.runs})


def keep(study: Study, folder: Path, place: Path, key: Record) -> SearchReport:
    report = SearchReport.of(study, rounds_of(study))
    report.save(folder)
    measured = {"ratio": report.best.outcome.speed.ratio, "tokens_per_pass": report.best.outcome.tokens_per_pass}
    place.parent.mkdir(parents=True, exist_ok=True)
    Profile(report.best.setting, key, measured).save(place)
    return report
