"""All prompts of a recipe, those that the target writes itself among them."""

from __future__ import annotations

import json
import random
from typing import Any

from draftgraph.distillation.answers import ELSEWHERE, AnswerStore
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.prompts import Prompt, read_prompts
from draftgraph.distillation.recipe import OWN_PROMPTS, Recipe, digest
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.selfwritten import OPENINGS, end_of_user_turn, opening_of_user_turn, write_prompts
from draftgraph.errors import UsageError
from draftgraph.generation import context_window, stop_ids_of
from draftgraph.models.cache import replacing
from draftgraph.models.faults import writing

TURN_TOKENS = 384  # of a prompt that the target writes, at most


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
    if count := own_prompts_wanted(recipe, tokenizer, report):
        written = own_prompts(count, recipe.seed, model, tokenizer, store, report, batch_size)
        report.say(f"{len(written):,} prompts written by the target")
        prompts += written
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())
    if len(different) < 2:
        raise UsageError("a draft needs prompts to learn from: give --prompts, or more than 0 --own-prompts")
    random.Random(recipe.seed).shuffle(different)
    return different


def own_prompts_wanted(recipe: Recipe, tokenizer: Any, report: Reporter) -> int:
    if recipe.own_prompts is None and recipe.prompts and not getattr(tokenizer, "chat_template", None):
        report.say("the target has no chat template: it writes no prompts itself")
        return 0
    return OWN_PROMPTS if recipe.own_prompts is None else recipe.own_prompts


def own_prompts(
    count: int, seed: int, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None
) -> list[Prompt]:
    """What the target itself would ask, written once and kept."""
    ends = stop_ids_of(model) | {end_of_user_turn(tokenizer)}
    key = digest(store.target_mark, str(tokenizer.chat_template), str(count), str(seed))
    file = store.folder / f"prompts-{key}.json"
    if not file.exists():
        report.live("the target writes prompts")

        def progress(done: float) -> None:
            report.live(f"the target writes prompts: {done:.0%}")

        longest = longest_turn(model, tokenizer)
        written = write_prompts(Sampler(model, ends, batch_size), tokenizer, count, seed, longest, progress)
        with writing("the target's prompts", store.folder, ELSEWHERE):
            store.folder.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.write_text(json.dumps([[prompt.text, prompt.kind] for prompt in written]))
    return [Prompt(text, kind) for text, kind in json.loads(file.read_text())]


def longest_turn(model: Any, tokenizer: Any) -> int:
    """Tokens that the target may write behind the longest opening of a turn."""
    window = context_window(model)
    if window is None:
        return TURN_TOKENS
    words = max(len(row) for row in tokenizer(list(OPENINGS), add_special_tokens=False)["input_ids"])
    room = window - len(opening_of_user_turn(tokenizer)) - words
    if room < 1:
        raise UsageError(f"the target's context window of {window} is too short to write prompts in: give --prompts")
    return min(TURN_TOKENS, room)
