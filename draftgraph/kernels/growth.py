"""Trees that grow on a device, a level at a time, those of many sequences side by side.

The rule is that of `proposers.growth` with a fixed width: every level expands the likeliest nodes that are still open,
whatever their depth. `choose` takes them, a pass of the draft follows, and `note` writes down their children. Where
what a draft says at a node depends on the node's depth alone, one pass has said it all, and `grow_by_depth` does the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import exp, inf, log, log1p
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.compiled import compiled
from draftgraph.graph import WORD, Floats, Ints
from draftgraph.kernels.attention import PAGE_SIZE, PagedPass
from draftgraph.kernels.triton_or_stub import available, tl, triton

ENDS = 8  # tokens behind which a sequence drafts nothing; of more, the rest is drafted behind in vain
BITS, END_TOKENS = tl.constexpr(WORD), tl.constexpr(ENDS)  # the same for kernels
EVEN = 1.0, 1.0  # odds, of children and of best ones, that correct nothing


@dataclass
class Growth:
    """Nodes are numbered as they are proposed, k for every expansion; the root's expansion is the first.

    A sequence may want fewer levels than the others, or none: behind them its nodes see no text and write where nothing
    is kept.
    """

    k: int
    width: int  # nodes that a level expands
    idle: int  # a slot that nobody reads
    pages: Tensor  # int32 [sequences, most pages]: see `PagedPass`
    levels: Tensor  # [sequences], that count, the root's among them
    ends: Tensor  # [sequences, ENDS], tokens that nothing follows; none: -1
    odds: Tensor  # [sequences, 2] float64, by which those of a child and of a best child are corrected
    deepest: Tensor  # [sequences], the depth from which on nodes are not expanded
    tokens: Tensor  # [sequences, nodes]
    open: Tensor  # the logarithms of the chances of their paths, or -inf: expanded already, or never to be
    parents: Tensor  # [sequences, nodes], the expansions that proposed them
    expanded: Tensor  # [sequences, expansions - 1], the nodes; -1: there was none
    bits: Tensor  # [sequences, expansions, words], which expanded nodes each sees, itself among them
    depths: Tensor  # [sequences, expansions]
    slots: Tensor  # [sequences, slots], of the expanded nodes
    positions: Tensor  # [sequences, slots], the same
    length: Tensor  # [sequences] of the text; the expanded nodes lie behind it
    next_tokens: Tensor  # [1, sequences * width], of the level that is expanded now
    next_positions: Tensor  # [1, sequences * width]
    next_slots: Tensor  # [sequences * width]
    next_scores: Tensor  # [sequences * width]
    starts: Tensor  # int32 [sequences + 1], of the level's nodes
    lengths: Tensor  # int32 [sequences], of the text that they see
    ancestors: Tensor  # [sequences * width, words], that they see
    report: Tensor  # [expansions, sequences, 2k + 1] float64: children, their log-probabilities, and the node or -1

    @classmethod
    def of(
        cls,
        pages: Tensor,
        levels: Tensor,
        ends: Tensor,
        odds: Tensor,
        idle: int,
        most: int,
        width: int,
        k: int,
        deepest: Tensor | None = None,
    ) -> Growth:
        """Of at most so many levels; the tensors are what the host tells of every sequence. `deepest` is left out where
        every level has a pass: no node is deeper than there are levels."""
        sequences, device, expansions = len(levels), levels.device, (most - 1) * width
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        short = partial(torch.zeros, dtype=torch.int32, device=device)
        words, nodes = max(1, -(-expansions // WORD)), (sequences, k * (1 + expansions))
        return cls(
            k=k,
            width=width,
            idle=idle,
            pages=pages,
            levels=levels,
            ends=ends,
            odds=odds,
            deepest=levels if deepest is None else deepest,
            tokens=whole(*nodes),
            open=torch.zeros(*nodes, device=device),
            parents=whole(*nodes),
            expanded=whole(sequences, max(expansions, 1)),
            bits=whole(sequences, 1 + expansions, words),
            depths=whole(sequences, 1 + expansions),
            slots=whole(sequences, words * WORD).fill_(idle),
            positions=whole(sequences, words * WORD),
            length=whole(sequences),
            next_tokens=whole(1, sequences * width),
            next_positions=whole(1, sequences * width),
            next_slots=whole(sequences * width),
            next_scores=torch.zeros(sequences * width, device=device),
            starts=torch.arange(0, (sequences + 1) * width, width, dtype=torch.int32, device=device),
            lengths=short(sequences),
            ancestors=whole(sequences * width, words),
            report=torch.zeros(1 + expansions, sequences, 2 * k + 1, dtype=torch.float64, device=device),
        )

    @property
    def sequences(self) -> int:
        return len(self.length)

    @property
    def arrays(self) -> Any:
        """All tensors as compiled functions take them, on a CPU."""
        held = vars(self).get("_arrays")
        if held is None or held.tokens.ctypes.data != self.tokens.data_ptr():  # or those of what this is a copy of
            tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
            held = vars(self)["_arrays"] = SimpleNamespace(**{name: one.numpy() for name, one in tensors.items()})
        return held

    def begin(self, length: Tensor) -> None:
        """Behind texts of these lengths: nothing is open, and the places of expanded nodes are found. # [sequences]"""
        if self.tokens.device.type == "cpu":
            one = self.arrays
            return _begin_compiled(
                one.open, one.length, one.slots, one.pages, one.levels, length.numpy(), self.width, self.idle
            )
        self.open.fill_(-torch.inf)
        self.length.copy_(length)
        number = torch.arange(self.slots.shape[1], device=length.device)
        place = self.length[:, None] + number
        page = self.pages.gather(1, (place // PAGE_SIZE).clamp(max=self.pages.shape[1] - 1)).long()
        counts = number < (self.levels[:, None] - 1) * self.width
        self.slots.copy_(torch.where(counts, page * PAGE_SIZE + place % PAGE_SIZE, self.idle))

    def level(self) -> PagedPass:
        """What the nodes see that were chosen last."""
        told = self.starts, self.lengths, self.pages, self.ancestors, self.next_positions, self.positions
        return PagedPass(*told, self.width)


@compiled
def _begin_compiled(
    open_scores: Any, length: Ints, slots: Ints, pages: Any, levels: Ints, lengths: Any, width: int, idle: int
) -> None:
    open_scores[:] = -inf
    for text in range(len(length)):
        length[text], last = lengths[text], pages.shape[1] - 1
        for number in range(slots.shape[1]):
            place = length[text] + number
            page = np.int64(pages[text, min(place // PAGE_SIZE, last)])
            counts = number < (levels[text] - 1) * width
            slots[text, number] = page * PAGE_SIZE + place % PAGE_SIZE if counts else idle


def choose(growth: Growth, level: int, readable: int) -> None:
    """Takes the likeliest open nodes, and prepares their pass; tokens from `readable` on are read as the one before."""
    if growth.tokens.device.type == "cpu":
        return choose_compiled(growth, level, readable)
    step = choose_triton if available else choose_reference
    step(growth, level, readable)


def choose_reference(growth: Growth, level: int, readable: int) -> None:
    width, bits, depths = growth.width, growth.bits, growth.depths
    order = growth.open.sort(dim=1, descending=True, stable=True)  # of equals the first, as on the host
    scores, chosen = order.values[:, :width], order.indices[:, :width]
    counts = (level < growth.levels - 1)[:, None]
    scores = scores.where(counts, -torch.inf)
    there = scores > -torch.inf
    chosen = chosen.where(there, 0)  # nothing is open any more: whatever is computed there is impossible
    growth.open.scatter_(1, chosen, -torch.inf)
    here = torch.arange(level * width, (level + 1) * width, device=chosen.device)
    growth.expanded[:, here] = chosen.where(there, -1)
    above = growth.parents.gather(1, chosen)
    own = torch.zeros_like(bits[0, here])
    own.scatter_(1, (here // WORD)[:, None], (torch.ones_like(here) << (here % WORD))[:, None])
    seen = bits.gather(1, above[..., None].expand(-1, -1, bits.shape[2])) | own
    bits[:, 1 + here] = seen
    depths[:, 1 + here] = depths.gather(1, above) + 1
    positions = growth.length[:, None] - 1 + depths[:, 1 + here]
    growth.positions[:, here] = positions
    growth.next_positions.copy_(positions.view(1, -1))
    growth.next_tokens.copy_(growth.tokens.gather(1, chosen).clamp(max=readable - 1).view(1, -1))
    growth.next_scores.copy_(scores.flatten())
    growth.next_slots.copy_(growth.slots[:, here].flatten())
    growth.lengths.copy_(growth.length.where(counts[:, 0], 0))
    first = torch.zeros_like(seen[0])
    first[:, 0] = 1  # a node must see something that is there
    growth.ancestors.copy_(seen.where(counts[..., None], first).flatten(0, 1))


def choose_compiled(growth: Growth, level: int, readable: int) -> None:
    one = growth.arrays
    _choose_compiled(
        one.tokens, one.open, one.parents, one.expanded, one.bits, one.depths, one.slots, one.positions, one.length,
        one.next_tokens[0], one.next_positions[0], one.next_slots, one.next_scores, one.lengths, one.ancestors,
        one.levels, level, growth.width, readable,
    )  # fmt: skip


@compiled
def _choose_compiled(
    tokens: Ints, scores: Any, parents: Ints, expanded: Ints, bits: Ints, depths: Ints, slots: Ints, positions: Ints,
    length: Ints, next_tokens: Ints, next_positions: Ints, next_slots: Ints, next_scores: Any, lengths: Any,
    ancestors: Ints, levels: Ints, level: int, width: int, readable: int,
) -> None:  # fmt: skip
    words = bits.shape[2]
    for text in range(len(length)):
        counts = level < levels[text] - 1
        lengths[text] = length[text] if counts else 0
        for rank in range(width):
            row, slot, chosen, best = text * width + rank, level * width + rank, 0, -inf
            if counts:
                for node in range(tokens.shape[1]):
                    if scores[text, node] > best:
                        chosen, best = node, scores[text, node]
            scores[text, chosen] = -inf
            expanded[text, slot] = chosen if best > -inf else -1
            above = parents[text, chosen]
            depths[text, 1 + slot] = depths[text, above] + 1
            for word in range(words):
                seen = bits[text, above, word]
                if word == slot // WORD:
                    seen |= np.int64(1) << np.int64(slot % WORD)
                bits[text, 1 + slot, word] = seen
                ancestors[row, word] = seen if counts else np.int64(word == 0)  # it must see something that is there
            positions[text, slot] = length[text] - 1 + depths[text, 1 + slot]
            next_positions[row], next_slots[row] = positions[text, slot], slots[text, slot]
            next_tokens[row], next_scores[row] = min(tokens[text, chosen], readable - 1), best


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    tokens, open_scores, parents, expanded, bits, depths, positions, length,
    next_tokens, next_positions, next_slots, next_scores, levels, slots, lengths, ancestors,
    first, nodes, words, k, last_token,
    width: tl.constexpr, block: tl.constexpr, padded_words: tl.constexpr,
):  # fmt: skip
    text = tl.program_id(0)
    expansions, here = nodes // k, text * nodes
    place, rank = tl.arange(0, block), tl.arange(0, width)
    score = tl.load(open_scores + here + place, mask=place < nodes, other=-float("inf"))
    chosen, scores = tl.zeros([width], tl.int32), tl.zeros([width], tl.float32)
    for step in tl.static_range(width):
        best, at = tl.max(score, axis=0, return_indices=True)
        score = tl.where(place == at, -float("inf"), score)
        chosen, scores = tl.where(rank == step, at, chosen), tl.where(rank == step, best, scores)
    counts = first < (tl.load(levels + text) - 1) * width
    scores = tl.where(counts, scores, -float("inf"))
    there = scores > -float("inf")
    chosen = tl.where(there, chosen, 0)
    slot = first + rank
    above = text * expansions + tl.load(parents + here + chosen)
    depth = tl.load(depths + above) + 1
    end = tl.load(length + text)
    token = tl.minimum(tl.load(tokens + here + chosen), last_token)
    word = tl.arange(0, padded_words)
    inside = (word < words)[None, :]
    seen = tl.load(bits + above[:, None] * words + word[None, :], mask=inside, other=0)
    one = tl.full([width], 1, tl.int64) << (slot % BITS).to(tl.int64)
    own = tl.where((slot // BITS)[:, None] == word[None, :], one[:, None], 0)
    expansion = text * expansions + 1 + slot
    tl.store(open_scores + here + chosen, tl.full([width], -float("inf"), tl.float32))
    tl.store(expanded + text * tl.maximum(expansions - 1, 1) + slot, tl.where(there, chosen, -1).to(tl.int64))
    tl.store(bits + expansion[:, None] * words + word[None, :], seen | own, mask=inside)
    tl.store(depths + expansion, depth)
    tl.store(positions + text * words * BITS + slot, end - 1 + depth)
    row = text * width + rank
    tl.store(next_positions + row, end - 1 + depth)
    tl.store(next_tokens + row, token)
    tl.store(next_scores + row, scores)
    tl.store(next_slots + row, tl.load(slots + text * words * BITS + slot))
    tl.store(lengths + text, tl.where(counts, end, 0).to(lengths.dtype.element_ty))
    first_alone = tl.where(word == 0, 1, 0)[None, :].to(tl.int64)
    tl.store(ancestors + row[:, None] * words + word[None, :], tl.where(counts, seen | own, first_alone), mask=inside)


def choose_triton(growth: Growth, level: int, readable: int) -> None:
    words, nodes = growth.bits.shape[-1], growth.tokens.shape[-1]
    told = growth.levels, growth.slots, growth.lengths, growth.ancestors
    _choose[(growth.sequences,)](
        growth.tokens, growth.open, growth.parents, growth.expanded, growth.bits, growth.depths, growth.positions,
        growth.length, growth.next_tokens, growth.next_positions, growth.next_slots, growth.next_scores, *told,
        level * growth.width, nodes, words, growth.k, readable - 1,
        width=growth.width, block=triton.next_power_of_2(nodes),
        padded_words=triton.next_power_of_2(words), num_warps=4,
    )  # fmt: skip


def note(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor) -> None:
    """Children [rows, k] of the expansions from `first` on, whose own paths have these scores. Behind an end comes
    nothing, and behind the deepest."""
    if growth.tokens.device.type == "cpu":
        return note_compiled(growth, first, scores, tokens, chances)
    step = note_triton if available else note_reference
    step(growth, first, scores, tokens, chances)


def note_reference(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor) -> None:
    texts, k = growth.sequences, growth.k
    rows = len(tokens) // texts
    here = slice(first * k, (first + rows) * k)
    paths = (scores[:, None] + corrected(growth, chances)).view(texts, -1)
    growth.tokens[:, here] = tokens.view(texts, -1)
    numbers = torch.arange(first, first + rows, device=tokens.device)
    growth.parents[:, here] = numbers.repeat_interleave(k, output_size=rows * k)
    ended = (tokens.view(texts, -1, 1) == growth.ends[:, None]).any(dim=-1)
    too_deep = growth.depths[:, first : first + rows] + 1 >= growth.deepest[:, None]
    ended |= too_deep.repeat_interleave(k, dim=1)
    growth.open[:, here] = paths.masked_fill(ended, -torch.inf)
    expanded = growth.expanded
    nodes = expanded[:, first - 1 : first - 1 + rows] if first else torch.full_like(expanded[:, :1], -1)
    columns = (tokens, chances, nodes.reshape(-1, 1))
    found = torch.cat([column.double() for column in columns], dim=1).view(texts, rows, -1)
    growth.report[first : first + rows] = found.transpose(0, 1)


def corrected(growth: Growth, chances: Tensor) -> Tensor:
    """Log-probabilities [texts * rows, k], the best first, with the odds of their texts."""
    own = growth.odds.to(chances.dtype).repeat_interleave(len(chances) // growth.sequences, dim=0)
    other, best = own.split(1, dim=1)
    odds = torch.cat([best, other.expand(-1, growth.k - 1)], dim=1)
    return chances + odds.log() - (chances.exp() * (odds - 1)).log1p()


def note_compiled(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor) -> None:
    one = growth.arrays
    _note_compiled(
        one.tokens, one.open, one.parents, one.expanded, one.report, one.odds, one.ends, one.depths, one.deepest,
        scores.numpy(), tokens.numpy(), chances.numpy(), first,
    )  # fmt: skip


@compiled
def _note_compiled(
    tokens: Ints, open_scores: Any, parents: Ints, expanded: Ints, report: Floats, odds: Floats, ends: Ints,
    depths: Ints, deepest: Ints, paths: Any, proposed: Ints, chances: Any, first: int,
) -> None:  # fmt: skip
    texts, k = len(tokens), proposed.shape[1]
    rows = len(proposed) // texts
    for text in range(texts):
        for row in range(rows):
            given, expansion = text * rows + row, first + row
            report[expansion, text, 2 * k] = expanded[text, expansion - 1] if expansion else -1
            for rank in range(k):
                node, chance = expansion * k + rank, chances[given, rank]
                own = odds[text, 1 if rank == 0 else 0]
                score = paths[given] + chance + log(own) - log1p(exp(chance) * (own - 1.0))
                if depths[text, expansion] + 1 >= deepest[text]:
                    score = -inf
                for end in ends[text]:
                    if proposed[given, rank] == end:
                        score = -inf
                tokens[text, node], open_scores[text, node] = proposed[given, rank], score
                parents[text, node] = expansion
                report[expansion, text, rank], report[expansion, text, k + rank] = proposed[given, rank], chance


@triton.jit
def _corrected(chance, odds):  # type: ignore[no-untyped-def]
    return chance + tl.log(odds) - tl.log(1.0 + tl.exp(chance) * (odds - 1.0))


@triton.jit
def _is_end(token, ends):  # type: ignore[no-untyped-def]
    found = token < 0
    for one in tl.static_range(END_TOKENS):
        found = found | (token == tl.load(ends + one))
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _note(  # type: ignore[no-untyped-def]
    tokens, open_scores, parents, expanded, report, odds, paths, proposed, chances, ends, depths, deepest,
    first, count, nodes, k, block: tl.constexpr,
):  # fmt: skip
    text, texts = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, block)
    there = place < count
    given = text * count + place
    token = tl.load(proposed + given, mask=there, other=0)
    chance = tl.load(chances + given, mask=there, other=0.0)
    own_odds = tl.load(odds + 2 * text + (place % k == 0).to(tl.int32)).to(tl.float32)
    score = tl.load(paths + given // k, mask=there, other=0.0) + _corrected(chance, own_odds)
    here, row = text * nodes + first * k + place, first + place // k
    depth = tl.load(depths + text * (nodes // k) + row, mask=there, other=0) + 1
    ended = _is_end(token, ends + text * END_TOKENS) | (depth >= tl.load(deepest + text))
    tl.store(tokens + here, token, mask=there)
    tl.store(open_scores + here, tl.where(ended, -float("inf"), score), mask=there)
    tl.store(parents + here, row.to(tl.int64), mask=there)
    column = report + (row * texts + text) * (2 * k + 1) + place % k
    tl.store(column, token.to(tl.float64), mask=there)
    tl.store(column + k, chance.to(tl.float64), mask=there)
    before = text * tl.maximum(nodes // k - 1, 1)
    node = tl.load(expanded + before + row - 1, mask=there & (row > 0), other=-1)
    tl.store(column + 2 * k, node.to(tl.float64), mask=there & (place % k == 0))


def note_triton(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor) -> None:
    count = tokens.numel() // growth.sequences
    _note[(growth.sequences,)](
        growth.tokens, growth.open, growth.parents, growth.expanded, growth.report, growth.odds,
        scores, tokens.contiguous(), chances.contiguous(), growth.ends, growth.depths, growth.deepest,
        first, count, growth.tokens.shape[-1], growth.k, block=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip


def grow_by_depth(growth: Growth, tokens: Tensor, chances: Tensor, readable: int) -> None:
    """A whole report, of levels of one node: what a draft says at nodes of each depth is known.

    # [sequences, depths, k] each
    """
    grow = grow_by_depth_triton if growth.tokens.is_cuda and available else grow_by_depth_reference
    grow(growth, tokens, chances, readable)


def grow_by_depth_reference(growth: Growth, tokens: Tensor, chances: Tensor, readable: int) -> None:
    scores = torch.zeros_like(growth.next_scores)
    for expansion in range(len(growth.report)):
        if expansion:
            choose(growth, expansion - 1, readable)
            scores = growth.next_scores
        depth = growth.depths[:, expansion].clamp(max=tokens.shape[1] - 1)  # deeper: nothing was open
        said = depth[:, None, None].expand(-1, 1, growth.k)
        note(growth, expansion, scores, tokens.gather(1, said)[:, 0], chances.gather(1, said)[:, 0])


@triton.jit  # type: ignore[untyped-decorator]
def _grow_by_depth(  # type: ignore[no-untyped-def]
    report, odds, ends, levels, deepest, proposed, chances, expansions, depths, k, block: tl.constexpr
):
    """Open nodes are held in registers: between two expansions nothing is read but what is said at a depth."""
    text, texts = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, block)
    score = tl.full([block], -float("inf"), tl.float32)
    depth_of = tl.zeros([block], tl.int32)
    wanted, last = tl.load(levels + text), tl.load(deepest + text)
    odds_of_others, odds_of_best = tl.load(odds + 2 * text).to(tl.float32), tl.load(odds + 2 * text + 1).to(tl.float32)
    node, depth, path = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    for expansion in range(expansions):
        rank = place - expansion * k
        mine = (rank >= 0) & (rank < k)
        said = (text * depths + tl.minimum(depth, depths - 1)) * k + rank
        token = tl.load(proposed + said, mask=mine, other=0)
        chance = tl.load(chances + said, mask=mine, other=0.0)
        child = path + _corrected(chance, tl.where(rank == 0, odds_of_best, odds_of_others))
        ended = _is_end(token, ends + text * END_TOKENS) | (depth + 1 >= last)
        score = tl.where(mine, tl.where(ended, -float("inf"), child), score)
        depth_of = tl.where(mine, depth + 1, depth_of)
        column = report + (expansion * texts + text) * (2 * k + 1) + rank
        tl.store(column, token.to(tl.float64), mask=mine)
        tl.store(column + k, chance.to(tl.float64), mask=mine)
        tl.store(column + 2 * k, node.to(tl.float64), mask=mine & (rank == 0))
        best, at = tl.max(score, axis=0, return_indices=True)
        there = (best > -float("inf")) & (expansion + 1 < wanted)
        at = tl.where(there, at, 0)
        node, path = tl.where(there, at, -1), tl.where(there, best, -float("inf"))
        depth = tl.sum(tl.where(place == at, depth_of, 0), axis=0)
        score = tl.where(place == at, -float("inf"), score)


def grow_by_depth_triton(growth: Growth, tokens: Tensor, chances: Tensor, readable: int) -> None:
    block = triton.next_power_of_2(growth.tokens.shape[-1])
    _grow_by_depth[(growth.sequences,)](
        growth.report, growth.odds, growth.ends, growth.levels, growth.deepest,
        tokens.contiguous(), chances.contiguous(), len(growth.report), tokens.shape[1], growth.k,
        block=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
