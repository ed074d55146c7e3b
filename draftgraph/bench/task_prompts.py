"""Prompts of tasks with what is known of a good answer, and the files of JSON lines that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftgraph.errors import UsageError


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
    """Prompt by prompt, so that nothing behind the last one that is wanted must be right."""
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
    prompt = first_said(row) if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f'{place}: no prompt; write {{"prompt": "..."}}')
    return TaskPrompt(prompt, text_or_none(row.get("reference")), text_or_none(row.get("task")))


def first_said(row: dict[str, Any]) -> object:
    """The prompt, or the first turn of a conversation, as in the rows of Spec-Bench and MT-Bench."""
    turns = row.get("turns")
    return turns[0] if "prompt" not in row and isinstance(turns, list) and turns else row.get("prompt")


def text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None
