"""Tasks to measure on: files of JSON lines, a task being named after its file; own ones; datasets of the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from draftgraph.bench.hub_tasks import HUB, hub_prompts
from draftgraph.bench.task_prompts import TaskPrompt, read_prompts
from draftgraph.errors import UsageError

SUFFIX = ".jsonl"
OWN, OWN_FOLDER = "own", Path(__file__).with_name("own")


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
    folder = OWN_FOLDER if str(place) == OWN else Path(place).expanduser()
    return [Task(file.stem, str(file), read_prompts(file)) for file in task_files(folder)]


def task_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UsageError(
            f"there is no file or folder {place}: give JSON lines with prompts, a folder of them, {OWN} or hub:NAME"
        )
    if files := sorted(place.glob(f"*{SUFFIX}")):
        return files
    raise UsageError(f"the folder {place} has no {SUFFIX} files: give one with a file of prompts per task")
