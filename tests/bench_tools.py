"""A tiny pair that can be loaded, and tasks for it: what tests of measuring commands start from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from families import perturbed

from draftgraph import Pair, load


def pair_in(folder: Path) -> Pair:
    """The model in a folder, with a draft that mostly agrees."""
    loaded = load(str(folder))
    return Pair(loaded.target, perturbed(loaded.target, 0.1), loaded.tokenizer)


def write_tasks(place: Path, tasks: Mapping[str, Sequence[str]]) -> Path:
    """A file of prompts for each."""
    place.mkdir()
    for task, prompts in tasks.items():
        (place / f"{task}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return place
