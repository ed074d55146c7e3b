"""All prompts of a recipe, those that the target writes itself among them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftgraph.distillation.answers import AnswerStore
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.prompts import Prompt, read_prompts
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.selfwritten import (
    OPENINGS,
    Written,
    end_of_user_turn,
    opening_of_user_turn,
    write_prompts,
)
from draftgraph.errors import UsageError
from draftgraph.generation import context_window, stop_ids_of

TURN_TOKENS = 384  # of a prompt that the target writes, at most


def gather_prompts(
    recipe: Recipe, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None = None
) -> list[Prompt]:
    """Prompts of every source, no two alike, in an order drawn by the seed."""
    prompts: list[Prompt] = []
    for source in recipe.prompts:
        report.begin(f"reading prompts: {source}")
        found = read_prompts(source, tokenizer, recipe.max_prompts, recipe.seed)
        report.say(f"{len(found):,} prompts from {source}")
        prompts += found
    written = Written(recipe.prompts_to_write)
    if written.wanted:
        written = own_prompts(written.wanted, recipe.seed, model, tokenizer, store, report, batch_size)
        report.say(str(written))
        prompts += written.prompts
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())
    if len(different) < 2 and len(written.prompts) < written.wanted:
        raise UsageError(f"the target writes too few prompts itself ({written.why_not_more}): give --prompts FILE")
    if len(different) < 2:
        raise UsageError("a draft needs two prompts or more to learn from: give --prompts FILE, or more --own-prompts")
    random.Random(recipe.seed).shuffle(different)
    return different


@dataclass(frozen=True)
class KeptRounds:
    """A sampler that is asked once: its rounds are stored, and whoever was killed repeats none but the last."""

    sampler: Sampler
    store: AnswerStore

    def continue_texts(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: list[float],
        seed: int,
        *,
        report: Callable[[float], None] | None = None,
    ) -> list[list[int]]:
        rows = self.store.continued("prompts", self.sampler, prompts, max_new_tokens, temperature, seed, report)
        return [row.tolist() for row in rows]


def own_prompts(
    count: int, seed: int, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None
) -> Written:
    """What the target itself would ask."""
    ends = stop_ids_of(model) | {end_of_user_turn(tokenizer)}
    longest = longest_turn(model, tokenizer)
    report.begin("the target writes prompts")

    def progress(done: float) -> None:
        report.live(f"the target writes prompts: {done:.0%}")

    rounds = KeptRounds(Sampler(model, ends, batch_size), store)
    return write_prompts(rounds, tokenizer, count, seed, longest, progress)


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
