"""Which setting of mode `graph` is fastest for a pair on this machine: a search with Optuna, every trial on disk, and
the best settings timed beside the paper's and `auto`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftgraph.bench import reporting
from draftgraph.bench.reporting import Table
from draftgraph.bench.runs import PLAIN, Deadline, Place, Record, digest, refuse_another, whole_lines
from draftgraph.bench.speed import longest_of, pair_key, refuse_unreadable
from draftgraph.bench.speed_report import Speed, geometric_mean, mode_figures, ratios_of, times_of
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.config import CHOICES, GraphConfig
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.extras import needed
from draftgraph.files import claimed, held_alone
from draftgraph.notices import notice, progress_bar
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
WIDE = GraphConfig(mode="graph", growth="best-first", k=8, theta_prob=0.0, theta_sib=0.0)
COMPARED = "compared"
# Of a run, what the figures need.
KEPT = [
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
]
HIDDEN = ("target", "draft", "target_weights", "draft_weights", "prompts_digest")
SPEEDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # that lines of the picture show
Setting = dict[str, Any]


class OutOfTime(DraftGraphError):
    """Time was up before the first trial was done."""


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
        """Do all one-time work in every mode so far; `auto` keeps the prices that are measured now."""
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

    Examples:
        >>> report = search(pair, {"sky": ["Why is the sky blue?"]}, "search", trials=20)  # doctest: +SKIP
        >>> report.best.setting, report.best.outcome.speed.ratio  # doctest: +SKIP
    """
    need_optuna()
    limit, folder = Deadline(seconds), Path(out).expanduser()
    refuse_unreadable(pair, tasks, max_new_tokens)
    place = folder / PROFILE if profile is None else Path(profile).expanduser()
    with claimed(folder, "--out"), held_alone(folder, "tune --search"), quiet_optuna():
        key = pair_key(pair)
        study = opened(folder, key | dict(names or {}) | asked_for(tasks, max_new_tokens, seed), seed)
        try:
            turns = Turns(pair, tasks, max_new_tokens)
            if len(finished(study)) < trials or len(rounds_of(study)[1]) < ROUNDS:
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


def try_settings(study: Study, turns: Turns, trials: int, limit: Deadline, reserved: int) -> None:
    """Until `trials` are done, or only the time for the `reserved` answers is left."""
    with progress_bar(f"{trials} trials") as report:
        while (done := len(finished(study))) < trials:
            report(done / trials)
            if not limit.allows(2 * turns.prompts + (reserved if done else 0)):
                return
            try_one(study, turns, limit)


def try_one(study: Study, turns: Turns, limit: Deadline) -> None:
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


def rounds_of(study: Study) -> tuple[dict[str, Setting], list[list[Record]]]:
    """The final comparison: of the paper's setting, the best ones and `auto`, in turns with all prompts in every round.
    The settings by trial, and the runs of every round so far."""
    paper = of_paper(study, "COMPLETE")
    chosen = {} if paper is None else {trial_named(paper): setting_of(paper)}
    for trial in complete(study):
        if (setting := setting_of(trial)) not in chosen.values() and len(chosen) <= FINALISTS:
            chosen[trial_named(trial)] = setting
    known = study.user_attrs.get(COMPARED, {})
    return chosen, known["runs"] if known.get("settings") == chosen else []


def answers_of_a_round(prompts: int) -> int:
    """At most the finalists, the paper's setting, `auto` and plain decoding, on every prompt."""
    return (FINALISTS + 3) * prompts


def compare_best(study: Study, turns: Turns, limit: Deadline) -> None:
    """Rounds over all prompts, each kept when it is done."""
    settings, runs = rounds_of(study)
    turns.modes |= {name: GraphConfig(**setting) for name, setting in settings.items()}
    modes = [*settings, "auto"]
    answers = (1 + len(modes)) * turns.prompts
    with progress_bar(f"the best {len(settings)} beside auto") as report:
        for done in range(len(runs), ROUNDS):
            report(done / ROUNDS)
            if not limit.allows(answers):
                return
            with limit.watch(answers):
                runs.append([run for task in turns.tasks for run in turns.task(task, modes, done)])
            study.set_user_attr(COMPARED, {"settings": settings, "runs": runs})


def keep(study: Study, folder: Path, place: Path, key: Record) -> SearchReport:
    report = report_of(study)
    report.save(folder)
    measured = {"ratio": report.best.outcome.speed.ratio, "tokens_per_pass": report.best.outcome.tokens_per_pass}
    place.parent.mkdir(parents=True, exist_ok=True)
    Profile(report.best.setting, key, measured).save(place)
    return report


def report_of(study: Study) -> SearchReport:
    (settings, rounds), trials = rounds_of(study), {}
    for trial in finished(study):
        outcome, pruned = Outcome.of(trial.user_attrs["runs"], "trial"), trial.state.name == "PRUNED"
        paper, name = bool(trial.user_attrs.get("paper")), trial_named(trial)
        trials[name] = Tried(name, setting_of(trial), outcome, paper, pruned)
    compared = [trials[name] for name in settings]
    if runs := [run for of_round in rounds for run in of_round]:
        compared = [replace(one, outcome=Outcome.of(runs, one.name)) for one in compared]
        compared.append(Tried("auto", {"mode": "auto"}, Outcome.of(runs, "auto")))
    configuration = dict(study.user_attrs["configuration"])
    return SearchReport(configuration, list(trials.values()), compared, len(rounds), importance(study))


def trial_named(trial: FrozenTrial) -> str:
    return f"trial {trial.number + 1}"


def need_optuna() -> None:
    needed("optuna", "a search needs optuna", "tune")


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence the line that Optuna logs for every trial."""
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
    """The values of a trial, rounded: steps of floats add up errors."""
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
    """Complete trials, best first."""
    return sorted(trials_of(study, "COMPLETE"), key=lambda trial: trial.value or 0.0, reverse=True)


def of_paper(study: Study, *states: str) -> FrozenTrial | None:
    return next((trial for trial in trials_of(study, *states) if trial.user_attrs.get("paper")), None)


def importance(study: Study) -> dict[str, float]:
    """How much each value decides whether a setting is among the best quarter; in all 1. Empty: too few trials."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    if len(complete(study)) < 2 / BEST_SHARE:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE))


@dataclass(frozen=True)
class Outcome:
    """How a setting did. A prompt's times are medians of its repeats, a task's speed is that of its median prompt."""

    speed: Speed  # against plain decoding of the same prompts, in turns
    tokens_per_pass: float
    nodes_per_pass: float
    draft_passes: float  # per pass of the target
    tasks: dict[str, float]  # how many times as fast, by task
    answers: int
    same: int  # with the tokens of plain decoding
    ties: int  # others, that part where two tokens were as good as tied

    @classmethod
    def of(cls, runs: Sequence[Record], mode: str) -> Outcome:
        own, plain = [run for run in runs if run["mode"] == mode], times_of(runs, PLAIN)
        found, ratios = mode_figures(mode, own, plain, ()), ratios_of(own, mode, plain)
        tasks = {task: geometric_mean({task: of_task}, np.median).ratio for task, of_task in ratios.items()}
        names = ("tokens_per_pass", "nodes_per_pass", "draft_passes")
        figures = {name: getattr(found.overall, name) for name in names}
        counts = {"answers": found.answers, "same": sum(run["same"] for run in own), "ties": found.ties}
        return cls(speed=geometric_mean(ratios, np.median), tasks=tasks, **figures, **counts)

    @property
    def step_cost(self) -> float:
        """A step, draft and check together, in passes of the target over one token."""
        return self.tokens_per_pass / self.speed.ratio


@dataclass(frozen=True)
class Tried:
    """A setting, and how it did; `auto` has no trial and no setting."""

    name: str
    setting: Setting
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

    @property
    def best(self) -> Tried:
        """The fastest of the fixed settings."""
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
        drawn = reporting.has_matplotlib()
        if drawn:
            reporting.save_figure(picture(self), folder, "search")
        lead, plot = (title_of(self), settings_of(self), explanation_of(self)), "search.svg" if drawn else None
        text = reporting.document(lead, tables(self), plot, "Tokens per pass against the cost of a step")
        reporting.write_files(folder, {"search.json": self.to_dict(), "search.md": text})


def title_of(report: SearchReport) -> str:
    known = report.configuration
    return f"Settings of graph for {known['target']}, draft: {known['draft'] or 'none'}"


def settings_of(report: SearchReport) -> str:
    pruned = sum(one.pruned for one in report.trials)
    counts = f"{len(report.trials)} trials, {pruned} given up early; {report.rounds} rounds of comparison"
    return f"{reporting.described(report.configuration, HIDDEN)}; {counts}"


def explanation_of(report: SearchReport) -> str:
    said = {"columns": True, "from_trials": not report.rounds, "importance": report.importance}
    return "".join(reporting.TEXTS["search"][name] for name, holds in said.items() if holds)


def marked(name: str, **marks: bool) -> str:
    """
    >>> marked("trial 1", best=True, paper=True)
    'trial 1 (best, paper)'
    """
    words = ", ".join(mark for mark, holds in marks.items() if holds)
    return f"{name} ({words})" if words else name


def tables(report: SearchReport) -> Iterator[Table]:
    def name(one: Tried) -> str:
        return marked(one.name, best=one is report.best, paper=one.paper)

    header = ["setting", "times as fast", "95% interval", "tokens per pass", "cost of a step", "nodes per pass"]
    lines = []
    for one in report.compared:
        found = one.outcome
        figures = (found.tokens_per_pass, found.step_cost, found.nodes_per_pass, found.draft_passes)
        cells = [str(found.speed), found.speed.interval, *map(reporting.number, figures)]
        lines.append([name(one), *cells, reporting.same_of(found.same, found.answers, found.ties)])
    yield Table("Beside plain decoding", [*header, "draft passes", "same tokens"], lines)

    tasks = list(report.compared[0].outcome.tasks)
    lines = [[name(one), *(f"{one.outcome.tasks[task]:.2f}x" for task in tasks)] for one in report.compared]
    yield Table("Times as fast as plain decoding, by task", ["setting", *tasks], lines)

    fixed = [one for one in report.compared if one is not report.auto]
    values = [value for value in fixed[0].setting if value != "mode"]
    lines = [[name(one), *(f"{one.setting[value]}" for value in values)] for one in fixed]
    yield Table("Their values", ["setting", *values], lines)

    if report.importance:
        best = report.best.setting
        lines = [[value, f"{weight:.0%}", f"{best[value]}"] for value, weight in report.importance.items()]
        yield Table("Which values matter", ["value", "weight", "best"], lines)


def picture(report: SearchReport) -> Any:
    """What a step gives against what it costs, a point for every trial."""
    figure = reporting.new_figure(title_of(report), 8, 5.4, fontsize="medium")
    axes = figure.subplots()
    whole, pruned = ([one for one in report.trials if one.pruned is state] for state in (False, True))
    speeds = [one.outcome.speed.ratio for one in whole]
    points = axes.scatter(*places(whole), c=speeds, s=40, cmap="viridis", label="trial")
    figure.colorbar(points, ax=axes, label="times as fast as plain decoding")
    if pruned:
        axes.scatter(*places(pruned), c="lightgrey", s=20, marker="x", label="given up early: of its first tasks only")
    marked = {"the paper": (report.paper, "D"), "best": (report.best, "*"), "auto": (report.auto, "s")}
    for (name, (one, marker)), colour in zip(marked.items(), reporting.COLOURS[1:], strict=False):
        if one is not None:
            style = {"marker": marker, "s": 150, "facecolors": "none", "edgecolors": colour, "linewidths": 2}
            axes.scatter(*places([one]), label=f"{name}: {one.outcome.speed}", zorder=3, **style)
    costs, tokens = places([*report.trials, *report.compared])
    left, bottom, right, top = 0.9 * min(1.0, *costs), 0.9, 1.05 * max(costs), 1.1 * max(tokens)
    for speed in SPEEDS:  # lines of one speed: tokens per pass divided by cost
        end = min(right, top / speed)
        axes.plot([0, end], [0, speed * end], color="grey", linewidth=0.7, linestyle="dotted", zorder=0)
        if end > left and speed * end > bottom:
            axes.annotate(f"{speed:g}x", (end, speed * end), color="grey", fontsize="small", ha="right", va="top")
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.set(xlabel="cost of a step, in passes of the target over one token", ylabel="tokens per pass")
    axes.legend(frameon=False, loc="best", fontsize="small")
    return figure


def places(several: list[Tried]) -> tuple[list[float], list[float]]:
    return [one.outcome.step_cost for one in several], [one.outcome.tokens_per_pass for one in several]
