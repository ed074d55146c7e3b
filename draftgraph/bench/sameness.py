"""Whether two answers are the same; where not, whether two tokens were tied, and whether the text is as good."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from draftgraph.bench.runs import Record

if TYPE_CHECKING:
    from draftgraph.decoder import Decoding

STEPS_OF_A_TIE = 2.0  # each of two scores may be off by one step
MOST = 1.5  # times plain decoding's
CHANCE = 0.01  # of more tokens that are not the best, by luck alone


def first_difference(answers: Sequence[Sequence[int]]) -> int | None:
    """The first place where answers are not all the same; None if they are.

    >>> first_difference([[1, 2, 3], [1, 2, 4]])
    2
    """
    first = answers[0]
    for other in answers[1:]:
        if other != first:
            pairs = zip(first, other, strict=False)
            return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(first), len(other)))
    return None


@dataclass(frozen=True)
class Difference:
    """Where two answers first differ."""

    place: int
    rounding_steps: float | None  # from the target's best score there to the lower of both tokens'; None: one has ended

    @property
    def is_tie(self) -> bool:
        """Kernels of other shapes round differently: in half precision either token may come out best."""
        return self.rounding_steps is not None and self.rounding_steps <= STEPS_OF_A_TIE


def difference(decoding: Decoding, plain: Sequence[int], new: Sequence[int] | None = None) -> Difference | None:
    """Compares the tokens of plain decoding with those of a decoding, or with another answer to its prompt."""
    new = decoding.new_tokens if new is None else new
    place = first_difference([plain, new])
    if place is None:
        return None
    if place == min(len(plain), len(new)):
        return Difference(place, None)
    return Difference(place, steps_between(decoding, new[:place], [plain[place], new[place]]))


def steps_between(decoding: Decoding, before: Sequence[int], tokens: list[int]) -> float:
    """How far the lower of some tokens is behind the best one, after what an answer says `before`, in rounding steps of
    the largest logit: by one plain pass in the target's own precision, with the processors and noise of the choice."""
    import torch

    from draftgraph.choose import Prefix, process
    from draftgraph.engine.selfcheck import plain_logits

    model = decoding.engines.target.model
    text = [*decoding.text[: decoding.prompt_length], *before]
    length = len(text)
    ids = torch.tensor([text], device=decoding.engines.target.device)
    logits = plain_logits(model, ids)[-1]
    raw, processed = process(decoding.request.processors, logits, Prefix.of(ids, length))
    scores = processed[0].double()
    if decoding.noise is not None:
        scores = scores + decoding.noise.gumbel(length, len(scores), scores.device)
    step = torch.finfo(model.dtype).eps * float(raw.abs().max()) / decoding.request.temperature
    return float(scores.max() - scores[tokens].min()) / step


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
