"""Well-known tasks from the Hugging Face hub, their rows made into prompts and references."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from draftgraph.bench.task_prompts import TaskPrompt, text_or_none
from draftgraph.errors import UsageError, one_line
from draftgraph.files import offline

Row = Mapping[str, Any]
TAG = re.compile(r"^\s*\[[^\]]{1,6}\]")


@dataclass(frozen=True)
class HubTask:
    """Where a dataset is, and what its rows ask."""

    path: str
    config: str | None
    split: str
    prompt_of: Callable[[Row], TaskPrompt]


def maths(row: Row) -> TaskPrompt:
    return TaskPrompt(row["question"], row["answer"], "math")


def summary(row: Row) -> TaskPrompt:
    request = f"{row['document']}\n\nSummarize the above article in one sentence."
    return TaskPrompt(request, row["summary"], "summarization")


def instruction(row: Row) -> TaskPrompt:
    request = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
    return TaskPrompt(request, row["output"], "instruction")


def to_english(row: Row) -> TaskPrompt:
    pair = row["translation"]
    return TaskPrompt(f"Translate German to English: {pair['de']}", pair["en"], "translation")


def to_german(row: Row) -> TaskPrompt:
    pair = row["translation"]
    return TaskPrompt(f"Translate English to German: {pair['en']}", pair["de"], "translation")


def code(row: Row) -> TaskPrompt:
    request = "Complete the following Python function. Return the full function."
    return TaskPrompt(f"{request}\n\n```python\n{row['prompt'].rstrip()}\n```", row["canonical_solution"], "code")


def story(row: Row) -> TaskPrompt:
    """Prompts of the forum begin with a tag, as in [ WP ]."""
    idea = TAG.sub("", row["prompt"]).strip()
    return TaskPrompt(f"Write a short story based on this idea: {idea}", row["story"], "story")


def first_turn(row: Row) -> TaskPrompt:
    good = row["reference"][0] if row.get("reference") else None
    return TaskPrompt(row["prompt"][0], text_or_none(good), f"mt_bench/{row['category']}")


HUB = {
    "gsm8k": HubTask("openai/gsm8k", "main", "test", maths),
    "xsum": HubTask("EdinburghNLP/xsum", None, "test", summary),
    "alpaca": HubTask("tatsu-lab/alpaca", None, "train", instruction),
    "wmt14_deen": HubTask("wmt/wmt14", "de-en", "test", to_english),
    "wmt14_ende": HubTask("wmt/wmt14", "de-en", "test", to_german),
    "humaneval": HubTask("openai/openai_humaneval", None, "test", code),
    "writing_prompts": HubTask("euclaise/writingprompts", None, "test", story),
    "mt_bench": HubTask("HuggingFaceH4/mt_bench_prompts", None, "train", first_turn),
}


def hub_prompts(name: str) -> Iterator[TaskPrompt]:
    """Row by row: no more of a dataset is fetched than is asked for."""
    task = HUB[name]
    if offline():
        raise UsageError(f"hub:{name} must be fetched, and HF_HUB_OFFLINE or DRAFTGRAPH_OFFLINE forbids it: use own")
    try:
        load_dataset: Any = import_module("datasets").load_dataset
    except (ImportError, AttributeError) as error:  # a folder named datasets imports too, as an empty package
        raise UsageError(f"hub:{name} needs the datasets package: pip install 'draftgraph[bench]'") from error
    try:
        for row in load_dataset(task.path, task.config, split=task.split, streaming=True):
            yield task.prompt_of(row)
    except Exception as error:  # the hub, the disk and pyarrow each have errors of their own
        raise UsageError(f"cannot read {task.path} for hub:{name}: {one_line(error)}") from error
