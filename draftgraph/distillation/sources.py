"""All prompts of a recipe, those that the target writes itself among them."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from draftgraph.distillation.answers import AnswerStore
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.prompts import Prompt, read_prompts
from draftgraph.distillation.recipe import Recipe, digest
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.selfwritten import end_of_user_turn, write_prompts
from draftgraph.errors import UsageError
from draftgraph.generation import stop_ids_of
from draftgraph.models.faults import writing


def gather_prompts(
    recipe: Recipe, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None = None
) -> list[Prompt]:
    """Prompts of every source, no two alike, in an order drawn by the seed."""
    prompts: list[Prompt] = []
    for source in recipe.prompts:
        report.live(f"reading prompts: {source}")
        found = read_prompts(source, tokenizer, recipe.max_prompts, recipe.seed)
        report.say(f"{len(found):,} prompts from {source}")
        prompts += found
    if recipe.own_prompts:
        written = own_prompts(recipe, model, tokenizer, store, report, batch_size)
        report.say(f"{len(written):,} prompts written by the target")
        prompts += written
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())
    if len(different) < 2:
        raise UsageError("a draft needs prompts to learn from: give --prompts, or more than 0 --own-prompts")
    random.Random(recipe.seed).shuffle(different)
    return different


def own_prompts(
    recipe: Recipe, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None
) -> list[Prompt]:
    """What the target itself would ask, written once and kept."""
    key = digest(store.target_mark, str(tokenizer.chat_template), str(recipe.own_prompts), str(recipe.seed))
    file = store.folder / f"prompts-{key}.json"
    if not file.exists():
        ends = stop_ids_of(model) | {end_of_user_turn(tokenizer)}
        sampler = Sampler(model, ends, batch_size)
        report.live("the target writes prompts")

        def progress(done: float) -> None:
            report.live(f"the target writes prompts: {done:.0%}")

        written = write_prompts(sampler, tokenizer, recipe.own_prompts, recipe.seed, report=progress)
        with writing("the target's prompts", store.folder):
            store.folder.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps([[prompt.text, prompt.kind] for prompt in written]))
            os.replace(partial, file)
    return [Prompt(text, kind) for text, kind in json.loads(file.read_text())]
