"""Tasks to measure on: files of JSON lines, each a task named after its file; own ones; datasets of the hub. And how
good answers are, by the scores that their tasks are known for: the same wherever the tokens are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from draftgraph.bench.reporting import Table, read_data
from draftgraph.bench.runs import Record
from draftgraph.errors import UsageError, one_line
from draftgraph.extras import needed
from draftgraph.files import offline
from draftgraph.notices import notice
from draftgraph.text import decode

SUFFIX = ".jsonl"
OWN, OWN_FOLDER = "own", Path(__file__).with_name("own")
TAG = re.compile(r"^\s*\[[^\]]{1,6}\]")
Row = Mapping[str, Any]
NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?")
RESULT = re.compile(rf"####\s*({NUMBER.pattern})\s*$")
Texts = Sequence[str]
Scorer = Callable[[Texts, Texts], dict[str, float]]  # answers and references to scores by name


class TaskPrompt(str):
    """A prompt as text; `reference` is a good answer to it, `kind` what sort of task it is: both say how to score.

    >>> TaskPrompt("Translate German to English: Guten Tag", reference="Good day", kind="translation").reference
    'Good day'
    """

    reference: str | None
    kind: str | None

    def __new__(cls, prompt: str, reference: str | None = None, kind: str | None = None) -> TaskPrompt:
        self = super().__new__(cls, prompt)
        self.reference, self.kind = reference, kind
        return self


def read_prompts(file: Path) -> Iterator[TaskPrompt]:
    """Read lazily: rows behind the last one that is wanted are not checked."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield prompt_of(line, f"{file}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text: {error}") from error


def prompt_of(line: str, place: str) -> TaskPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{place}: not JSON; write {{"prompt": "..."}}') from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if isinstance(row, dict) and "prompt" not in row and isinstance(turns := row.get("turns"), list) and turns:
        prompt = turns[0]  # of a conversation, as in the rows of Spec-Bench and MT-Bench
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f'{place}: no prompt; write {{"prompt": "..."}}')
    return TaskPrompt(prompt, text_or_none(row.get("reference")), text_or_none(row.get("task")))


def text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


@dataclass(frozen=True)
class HubTask:
    """Where a dataset is, and what its rows ask: templates over their columns."""

    path: str
    split: str
    kind: str
    prompt: str
    reference: str
    config: str | None = None

    def prompt_of(self, row: Row) -> TaskPrompt:
        from jinja2 import Environment, StrictUndefined

        environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        environment.filters["untagged"] = partial(TAG.sub, "")
        templates = (self.prompt, self.reference, self.kind)
        prompt, reference, kind = (environment.from_string(text).render(row) for text in templates)
        return TaskPrompt(prompt, text_or_none(reference), kind)


HUB = {name: HubTask(**known) for name, known in read_data("hub.toml").items()}


def hub_prompts(name: str) -> Iterator[TaskPrompt]:
    """Row by row: no more of a dataset is fetched than is asked for."""
    task = HUB[name]
    if offline():
        raise UsageError(f"hub:{name} must be fetched, and HF_HUB_OFFLINE or DRAFTGRAPH_OFFLINE forbids it: use own")
    load_dataset = needed("datasets", f"hub:{name} needs the datasets package", "bench", "load_dataset")
    try:
        for row in load_dataset(task.path, task.config, split=task.split, streaming=True):
            yield task.prompt_of(row)
    except Exception as error:  # the hub, the disk and pyarrow each have errors of their own
        raise UsageError(f"cannot read {task.path} for hub:{name}: {one_line(error)}") from error


class Task(NamedTuple):
    name: str
    place: str
    prompts: Iterator[TaskPrompt]  # read as they are asked for


def read_tasks(
    places: Iterable[str | Path], names: Sequence[str] = (), prompts: int = 30
) -> dict[str, list[TaskPrompt]]:
    """The first prompts of every task in some places, or of the tasks that are named.

    A place is a file of JSON lines, a folder of such files, `own` for the tasks that come with this package or
    `hub:NAME` for a dataset of the Hugging Face hub. Prompts are strings that carry their references.

    >>> [prompt.reference for prompt in read_tasks(["own"], ["to_en"], 8)["to_en"]][5]
    'The train to the coast was an hour late, so we saw the sunset from the window.'
    """
    known: dict[str, Task] = {}
    for task in (task for place in places for task in tasks_in(place)):
        if task.name in known:
            raise UsageError(
                f"two tasks are named {task.name}: {known[task.name].place} and {task.place}; leave one out"
            )
        known[task.name] = task
    if missing := [name for name in names if name not in known]:
        raise UsageError(f"there is no task {missing[0]}: choose of {', '.join(known)}")
    found = {name: list(islice(known[name].prompts, prompts)) for name in names or known}
    if empty := [name for name, rows in found.items() if not rows]:
        raise UsageError(f'{known[empty[0]].place} has no rows: write one {{"prompt": "..."}} per line')
    return found


def tasks_in(place: str | Path) -> list[Task]:
    if str(place).startswith("hub:"):
        name = str(place).removeprefix("hub:")
        if name not in HUB:
            raise UsageError(f"there is no {place}: choose of {', '.join(f'hub:{known}' for known in HUB)}")
        return [Task(name, str(place), hub_prompts(name))]
    path = OWN_FOLDER if str(place) == OWN else Path(place).expanduser()
    if not (path.is_file() or path.is_dir()):
        raise UsageError(
            f"there is no file or folder {path}: give JSON lines with prompts, a folder of them, {OWN} or hub:NAME"
        )
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"the folder {path} has no {SUFFIX} files: give one with a file of prompts per task")
    return [Task(file.stem, str(file), read_prompts(file)) for file in files]


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
    package = needed("rouge_score.rouge_scorer", "some task scores need rouge-score", "bench")
    scorer = package.RougeScorer(list(kinds), use_stemmer=True)
    found = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    return {name: 100 * fmean(one[kind].fmeasure for one in found) for kind, name in kinds.items()}


def translation(answers: Texts, references: Texts) -> dict[str, float]:
    sacrebleu = needed("sacrebleu", "some task scores need sacrebleu", "bench")
    lines, expected = [" ".join(answer.split()) for answer in answers], [list(references)]
    return {
        "BLEU": sacrebleu.corpus_bleu(lines, expected, force=True).score,
        "chrF": sacrebleu.corpus_chrf(lines, expected).score,
    }


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
    """The reference and the kind of a prompt, if it has them."""
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
