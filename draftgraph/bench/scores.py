"""How good answers are, by the scores that their tasks are known for: the same wherever the tokens are the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import fmean
from typing import Any

from draftgraph.bench.reporting import Table
from draftgraph.bench.runs import Record
from draftgraph.errors import UsageError
from draftgraph.models.cache import notice
from draftgraph.text import decode

EXPLANATION = (
    "Task scores, of 100, compare first answers, which end at the limit of new tokens, with references: accuracy (the "
    "last number is right), the mean F1 of ROUGE, and BLEU and chrF of all answers together. The same answers have the "
    "same scores."
)
NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?")
RESULT = re.compile(rf"####\s*({NUMBER.pattern})\s*$")
Texts = Sequence[str]
Scorer = Callable[[Texts, Texts], dict[str, float]]  # answers and references to scores by name


@dataclass(frozen=True)
class TaskScore:
    task: str
    metric: str
    answers: int  # of every mode, to the same prompts
    by_mode: dict[str, float]  # of 100


def accuracy(answers: Texts, references: Texts) -> dict[str, float]:
    """As GSM8K counts it.

    >>> accuracy(["It costs $1,200.", "So 7"], ["2 * 600 = 1200 #### 1200", "#### 8"])
    {'accuracy': 50.0}
    """
    pairs = zip(answers, references, strict=True)
    return {"accuracy": 100 * fmean(last_number(answer) == last_number(reference) for answer, reference in pairs)}


def last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def rouge(answers: Texts, references: Texts) -> dict[str, float]:
    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scorer = needed("rouge_score.rouge_scorer", "rouge-score").RougeScorer(list(kinds), use_stemmer=True)
    found = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    return {name: 100 * fmean(one[kind].fmeasure for one in found) for kind, name in kinds.items()}


def translation(answers: Texts, references: Texts) -> dict[str, float]:
    sacrebleu = needed("sacrebleu", "sacrebleu")
    lines, expected = [" ".join(answer.split()) for answer in answers], [list(references)]
    return {
        "BLEU": sacrebleu.corpus_bleu(lines, expected, force=True).score,
        "chrF": sacrebleu.corpus_chrf(lines, expected).score,
    }


def needed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"some task scores need {package}: pip install 'draftgraph[bench]'") from error


# By what a row's `task` says up to a slash, or else by the task's name.
SCORERS: dict[str, Scorer] = {
    "summarization": rouge,
    "summary": rouge,
    "xsum": rouge,
    "translation": translation,
    "to_en": translation,
    "from_en": translation,
    "wmt14_deen": translation,
    "wmt14_ende": translation,
}


def scorer_of(run: Record) -> Scorer | None:
    """None where there is nothing to score by: no reference, or a task of another sort."""
    if not run.get("reference"):
        return None
    if RESULT.search(run["reference"]):
        return accuracy
    kind = (run.get("task_kind") or run["task"]).partition("/")[0]
    return SCORERS.get(kind) or SCORERS.get(run["task"])


def to_score(tokenizer: Any, prompt: str, tokens: list[int]) -> Record:
    """What the record of an answer needs, so that it can be scored whenever a report is made."""
    return {"text": decode(tokenizer, tokens)} | known_of(prompt)


def known_of(prompt: str) -> Record:
    """What a prompt tells of a good answer."""
    return {"reference": getattr(prompt, "reference", None), "task_kind": getattr(prompt, "kind", None)}


def scores_of(runs: Sequence[Record]) -> list[TaskScore]:
    """Of the first answers to the prompts that every mode has answered."""
    by_task: dict[tuple[str, Scorer], dict[int, dict[str, Record]]] = {}
    modes = dict.fromkeys(run["mode"] for run in runs if "text" in run)
    for run in runs:
        if "text" in run and (scorer := scorer_of(run)) is not None:
            by_task.setdefault((run["task"], scorer), {}).setdefault(run["prompt"], {})[run["mode"]] = run
    missing: dict[str, None] = {}
    found: list[TaskScore] = []
    for (task, scorer), prompts in by_task.items():
        whole = [answers for answers in prompts.values() if len(answers) == len(modes)]
        try:
            found += scored(task, scorer, {mode: [answers[mode] for answers in whole] for mode in modes})
        except UsageError as error:
            missing[str(error)] = None
    for line in missing:
        notice(line)
    return found


def scored(task: str, scorer: Scorer, runs: dict[str, list[Record]]) -> Iterator[TaskScore]:
    metrics: dict[str, dict[str, float]] = {}
    for mode, answers in runs.items():
        if answers:
            scores = scorer([run["text"] for run in answers], [run["reference"] for run in answers])
            for metric, value in scores.items():
                metrics.setdefault(metric, {})[mode] = value
    for metric, by_mode in metrics.items():
        yield TaskScore(task, metric, len(next(iter(runs.values()))), by_mode)


def scores_table(scores: Sequence[TaskScore]) -> Table:
    modes = dict.fromkeys(mode for score in scores for mode in score.by_mode)
    lines = [[mode, *(f"{score.by_mode[mode]:.1f}" for score in scores)] for mode in modes]
    return Table("Task scores", ["mode", *(f"{score.task} {score.metric}" for score in scores)], lines)
