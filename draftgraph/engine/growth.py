"""Trees that grow on a device, a level at a time: what was proposed, what is open, and what each node sees.

One text's tree, or those of many texts, which grow side by side: every tensor then has a row for each text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftgraph.compiled.passes import WORD
from draftgraph.engine.graph_attention import GraphPass
from draftgraph.engine.packed_graph import PackedData
from draftgraph.engine.pages import PAGE

ENDS = 8  # tokens behind which one of many texts drafts nothing; of more, the rest is drafted behind in vain


EVEN = 1.0, 1.0  # odds, of children and of best ones, that correct nothing


@dataclass
class Shared:
    """What many texts need besides, each having places of its own in a pool.

    A text may want fewer levels than the others, or none: behind them its nodes see no text and write where nothing is
    kept.
    """

    pages: Tensor  # int32 [texts, most pages]: see `PackedData`
    levels: Tensor  # [texts], that count, the root's among them
    ends: Tensor  # [texts, ENDS], tokens that nothing follows; none: -1
    trash: int  # slot that anybody may write into
    slots: Tensor  # [texts, slots], of the expanded nodes
    starts: Tensor  # int32 [texts + 1], of a level's nodes
    lengths: Tensor  # int32 [texts], of the text that a level's nodes see
    ancestors: Tensor  # [texts * width, words], that they see

    @classmethod
    def of(cls, pages: Tensor, levels: Tensor, ends: Tensor, trash: int, width: int, words: int) -> Shared:
        texts, device = len(levels), levels.device
        return cls(
            pages,
            levels,
            ends,
            trash,
            slots=torch.zeros(texts, words * WORD, dtype=torch.long, device=device),
            starts=torch.arange(0, (texts + 1) * width, width, dtype=torch.int32, device=device),
            lengths=torch.zeros(texts, dtype=torch.int32, device=device),
            ancestors=torch.zeros(texts * width, words, dtype=torch.long, device=device),
        )

    def find_slots(self, length: Tensor, width: int) -> None:
        """The places behind texts of these lengths. # [texts]"""
        number = torch.arange(self.slots.shape[1], device=length.device)
        place = length[:, None] + number
        page = self.pages.gather(1, (place // PAGE).clamp(max=self.pages.shape[1] - 1)).long()
        counts = number < (self.levels[:, None] - 1) * width
        self.slots.copy_(torch.where(counts, page * PAGE + place % PAGE, self.trash))


@dataclass
class Growth:
    """Nodes are numbered as they are proposed, k for every expansion; the root's expansion is the first.

    The shapes are those of one text; where there are more, `texts` comes first, but for what a pass is told and for
    the report.
    """

    k: int
    width: int  # nodes that a level expands
    tokens: Tensor  # [nodes]
    scores: Tensor  # of their paths: the logarithms of their chances
    open: Tensor  # the same, or -inf: expanded already, or never to be
    parents: Tensor  # [nodes], the expansions that proposed them
    expanded: Tensor  # [expansions - 1], the nodes; -1: there was none
    bits: Tensor  # [expansions, words], which of the other expanded nodes each sees
    depths: Tensor  # [expansions]
    positions: Tensor  # [texts, slots], of the expanded nodes in the order of their slots
    length: Tensor  # [texts] of the text; the expanded nodes lie behind it
    next_tokens: Tensor  # [1, texts * width], of the level that is expanded now
    next_positions: Tensor  # [1, texts * width]
    next_slots: Tensor  # [texts * width]
    next_scores: Tensor  # [texts * width]
    report: Tensor  # [expansions, 2k + 1] float64: children, their log-probabilities, and the node; root or none: -1
    odds: Tensor  # [texts, 2] float64, by which those of a child and of a best child are corrected
    shared: Shared | None = None

    @classmethod
    def of(cls, levels: int, width: int, k: int, device: torch.device, texts: int | None = None) -> Growth:
        """Of one text, or of so many; those still need what they share."""
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        expansions, rows = (levels - 1) * width, () if texts is None else (texts,)
        words, size, many = words_for(expansions), k * (1 + expansions), texts or 1
        return cls(
            k=k,
            width=width,
            tokens=whole(*rows, size),
            scores=torch.zeros(*rows, size, device=device),
            open=torch.zeros(*rows, size, device=device),
            parents=whole(*rows, size),
            expanded=whole(*rows, max(expansions, 1)),
            bits=whole(*rows, 1 + expansions, words),
            depths=whole(*rows, 1 + expansions),
            positions=whole(many, words * WORD),
            length=whole(many),
            next_tokens=whole(1, many * width),
            next_positions=whole(1, many * width),
            next_slots=whole(many * width),
            next_scores=torch.zeros(many * width, device=device),
            report=torch.zeros(1 + expansions, *rows, 2 * k + 1, dtype=torch.float64, device=device),
            odds=torch.ones(many, 2, dtype=torch.float64, device=device),
        )

    @property
    def texts(self) -> int:
        return len(self.length)

    def level(self, number: int) -> GraphPass:
        """What the chosen nodes of a level see."""
        first = 1 + number * self.width
        rows = self.bits[None, first : first + self.width]
        return GraphPass(self.length, rows, self.next_positions, self.positions)

    def packed_level(self) -> PackedData:
        """What the nodes of many texts see that were chosen last."""
        assert self.shared is not None
        told = self.shared.starts, self.shared.lengths, self.shared.pages, self.shared.ancestors
        return PackedData(*told, self.next_positions, self.positions, self.width)


def words_for(expansions: int) -> int:
    return max(1, -(-expansions // WORD))


def choose(growth: Growth, level: int, readable: int) -> None:
    """Takes the likeliest open nodes, and prepares their pass; tokens from `readable` on are read as the one before."""
    texts, width, shared = growth.texts, growth.width, growth.shared
    scores, chosen = torch.topk(growth.open.view(texts, -1), width)
    if shared is not None:
        counts = (level < shared.levels - 1)[:, None]
        scores = scores.where(counts, -torch.inf)
    there = scores > -torch.inf
    chosen = chosen.where(there, 0)  # nothing is open any more: whatever is computed there is impossible
    growth.open.view(texts, -1).scatter_(1, chosen, -torch.inf)
    here = torch.arange(level * width, (level + 1) * width, device=chosen.device)
    growth.expanded.view(texts, -1)[:, here] = chosen.where(there, -1)
    above = growth.parents.view(texts, -1).gather(1, chosen)
    bits, depths = growth.bits.view(texts, -1, growth.bits.shape[-1]), growth.depths.view(texts, -1)
    own = torch.zeros_like(bits[0, here])
    own.scatter_(1, (here // WORD)[:, None], (torch.ones_like(here) << (here % WORD))[:, None])
    seen = bits.gather(1, above[..., None].expand(-1, -1, bits.shape[2])) | own
    bits[:, 1 + here] = seen
    depths[:, 1 + here] = depths.gather(1, above) + 1
    positions = growth.length[:, None] - 1 + depths[:, 1 + here]
    growth.positions[:, here] = positions
    growth.next_positions.copy_(positions.view(1, -1))
    growth.next_tokens.copy_(growth.tokens.view(texts, -1).gather(1, chosen).clamp(max=readable - 1).view(1, -1))
    growth.next_scores.copy_(scores.flatten())
    if shared is None:
        growth.next_slots.copy_(growth.length + here)
    else:
        growth.next_slots.copy_(shared.slots[:, here].flatten())
        shared.lengths.copy_(growth.length.where(counts[:, 0], 0))
        first = torch.zeros_like(seen[0])
        first[:, 0] = 1  # something that is there: who sees nothing has no answer
        shared.ancestors.copy_(seen.where(counts[..., None], first).flatten(0, 1))


def note(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor, is_end: Tensor | None) -> None:
    """Children [rows, k] of the expansions from `first` on, whose own paths have these scores. Behind an end comes
    nothing: of many texts each has its own ends."""
    texts, k = growth.texts, growth.k
    rows = len(tokens) // texts
    here = slice(first * k, (first + rows) * k)
    paths = (scores[:, None] + corrected(growth, chances)).view(texts, -1)
    growth.tokens.view(texts, -1)[:, here] = tokens.view(texts, -1)
    growth.scores.view(texts, -1)[:, here] = paths
    numbers = torch.arange(first, first + rows, device=tokens.device)
    growth.parents.view(texts, -1)[:, here] = numbers.repeat_interleave(k, output_size=rows * k)
    if growth.shared is None:
        assert is_end is not None
        ended = is_end[tokens].view(texts, -1)
    else:
        ended = (tokens.view(texts, -1, 1) == growth.shared.ends[:, None]).any(dim=-1)
    growth.open.view(texts, -1)[:, here] = paths.masked_fill(ended, -torch.inf)
    expanded = growth.expanded.view(texts, -1)
    nodes = expanded[:, first - 1 : first - 1 + rows] if first else torch.full_like(expanded[:, :1], -1)
    columns = (tokens, chances, nodes.reshape(-1, 1))
    found = torch.cat([column.double() for column in columns], dim=1).view(texts, rows, -1)
    growth.report.view(-1, texts, 2 * k + 1)[first : first + rows] = found.transpose(0, 1)


def corrected(growth: Growth, chances: Tensor) -> Tensor:
    """Log-probabilities [texts * rows, k], the best first, with the odds of their texts."""
    other, best = growth.odds.to(chances.dtype).repeat_interleave(len(chances) // growth.texts, dim=0).split(1, dim=1)
    odds = torch.cat([best, other.expand(-1, growth.k - 1)], dim=1)
    return chances + odds.log() - (chances.exp() * (odds - 1)).log1p()


def steps_on(device: torch.device) -> Any:
    """What has `choose` and `note` for this device: kernels of one launch each, or this module."""
    if device.type == "cuda":
        try:
            from draftgraph.engine import growth_kernel
        except ImportError:
            pass
        else:
            return growth_kernel
    return sys.modules[__name__]
