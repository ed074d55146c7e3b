"""Tasks to measure on: files of JSON lines with a `prompt` in every row, a task being named after its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from draftgraph.errors import UsageError

SUFFIX = ".jsonl"


def read_tasks(places: Iterable[str | Path], names: Sequence[str] = (), prompts: int = 30) -> dict[str, list[str]]:
    """The first prompts of every task in files and folders, or of the tasks that are named."""
    files: dict[str, Path] = {}
    for file in (file for place in places for file in task_files(Path(place).expanduser())):
        if file.stem in files:
            raise UsageError(f"two tasks are named {file.stem}: {files[file.stem]} and {file}; rename one of them")
        files[file.stem] = file
    if missing := [name for name in names if name not in files]:
        raise UsageError(f"there is no task {missing[0]}: choose of {', '.join(files)}")
    tasks = {name: list(islice(read_prompts(files[name]), prompts)) for name in names or files}
    if empty := [name for name, found in tasks.items() if not found]:
        raise UsageError(f'{files[empty[0]]} has no rows: write one {{"prompt": "..."}} per line')
    return tasks


def task_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UsageError(f"there is no file or folder {place}: give JSON lines with prompts, or a folder of them")
    if files := sorted(place.glob(f"*{SUFFIX}")):
        return files
    raise UsageError(f"the folder {place} has no {SUFFIX} files: give one with a file of prompts per task")


def read_prompts(file: Path) -> Iterator[str]:
    """Prompt by prompt, so that nothing behind the last one that is wanted must be right."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield prompt_of(line, f"{file}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text: {error}") from error


def prompt_of(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{place}: not JSON; write {{"prompt": "..."}}') from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f'{place}: no prompt; write {{"prompt": "..."}}')
    return prompt
