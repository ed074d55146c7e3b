"""The best fixed setting of mode `graph`, searched for: how far the paper's and `auto` are from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.bench.paper.finding import Finding
from draftgraph.bench.paper.items import MAIN, first_prompts
from draftgraph.bench.report import Table
from draftgraph.bench.speed_report import label_of
from draftgraph.errors import UsageError
from draftgraph.notices import notice
from draftgraph.tuning.history import need_optuna
from draftgraph.tuning.searching import ROUNDS, OutOfTime, answers_of_a_round, asked_for, search

if TYPE_CHECKING:
    from draftgraph.bench.paper.study import Study

SEARCH = "search"  # its folder
QUESTION = "Open question 3: which fixed setting is the best?"
TOLD_VALUES = 3  # that mattered most


def search_best(study: Study) -> bool:
    """Whether it is done, or cannot be: without Optuna the study goes on with the rest."""
    try:
        need_optuna()
    except UsageError as error:
        notice(f"open question 3 is left out: {error}")
        return True
    prompts = first_prompts(study.tasks, MAIN, study.size.searched_prompts)
    if is_finished(study, prompts):
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


def is_finished(study: Study, prompts: Mapping[str, Sequence[str]]) -> bool:
    """Whether it need not be opened: its circumstances are those of the items."""
    report = report_in(study.folder)
    if len(report["trials"]) < study.size.trials or report["rounds"] < ROUNDS:
        return False
    known, asked = report["configuration"], asked_for(prompts, study.size.new_tokens, study.seed)
    return bool(known == known | {name: value for name, value in study.here.items() if name in known} | asked)


def report_in(folder: Path) -> dict[str, Any]:
    """What `SearchReport.to_dict` gave, if it was called so far."""
    file = folder / SEARCH / "search.json"
    nothing: dict[str, Any] = {"trials": [], "rounds": 0}
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else nothing


def finding(name: str, folder: Path) -> Finding | None:
    """None: the search is not done. Where it cannot be done, that is the answer."""
    report = report_in(folder)
    if report["rounds"] >= ROUNDS:
        return found_in(name, report)
    try:
        need_optuna()
    except UsageError as error:
        return Finding(name, QUESTION, f"Not measured: {error}", timed=False)
    return None


def found_in(name: str, report: dict[str, Any]) -> Finding:
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
