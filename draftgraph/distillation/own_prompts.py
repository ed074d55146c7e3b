"""Prompts that the target writes itself: user turns of its chat template, sampled."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draftgraph.distillation.answers import AnswerStore
from draftgraph.distillation.code_prompts import wordings
from draftgraph.distillation.progress import Reporter
from draftgraph.distillation.prompts import Prompt
from draftgraph.distillation.sampler import Sampler
from draftgraph.errors import UsageError, one_line
from draftgraph.generation import context_window, stop_ids_of
from draftgraph.notices import Report, silent
from draftgraph.text import HALF_A_CHARACTER

SELF = "self"
Continue = Callable[..., list[list[int]]]  # as `Sampler.continue_texts`
MARKER = "draftgraph-marker"
TEMPERATURES = (0.7, 0.8, 0.9, 1.0)  # above 1, small targets write nonsense, and half of the turns do not end
SAME = 40  # characters, lower-cased, that make two prompts alike
LEAST_YIELD = 0.05  # of a round; less means that the target repeats itself
EXPECTED_YIELD = 0.8  # of the first round
TURN_TOKENS = 384  # of a prompt that the target writes, at most
SMALLEST_ROUND, LARGEST_ROUND = 16, 2048  # turns: what is repeated at most where a run was killed

OPENINGS: list[str] = wordings("openings")  # words with which half of the turns begin


def opening_of_user_turn(tokenizer: Any) -> list[int]:
    """The chat template's tokens up to where the user's text begins, a default system prompt included."""
    return _tokens(tokenizer, _around_user_text(tokenizer)[0])


def end_of_user_turn(tokenizer: Any) -> int:
    """The token that follows the user's text."""
    return _tokens(tokenizer, _around_user_text(tokenizer)[1])[0]


@dataclass
class WrittenPrompts:
    """Prompts that a target wrote, and why its other turns were dropped."""

    wanted: int
    prompts: list[Prompt] = field(default_factory=list)
    turns: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def why_not_more(self) -> str:
        return f"of {self.turns:,} turns, " + ", ".join(f"{many:,} {why}" for why, many in self.dropped.most_common())

    def __str__(self) -> str:
        said = f"{len(self.prompts):,} prompts written by the target"
        return said if len(self.prompts) == self.wanted else f"{said}, not {self.wanted:,}: {self.why_not_more}"


def write_prompts(
    continue_texts: Continue,
    tokenizer: Any,
    count: int,
    seed: int,
    max_tokens: int = 384,
    report: Report = silent,
) -> WrittenPrompts:
    """User turns sampled from the target, no two alike; half of them begin with given words, for variety.

    Only turns that ended by themselves within `max_tokens` are kept. There may be fewer than `count`, from a target
    that repeats itself. `continue_texts`, of a sampler that stops at `end_of_user_turn`, is called in rounds; while
    they are the largest, a greater `count` has the rounds of a smaller one.
    """
    draw = random.Random(seed)
    opening, end = opening_of_user_turn(tokenizer), end_of_user_turn(tokenizer)
    special = _special_tokens(tokenizer)
    kept: dict[str, Prompt] = {}
    written, share = WrittenPrompts(count), EXPECTED_YIELD
    while len(kept) < count and share >= LEAST_YIELD:
        size = min(LARGEST_ROUND, max(SMALLEST_ROUND, int((count - len(kept)) / share)))
        words = [draw.choice(OPENINGS) if row % 2 else "" for row in range(size)]
        begun = {word: _tokens(tokenizer, word) if word else [] for word in set(words)}
        turns = continue_texts(
            [opening + begun[word] for word in words],
            max_tokens,
            [draw.choice(TEMPERATURES) for _ in words],
            draw.getrandbits(31),
            report=_within(report, len(kept), size * share, count),
        )
        before = len(kept)
        for word, turn in zip(words, turns, strict=True):
            text = _decoded(tokenizer, begun[word] + turn[:-1])
            beginning = text[: len(word) + SAME].lower()
            if turn[-1:] != [end]:
                whole = len(turn) < max_tokens
                written.dropped["ended unlike a user's" if whole else f"did not end within {max_tokens} tokens"] += 1
            elif not special.isdisjoint(turn[:-1]):
                written.dropped["held special tokens"] += 1
            elif not _decoded(tokenizer, turn[:-1]):
                written.dropped["were empty"] += 1
            elif HALF_A_CHARACTER in text:
                written.dropped["held half a character"] += 1
            elif beginning in kept:
                written.dropped["began like another"] += 1
            else:
                kept[beginning] = Prompt(text, SELF)
        written.turns += size
        share = (len(kept) - before) / size
    written.prompts = list(kept.values())[:count]
    return written


def _around_user_text(tokenizer: Any) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("self-written prompts need a chat template, and this target has none: give --prompts FILE")
    chat = [{"role": "user", "content": MARKER}]
    try:
        rendered = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a template may raise anything
        raise UsageError(f"the target's chat template fails ({one_line(error)}): give --prompts FILE") from error
    before, found, after = rendered.partition(MARKER)
    if not (found and before and after):
        raise UsageError("the target's chat template does not mark where a user's turn ends: give --prompts FILE")
    return before, after


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _special_tokens(tokenizer: Any) -> set[int]:
    added = {token for token, made in tokenizer.added_tokens_decoder.items() if made.special}
    return added | set(tokenizer.all_special_ids)


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)).strip()


def _within(report: Report, before: int, expected: float, count: int) -> Report:
    """Progress of one round as a share of the whole, estimated from the last round."""
    return lambda done: report(min(1.0, (before + done * expected) / count))


def own_prompts(
    count: int, seed: int, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None
) -> WrittenPrompts:
    """User turns that the target writes; finished rounds are stored."""
    ends = stop_ids_of(model) | {end_of_user_turn(tokenizer)}
    longest = longest_turn(model, tokenizer)
    report.begin("the target writes prompts")

    def progress(done: float) -> None:
        report.live(f"the target writes prompts: {done:.0%}")

    rounds = partial(store.continued, "prompts", Sampler(model, ends, batch_size))
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
