"""How good a draft is for a target: agreement place by place, and what each structure would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftgraph.bench.answers import TargetAnswers, refuse_past_window
from draftgraph.bench.replay import Replay, Replayed
from draftgraph.bench.report import DraftReport, Row, Selection, StructureFigures, heat
from draftgraph.bench.structures import STRUCTURES
from draftgraph.config import GraphConfig
from draftgraph.engine.borrowing import unwrapped
from draftgraph.errors import UsageError
from draftgraph.models.progress import progress_bar
from draftgraph.pair import Pair
from draftgraph.stats import Stats
from draftgraph.text import encode


def bench_draft(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    *,
    structures: Mapping[str, GraphConfig] = STRUCTURES,
    temperatures: Sequence[float] = (0.0, 0.7),
    max_new_tokens: int = 128,
    seed: int = 0,
) -> DraftReport:
    """Lets the target answer the prompts of every task, and replays the answers with the draft.

    >>> report = bench_draft(pair, {"sky": ["Why is the sky blue?"]})    # doctest: +SKIP
    >>> report.rows[-1].agreement, report.to_dict()                      # doctest: +SKIP
    """
    if pair.tokenizer is None:
        raise UsageError("this pair has no tokenizer: prompts cannot be read")
    if not tasks or not all(tasks.values()):
        raise UsageError("every task needs prompts: give at least one task with one prompt")
    answers = TargetAnswers(pair.decoder, max_new_tokens, seed)
    replay = Replay(pair.decoder, dict(structures), max_new_tokens, answers.stop_ids)
    encoded = {task: [encode(pair.tokenizer, prompt) for prompt in prompts] for task, prompts in tasks.items()}
    for task, ids in encoded.items():
        refuse_past_window(pair.target, task, ids, max_new_tokens)
    rows: list[Row] = []
    for temperature in temperatures:
        measured: dict[str, list[Replayed]] = {}
        for task, ids in encoded.items():
            with progress_bar(f"{task}, {heat(temperature)}: the target answers") as report:
                given = answers.to(ids, temperature, report)
            with progress_bar(f"{task}, {heat(temperature)}: the draft follows") as report:
                measured[task] = replay.along(given, report)
        rows += rows_of(measured, "all")
        steady = {task: [one for one in found if not one.answer.loops] for task, found in measured.items()}
        rows += rows_of(steady, "without loops")
    settings = {
        "tasks": ", ".join(tasks),
        "prompts": sum(len(prompts) for prompts in tasks.values()),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": str(pair.decoder.target_engine.device),
    }
    return DraftReport(name_of(pair.target), name_of(pair.draft), settings, dict(structures), rows)


def rows_of(measured: dict[str, list[Replayed]], selection: Selection) -> list[Row]:
    """A row for every task that has answers, and one for their mean."""
    rows = [row_of(task, selection, replayed) for task, replayed in measured.items() if replayed]
    return [*rows, Row.mean(rows)] if rows else []


def row_of(task: str, selection: Selection, replayed: list[Replayed]) -> Row:
    answers = [one.answer for one in replayed]
    places = sum(len(answer.tokens) for answer in answers)
    return Row(
        task,
        answers[0].temperature,
        selection,
        len(answers),
        sum(answer.loops for answer in answers),
        sum(one.agreed for one in replayed) / places,
        sum(one.agreed_among_several for one in replayed) / places,
        {name: figures_of([one.stats[name] for one in replayed]) for name in replayed[0].stats},
    )


def figures_of(stats: list[Stats]) -> StructureFigures:
    total = sum(stats, Stats())
    levels = total.draft_passes / total.steps
    by_depth = [total.accepted_by_depth[depth] / total.steps for depth in sorted(total.accepted_by_depth)]
    return StructureFigures(total.mean_accepted_length, total.verified_tokens / total.steps, levels, by_depth)


def name_of(model: Any) -> str:
    inner = unwrapped(model)
    return Path(getattr(inner, "name_or_path", "")).name or type(inner).__name__
