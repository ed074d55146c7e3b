"""Which setting of mode `graph` is fastest for a pair on this machine: a search with Optuna, every trial on disk, and
the best settings timed beside the paper's and `auto`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from draftgraph.bench.runs import PLAIN, Deadline, Place, Record, digest, refuse_another, whole_lines
from draftgraph.bench.search_report import Outcome, SearchReport, Setting, Tried
from draftgraph.bench.speed import longest_of, pair_key, refuse_unreadable
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.config import CHOICES, GraphConfig
from draftgraph.distillation.folders import claimed, held_alone
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.models.cache import notice
from draftgraph.models.progress import progress_bar
from draftgraph.pair import Pair
from draftgraph.profile import Profile

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

TRIALS, PROFILE = "trials.jsonl", "profile.toml"
UNPRUNED = 5  # trials before any is given up: there must be something to be worse than
BEST_SHARE = 0.25
FINALISTS = 3  # of a noisy search the first need not be the best: so many are measured again, beside each other
ROUNDS = 3
SPARE = 1.5
WIDE = GraphConfig(mode="graph", growth="best-first", k=8, theta_prob=0.0, theta_sib=0.0)
COMPARED = "compared"
# Of a run, what the figures need.
KEPT = (
    "ms_per_token",
    "first_token_seconds",
    "steps",
    "new_tokens",
    "nodes",
    "draft_passes",
    "accepted_by_source",
    "loops",
    "same",
    "tie",
)


class OutOfTime(DraftGraphError):
    """Not a single trial was done."""


class Limit(Deadline):
    """Nothing is begun that would not be done in time, if answers take as long as they usually did, and half as long
    again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seconds: list[float] = []  # of an answer, by task or round

    def allows(self, answers: int) -> bool:
        usual = median(self._seconds) if self._seconds else 0.0
        return self.left is None or SPARE * answers * usual < self.left

    @contextmanager
    def watch(self, answers: int = 1) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds.append((time.monotonic() - start) / answers)


@dataclass
class Rounds:
    """A comparison on its way: these settings and `auto` in turns, all prompts in every round."""

    settings: dict[str, Setting]  # by trial
    runs: list[list[Record]] = field(default_factory=list)  # by round

    @property
    def done(self) -> int:
        return len(self.runs)

    @property
    def missing(self) -> bool:
        return not self.settings or self.done < ROUNDS


class Turns:
    """Settings against plain decoding, in turns on every prompt: a machine that slows down slows all of them alike.
    Modes are named by callers: `off` and `auto` are there."""

    def __init__(self, pair: Pair, tasks: Mapping[str, Sequence[str]], max_new_tokens: int) -> None:
        self.tasks = tasks
        self.prompts = sum(map(len, tasks.values()))
        self.modes = {PLAIN: GraphConfig(mode="off"), "auto": GraphConfig()}
        self._watch = Stopwatch(pair, self.modes, {"max_new_tokens": max_new_tokens, "seed": 0})
        self._plain: dict[str, list[int]] = {}

    def warm_up(self) -> None:
        """Whatever happens only once, in every mode that was named so far; `auto` keeps the prices of now."""
        longest = longest_of(self._watch.pair, self.tasks)
        for mode in self.modes:
            self._watch.warm_up(mode, longest)

    def task(self, task: str, modes: Sequence[str], repeat: int = 0) -> Iterator[Record]:
        """Plain decoding and these modes, prompt by prompt."""
        for number, prompt in enumerate(self.tasks[task]):
            for mode in (PLAIN, *modes):
                run = self._watch.run(mode, prompt, self._plain.get(prompt))
                if mode == PLAIN:
                    self._plain.setdefault(prompt, run["tokens"])
                yield Place(task, number, mode, repeat)._asdict() | {name: run[name] for name in KEPT}


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
    need_optuna()
    limit, folder = Limit(seconds), Path(out).expanduser()
    refuse_unreadable(pair, tasks, max_new_tokens)
    place = folder / PROFILE if profile is None else Path(profile).expanduser()
    with claimed(folder, "--out"), held_alone(folder, "tune --search"), quiet_optuna():
        key = pair_key(pair)
        study = opened(folder, key | dict(names or {}) | asked_for(tasks, max_new_tokens, seed), seed)
        try:
            turns = Turns(pair, tasks, max_new_tokens)
            if len(finished(study)) < trials or rounds_of(study).missing:
                turns.modes |= {"paper": GraphConfig(mode="graph"), "wide": WIDE}
                turns.warm_up()
                try_settings(study, turns, trials, limit, answers_of_a_round(turns.prompts) if compare_early else 0)
                if compare_early or len(finished(study)) >= trials:
                    compare_best(study, turns, limit)
        except KeyboardInterrupt:
            if complete(study):
                keep(study, folder, place, key)
                notice(f"stopped: what was found so far is in {folder}, and the same command goes on")
            raise
        if not complete(study):
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
        while (done := len(finished(study))) < trials:
            report(done / trials)
            if not limit.allows(2 * turns.prompts + (reserved if done else 0)):
                return
            try_one(study, turns, limit)


def try_one(study: Study, turns: Turns, limit: Limit) -> None:
    """A setting on one task after the other; given up when it is behind the median of others on the tasks so far."""
    from optuna.trial import TrialState

    trial = study.ask(space())
    runs: list[Record] = []
    try:
        turns.modes["trial"] = GraphConfig(**setting_of(trial))
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
    paper = of_paper(study, "COMPLETE")
    chosen = {} if paper is None else {trial_named(paper): setting_of(paper)}
    for trial in complete(study):
        if (setting := setting_of(trial)) not in chosen.values() and len(chosen) <= FINALISTS:
            chosen[trial_named(trial)] = setting
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
    report = report_of(study)
    report.save(folder)
    measured = {"ratio": report.best.outcome.speed.ratio, "tokens_per_pass": report.best.outcome.tokens_per_pass}
    place.parent.mkdir(parents=True, exist_ok=True)
    Profile(report.best.setting, key, measured).save(place)
    return report


def report_of(study: Study) -> SearchReport:
    rounds, trials = rounds_of(study), {}
    for trial in finished(study):
        outcome, pruned = Outcome.of(trial.user_attrs["runs"], "trial"), trial.state.name == "PRUNED"
        paper = bool(trial.user_attrs.get("paper"))
        trials[trial_named(trial)] = Tried(trial_named(trial), setting_of(trial), outcome, paper, pruned)
    compared = [trials[name] for name in rounds.settings]
    if runs := [run for of_round in rounds.runs for run in of_round]:
        compared = [Tried(one.name, one.setting, Outcome.of(runs, one.name), one.paper) for one in compared]
        compared.append(Tried("auto", {"mode": "auto"}, Outcome.of(runs, "auto")))
    configuration = dict(study.user_attrs["configuration"])
    return SearchReport(configuration, list(trials.values()), compared, rounds.done, importance(study))


def trial_named(trial: FrozenTrial) -> str:
    return f"trial {trial.number + 1}"


def need_optuna() -> None:
    """Before any work."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UsageError("a search needs optuna: pip install 'draftgraph[tune]'") from error


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Without a line for every trial."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def space() -> dict[str, BaseDistribution]:
    """What is searched; the paper's values are within."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    return {
        "growth": CategoricalDistribution(CHOICES["growth"]),
        "k": IntDistribution(1, 8),
        "tau": IntDistribution(1, 4),
        "theta_prob": FloatDistribution(0.0, 0.6, step=0.05),
        "theta_sib": FloatDistribution(0.0, 0.9, step=0.05),
        "max_depth": IntDistribution(1, 16),
        "max_nodes": IntDistribution(2, 64, log=True),
    }


def setting_of(trial: FrozenTrial | Trial) -> Setting:
    """Without the rounding errors of steps."""
    values = {name: round(value, 2) if isinstance(value, float) else value for name, value in trial.params.items()}
    return {"mode": "graph"} | values


def opened(folder: Path, configuration: Record, seed: int) -> Study:
    """The trials of a folder, or none yet; the paper's setting comes first."""
    import optuna
    from optuna.trial import TrialState

    study = study_in(folder / TRIALS)
    if known := study.user_attrs.get("configuration"):
        refuse_another(folder, known, configuration)
    study.set_user_attr("configuration", configuration)
    # Another seed for every call: otherwise it would draw again what the first one drew.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED)
    for trial in trials_of(study, "RUNNING"):  # its run was killed
        study.tell(trial.number, state=TrialState.FAIL)
    if not of_paper(study, "COMPLETE", "WAITING"):
        paper = GraphConfig(mode="graph")
        study.enqueue_trial({name: getattr(paper, name) for name in space()}, user_attrs={"paper": True})
    return study


def study_in(file: Path) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    if file.exists():
        os.truncate(file, len(whole_lines(file.read_bytes())))
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # of a run that was killed: the folder is ours alone
    try:
        storage = JournalStorage(JournalFileBackend(str(file), JournalFileOpenLock(str(file))))
        return optuna.create_study(storage=storage, study_name="draftgraph", direction="maximize", load_if_exists=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is damaged: remove it, or name another --out") from error


def trials_of(study: Study, *states: str) -> list[FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=[TrialState[state] for state in states])


def finished(study: Study) -> list[FrozenTrial]:
    """Trials with figures: measured on all tasks, or given up after some."""
    return trials_of(study, "COMPLETE", "PRUNED")


def complete(study: Study) -> list[FrozenTrial]:
    """Best first."""
    return sorted(trials_of(study, "COMPLETE"), key=lambda trial: trial.value or 0.0, reverse=True)


def of_paper(study: Study, *states: str) -> FrozenTrial | None:
    return next((trial for trial in trials_of(study, *states) if trial.user_attrs.get("paper")), None)


def importance(study: Study) -> dict[str, float]:
    """How much each value decides whether a setting is among the best quarter; in all 1. Empty: too few trials."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    if len(complete(study)) < 2 / BEST_SHARE:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE))
