"""How far chosen tokens are behind the best ones in float32, and how far they may be: in half precision the text of
another mode may differ from plain decoding's, but it must be as good a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from draftgraph.bench.runs import Record
from draftgraph.bench.sameness import STEPS_OF_A_TIE

MOST = 1.5  # times plain decoding's
CHANCE = 0.01  # of more tokens that are not the best, by luck alone


@dataclass(frozen=True)
class Gaps:
    """Of one text or several: scores of the best token minus scores of the chosen one, token by token."""

    tokens: int = 0
    not_best: int = 0
    largest: float = 0.0
    total: float = 0.0
    step: float = 0.0  # between numbers in half precision that are as large as the highest score

    @property
    def share(self) -> float:
        return self.not_best / max(self.tokens, 1)

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)

    def __add__(self, other: Gaps) -> Gaps:
        return Gaps(
            self.tokens + other.tokens,
            self.not_best + other.not_best,
            max(self.largest, other.largest),
            self.total + other.total,
            max(self.step, other.step),
        )

    @classmethod
    def of_all(cls, texts: Iterable[Gaps]) -> Gaps:
        return reduce(cls.__add__, texts, cls())


def within(found: Gaps, plain: Gaps) -> bool:
    """Whether share and largest gap are at most 1.5 times plain decoding's, to the letter."""
    return found.share <= MOST * plain.share and found.largest <= MOST * plain.largest


def as_good_as(found: Gaps, plain: Gaps) -> bool:
    """Whether share and largest gap are at most 1.5 times plain decoding's, but for luck and ties.

    Texts that are equally good differ by a few tokens: a higher share counts only if it is beyond luck. A gap of two
    rounding steps or less is a tie, as everywhere in these reports, also where `plain` happens to have none.

    >>> as_good_as(Gaps(1000, 12, largest=0.5), Gaps(1000, 8, largest=0.4))
    True
    >>> as_good_as(Gaps(1000, 40, largest=0.5), Gaps(1000, 8, largest=0.4))
    False
    """
    share = found.share <= MOST * plain.share or luck(found, plain) >= CHANCE
    return share and found.largest <= max(MOST * plain.largest, STEPS_OF_A_TIE * plain.step)


def luck(found: Gaps, plain: Gaps) -> float:
    """How likely two texts that are equally good differ by so many tokens or more: a one-sided sign test."""
    both, part = found.not_best + plain.not_best, found.tokens / max(found.tokens + plain.tokens, 1)
    chances = (
        math.lgamma(both + 1)
        - math.lgamma(count + 1)
        - math.lgamma(both - count + 1)
        + count * math.log(part)
        + (both - count) * math.log1p(-part)
        for count in range(found.not_best, both + 1)
    )
    return math.fsum(map(math.exp, chances))


@dataclass(frozen=True)
class Rescored:
    """A mode's answers, beside those of plain decoding to the same prompts."""

    answers: int
    tokens: int
    not_best: float  # share of tokens
    largest_gap: float
    mean_gap: float
    within: bool | None  # 1.5 times plain decoding's, to the letter; None: it is plain decoding
    as_good: bool | None  # the same, but for luck and ties

    @classmethod
    def of(cls, mode: str, records: Sequence[Record], plain: str) -> Rescored | None:
        """Of records with the gaps of an answer each; None: this mode is not among them."""
        texts = {(one["mode"], one["task"], one["prompt"]): Gaps(**one["gaps"]) for one in records}
        prompts = [key[1:] for key in texts if key[0] == mode and (plain, *key[1:]) in texts]
        if not prompts:
            return None
        found, beside = (Gaps.of_all(texts[name, *prompt] for prompt in prompts) for name in (mode, plain))
        verdicts = (None, None) if mode == plain else (within(found, beside), as_good_as(found, beside))
        return cls(len(prompts), found.tokens, found.share, found.largest, found.mean, *verdicts)
