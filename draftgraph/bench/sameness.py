"""Whether two answers are the same; where they are not, whether two tokens were as good as tied there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftgraph.decoding import Decoding

STEPS_OF_A_TIE = 2.0  # each of two scores may be off by one step


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
    """The first token that another answer has not."""

    place: int
    rounding_steps: float | None  # from the target's best score there to the lower of both tokens'; None: one has ended

    @property
    def is_tie(self) -> bool:
        """Kernels of other shapes round differently: in half precision either token may come out best."""
        return self.rounding_steps is not None and self.rounding_steps <= STEPS_OF_A_TIE


def difference(decoding: Decoding, plain: Sequence[int], new: Sequence[int] | None = None) -> Difference | None:
    """Between the tokens of plain decoding and what a decoding has produced, or another answer to its prompt."""
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

    model = decoding.decoder.target_model
    text = [*decoding.text[: decoding.prompt_length], *before]
    length = len(text)
    ids = torch.tensor([text], device=decoding.target.device)
    with decoding.loan:
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
    raw, processed = process(decoding.request.processors, logits, Prefix.of(ids, length))
    scores = processed[0].double()
    if decoding.noise is not None:
        scores = scores + decoding.noise.gumbel(length, len(scores), scores.device)
    step = torch.finfo(model.dtype).eps * float(raw.abs().max()) / decoding.request.temperature
    return float(scores.max() - scores[tokens].min()) / step
