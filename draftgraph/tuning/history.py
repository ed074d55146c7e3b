"""Settings that were tried, as an Optuna study: what to try, what to give up early, and all of it on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.runs import Record, refuse_another, whole_lines
from draftgraph.config import CHOICES, GraphConfig
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

FILE = "trials.jsonl"
NAME = "draftgraph"
UNPRUNED = 5  # trials before any is given up: there must be something to be worse than
BEST_SHARE = 0.25
Setting = dict[str, Any]


def need_optuna() -> None:
    """Before any work."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UsageError("a search needs optuna: pip install 'draftgraph[tune]'") from error


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


def paper() -> Setting:
    config = GraphConfig(mode="graph")
    return {name: getattr(config, name) for name in space()}


def setting_of(trial: FrozenTrial | Trial) -> Setting:
    """Without the rounding errors of steps."""
    values = {name: round(value, 2) if isinstance(value, float) else value for name, value in trial.params.items()}
    return {"mode": "graph"} | values


def opened(folder: Path, configuration: Record, seed: int) -> Study:
    """The trials of a folder, or none yet; the paper's setting comes first."""
    import optuna
    from optuna.trial import TrialState

    study = study_in(folder / FILE)
    if known := study.user_attrs.get("configuration"):
        refuse_another(folder, known, configuration)
    study.set_user_attr("configuration", configuration)
    # Another seed for every call: otherwise it would draw again what the first one drew.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):  # its run was killed
        study.tell(trial.number, state=TrialState.FAIL)
    if not of_paper(study, TrialState.COMPLETE, TrialState.WAITING):
        study.enqueue_trial(paper(), user_attrs={"paper": True})
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
        return optuna.create_study(storage=storage, study_name=NAME, direction="maximize", load_if_exists=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is damaged: remove it, or name another --out") from error


def finished(study: Study) -> list[FrozenTrial]:
    """Trials with figures: measured on all tasks, or given up after some."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def complete(study: Study) -> list[FrozenTrial]:
    """Best first."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(trials, key=lambda trial: trial.value or 0.0, reverse=True)


def of_paper(study: Study, *states: Any) -> FrozenTrial | None:
    trials = study.get_trials(deepcopy=False, states=states)
    return next((trial for trial in trials if trial.user_attrs.get("paper")), None)


def importance(study: Study) -> dict[str, float]:
    """How much each value decides whether a setting is among the best quarter; in all 1. Empty: too few trials."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    if len(complete(study)) < 2 / BEST_SHARE:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE))


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
