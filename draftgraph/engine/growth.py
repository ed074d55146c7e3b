"""A tree that grows on a device, a level at a time: what was proposed, what is open, and what each node sees."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftgraph.compiled.passes import WORD
from draftgraph.engine.graph_attention import GraphPass


@dataclass
class Growth:
    """Nodes are numbered as they are proposed, k for every expansion; the root's expansion is the first."""

    k: int
    width: int  # nodes that a level expands
    tokens: Tensor  # [nodes]
    scores: Tensor  # log-probabilities of their paths
    open: Tensor  # the same, or -inf: expanded already, or never to be
    parents: Tensor  # [nodes], the expansions that proposed them
    expanded: Tensor  # [expansions - 1], the nodes; -1: there was none
    bits: Tensor  # [expansions, words], which of the other expanded nodes each sees
    depths: Tensor  # [expansions]
    positions: Tensor  # [1, slots], of the expanded nodes in the order of their slots
    length: Tensor  # [1] of the text; the expanded nodes lie behind it
    next_tokens: Tensor  # [1, width], of the level that is expanded now
    next_positions: Tensor  # [1, width]
    next_slots: Tensor  # [width]
    next_scores: Tensor  # [width]
    report: Tensor  # [expansions, 2k + 1] float64: children, their log-probabilities, and the node; root or none: -1

    @classmethod
    def of(cls, levels: int, width: int, k: int, device: torch.device) -> Growth:
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        expansions = (levels - 1) * width
        words, size = max(1, -(-expansions // WORD)), k * (1 + expansions)
        return cls(
            k=k,
            width=width,
            tokens=whole(size),
            scores=torch.zeros(size, device=device),
            open=torch.zeros(size, device=device),
            parents=whole(size),
            expanded=whole(max(expansions, 1)),
            bits=whole(1 + expansions, words),
            depths=whole(1 + expansions),
            positions=whole(1, words * WORD),
            length=whole(1),
            next_tokens=whole(1, width),
            next_positions=whole(1, width),
            next_slots=whole(width),
            next_scores=torch.zeros(width, device=device),
            report=torch.zeros(1 + expansions, 2 * k + 1, dtype=torch.float64, device=device),
        )

    def level(self, number: int) -> GraphPass:
        """What the chosen nodes of a level see."""
        first = 1 + number * self.width
        rows = self.bits[None, first : first + self.width]
        return GraphPass(self.length, rows, self.next_positions, self.positions)


def choose(growth: Growth, level: int, readable: int) -> None:
    """Takes the likeliest open nodes, and prepares their pass; tokens from `readable` on are read as the one before."""
    width = growth.width
    scores, chosen = torch.topk(growth.open, width)
    there = scores > -torch.inf
    chosen = chosen.where(there, 0)  # nothing is open any more: whatever is computed there is impossible
    growth.open.index_fill_(0, chosen, -torch.inf)
    here = torch.arange(level * width, (level + 1) * width, device=chosen.device)
    growth.expanded[here] = chosen.where(there, -1)
    above = growth.parents[chosen]
    own = torch.zeros_like(growth.bits[here])
    own.scatter_(1, (here // WORD)[:, None], (torch.ones_like(here) << (here % WORD))[:, None])
    growth.bits[1 + here] = growth.bits[above] | own
    growth.depths[1 + here] = growth.depths[above] + 1
    growth.next_positions.copy_(growth.length - 1 + growth.depths[1 + here])
    growth.positions[0, here] = growth.next_positions[0]
    growth.next_slots.copy_(growth.length + here)
    growth.next_tokens.copy_(growth.tokens[chosen].clamp(max=readable - 1))
    growth.next_scores.copy_(scores)


def note(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor, is_end: Tensor) -> None:
    """Children [rows, k] of the expansions from `first` on, whose own paths have these scores. Behind an end comes
    nothing."""
    here = slice(first * growth.k, first * growth.k + tokens.numel())
    growth.tokens[here] = tokens.flatten()
    growth.scores[here] = (scores[:, None] + chances).flatten()
    rows = torch.arange(first, first + len(tokens), device=tokens.device)
    growth.parents[here] = rows.repeat_interleave(growth.k, output_size=tokens.numel())
    growth.open[here] = growth.scores[here].masked_fill(is_end[growth.tokens[here]], -torch.inf)
    nodes = growth.expanded[first - 1 : first - 1 + len(tokens)] if first else torch.full_like(rows, -1)
    columns = (tokens, chances, nodes[:, None])
    growth.report[first : first + len(tokens)] = torch.cat([column.double() for column in columns], dim=1)


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
