"""Where the prompts of a training come from: a JSONL file, Python source, or a dataset."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from draftgraph.distillation.functions import python_prompts
from draftgraph.distillation.passages import characters_per_token, requests_about
from draftgraph.distillation.prompt import Prompt
from draftgraph.errors import UsageError, one_line

__all__ = ["Prompt", "read_prompts"]

PASSAGE = "text"
COLUMNS = ("prompt", "instruction", "question", "text")
PYTHON = re.compile(r"python(:(?P<count>[1-9]\d*))?")
# A split may hold a colon of its own: train[:1%]
DATASET = re.compile(r"datasets:(?P<name>[^:]+)(:(?P<split>[^:\[]+(\[[^\]]*\])?)(:(?P<column>[^:]+))?)?")


def read_prompts(source: str, tokenizer: Any, limit: int | None, seed: int) -> list[Prompt]:
    """Prompts in an order drawn by `seed`, no two alike, at most `limit` of them.

    `source` is the path of a JSONL file, `python[:COUNT]` (functions of the standard library and of installed packages
    with a permissive licence) or `datasets:NAME[:SPLIT[:COLUMN]]`. Passages of text become requests about them.
    """
    if python := PYTHON.fullmatch(source):
        return python_prompts(int(python["count"]) if python["count"] else limit, seed)
    rows = list(_rows_of_dataset(source) if source.startswith("datasets:") else _rows_of_file(source))
    passages = list(dict.fromkeys(row.text for row in rows if row.kind == PASSAGE))
    prompts = [row for row in rows if row.kind != PASSAGE]
    prompts += requests_about(passages, seed, characters_per_token=characters_per_token(passages, tokenizer))
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())
    if not different:
        raise UsageError(f"{source} holds no prompts: give a source that has some")
    random.Random(seed).shuffle(different)
    return different[:limit]


def _rows_of_file(source: str) -> Iterator[Prompt]:
    try:
        lines = Path(source).expanduser().read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UsageError(
            f"{source}: no such file; prompts come from a JSONL file, from python[:COUNT] or from datasets:NAME"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{source}: cannot be read ({one_line(error)}): name a JSONL file") from error
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield _row(line)
        except UsageError as error:
            raise UsageError(f"{source}, line {number}: {error}") from error.__cause__


def _row(line: bytes) -> Prompt:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 (byte {error.start + 1}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise UsageError("not valid JSON (nested too deeply)") from error
    if not isinstance(row, dict):
        raise UsageError('not a JSON object: write {"prompt": "..."}')
    if text := _text(row.get("prompt")):
        return Prompt(text, str(row.get("task") or row.get("category") or "prompt"))
    if text := _first_user_turn(row.get("messages")):
        return Prompt(text, str(row.get("task") or row.get("category") or "chat"))
    if text := _text(row.get("text")):
        return Prompt(text, PASSAGE)
    raise UsageError('no text to use: a row needs "prompt", "messages" with a user turn, or "text"')


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"half a character, a lone surrogate, at character {error.start + 1}") from error
    return value


def _first_user_turn(messages: Any) -> str | None:
    turns = messages if isinstance(messages, list) else []
    said = (turn.get("content") for turn in turns if isinstance(turn, dict) and turn.get("role") == "user")
    return _text(next(said, None))


def _rows_of_dataset(source: str) -> Iterator[Prompt]:
    parts = DATASET.fullmatch(source)
    if parts is None:
        raise UsageError(f"{source}: write datasets:NAME, datasets:NAME:SPLIT or datasets:NAME:SPLIT:COLUMN")
    name, split, column = parts["name"], parts["split"] or "train", parts["column"]
    try:
        load_dataset: Any = import_module("datasets").load_dataset
    except (ImportError, AttributeError) as error:  # a folder named datasets imports too, as an empty package
        raise UsageError(f"{source} needs the datasets package: pip install 'draftgraph[distill]'") from error
    try:
        dataset = load_dataset(name, split=split)
        there: list[str] = list(dataset.column_names)
    except Exception as error:  # the hub, the disk and pyarrow each have errors of their own
        raise UsageError(f"cannot read split {split} of the dataset {name}: {one_line(error)}") from error
    chosen = column or next((known for known in COLUMNS if known in there), None)
    if chosen not in there:
        which = f"no column {column}" if column else f"none of the columns {', '.join(COLUMNS)}"
        raise UsageError(f"the dataset {name} has {which}: choose of {', '.join(there)}, as in {name}:{split}:COLUMN")
    yield from _rows_of_column(dataset[chosen], PASSAGE if chosen == PASSAGE else name)


def _rows_of_column(values: Iterable[Any], kind: str) -> Iterator[Prompt]:
    for value in values:
        if text := _first_user_turn(value) or _text(value):
            yield Prompt(text, kind)
