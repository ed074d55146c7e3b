"""Trees that grow on a device, a level at a time: what was proposed, what is open, and what each node sees.

One text's tree, or those of many texts, which grow side by side: every tensor then has a row for each text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftgraph.compiled.passes import WORD
from draftgraph.kernels.triton_or_stub import available, tl, triton

ENDS = 8  # tokens behind which one of many texts drafts nothing; of more, the rest is drafted behind in vain
BITS, END_TOKENS = tl.constexpr(WORD), tl.constexpr(ENDS)  # the same for kernels
EVEN = 1.0, 1.0  # odds, of children and of best ones, that correct nothing


@dataclass
class Shared:
    """What many texts need besides, each having places of its own in a pool.

    A text may want fewer levels than the others, or none: behind them its nodes see no text and write where nothing is
    kept.
    """

    pages: Tensor  # int32 [texts, most pages], of each text in its order
    levels: Tensor  # [texts], that count, the root's among them
    ends: Tensor  # [texts, ENDS], tokens that nothing follows; none: -1
    trash: int  # slot that anybody may write into
    page: int  # slots of a page
    slots: Tensor  # [texts, slots], of the expanded nodes
    starts: Tensor  # int32 [texts + 1], of a level's nodes
    lengths: Tensor  # int32 [texts], of the text that a level's nodes see
    ancestors: Tensor  # [texts * width, words], that they see

    @classmethod
    def of(cls, pages: Tensor, levels: Tensor, ends: Tensor, trash: int, page: int, width: int, words: int) -> Shared:
        texts, device = len(levels), levels.device
        return cls(
            pages,
            levels,
            ends,
            trash,
            page,
            slots=torch.zeros(texts, words * WORD, dtype=torch.long, device=device),
            starts=torch.arange(0, (texts + 1) * width, width, dtype=torch.int32, device=device),
            lengths=torch.zeros(texts, dtype=torch.int32, device=device),
            ancestors=torch.zeros(texts * width, words, dtype=torch.long, device=device),
        )

    def find_slots(self, length: Tensor, width: int) -> None:
        """The places behind texts of these lengths. # [texts]"""
        number = torch.arange(self.slots.shape[1], device=length.device)
        place = length[:, None] + number
        page = self.pages.gather(1, (place // self.page).clamp(max=self.pages.shape[1] - 1)).long()
        counts = number < (self.levels[:, None] - 1) * width
        self.slots.copy_(torch.where(counts, page * self.page + place % self.page, self.trash))


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

    def level(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the chosen nodes of a level of one text see: the fields of a `GraphPass`."""
        first = 1 + number * self.width
        rows = self.bits[None, first : first + self.width]
        return self.length, rows, self.next_positions, self.positions

    def packed_level(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """What the nodes of many texts see that were chosen last: the fields of a `PackedData`."""
        assert self.shared is not None
        shared = self.shared.starts, self.shared.lengths, self.shared.pages, self.shared.ancestors
        return *shared, self.next_positions, self.positions, self.width


def words_for(expansions: int) -> int:
    return max(1, -(-expansions // WORD))


def choose(growth: Growth, level: int, readable: int) -> None:
    """Takes the likeliest open nodes, and prepares their pass; tokens from `readable` on are read as the one before."""
    step = choose_triton if growth.tokens.is_cuda and available else choose_reference
    step(growth, level, readable)


def choose_reference(growth: Growth, level: int, readable: int) -> None:
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
        first[:, 0] = 1  # a node must see something that is there
        shared.ancestors.copy_(seen.where(counts[..., None], first).flatten(0, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    tokens, open_scores, parents, expanded, bits, depths, positions, length,
    next_tokens, next_positions, next_slots, next_scores, levels, slots, lengths, ancestors,
    first, nodes, words, k, last_token,
    width: tl.constexpr, block: tl.constexpr, padded_words: tl.constexpr,
):  # fmt: skip
    """The last four pointers are those of `Shared`; none where a text is alone."""
    text = tl.program_id(0)
    expansions, here = nodes // k, text * nodes
    place, rank = tl.arange(0, block), tl.arange(0, width)
    score = tl.load(open_scores + here + place, mask=place < nodes, other=-float("inf"))
    chosen, scores = tl.zeros([width], tl.int32), tl.zeros([width], tl.float32)
    for step in tl.static_range(width):
        best, at = tl.max(score, axis=0, return_indices=True)
        score = tl.where(place == at, -float("inf"), score)
        chosen, scores = tl.where(rank == step, at, chosen), tl.where(rank == step, best, scores)
    if levels is not None:
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
    if levels is None:
        tl.store(next_slots + row, end + slot)
    else:
        tl.store(next_slots + row, tl.load(slots + text * words * BITS + slot))
        tl.store(lengths + text, tl.where(counts, end, 0).to(lengths.dtype.element_ty))
        first_alone = tl.where(word == 0, 1, 0)[None, :].to(tl.int64)
        tl.store(
            ancestors + row[:, None] * words + word[None, :], tl.where(counts, seen | own, first_alone), mask=inside
        )


def choose_triton(growth: Growth, level: int, readable: int) -> None:
    words, nodes, shared = growth.bits.shape[-1], growth.tokens.shape[-1], growth.shared
    told = (None,) * 4 if shared is None else (shared.levels, shared.slots, shared.lengths, shared.ancestors)
    _choose[(growth.texts,)](
        growth.tokens, growth.open, growth.parents, growth.expanded, growth.bits, growth.depths, growth.positions,
        growth.length, growth.next_tokens, growth.next_positions, growth.next_slots, growth.next_scores, *told,
        level * growth.width, nodes, words, growth.k, readable - 1,
        width=growth.width, block=triton.next_power_of_2(nodes),
        padded_words=triton.next_power_of_2(words), num_warps=4,
    )  # fmt: skip


def note(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor, is_end: Tensor | None) -> None:
    """Children [rows, k] of the expansions from `first` on, whose own paths have these scores. Behind an end comes
    nothing: of many texts each has its own ends."""
    step = note_triton if growth.tokens.is_cuda and available else note_reference
    step(growth, first, scores, tokens, chances, is_end)


def note_reference(
    growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor, is_end: Tensor | None
) -> None:
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


@triton.jit  # type: ignore[untyped-decorator]
def _note(  # type: ignore[no-untyped-def]
    tokens, scores, open_scores, parents, expanded, report, odds, paths, proposed, chances, is_end, ends,
    first, count, nodes, k, block: tl.constexpr,
):  # fmt: skip
    """One of `is_end`, by token, and `ends`, a few by text, is none."""
    text, texts = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, block)
    there = place < count
    given = text * count + place
    token = tl.load(proposed + given, mask=there, other=0)
    chance = tl.load(chances + given, mask=there, other=0.0)
    own_odds = tl.load(odds + 2 * text + (place % k == 0).to(tl.int32)).to(tl.float32)
    corrected = chance + tl.log(own_odds) - tl.log(1.0 + tl.exp(chance) * (own_odds - 1.0))
    score = tl.load(paths + given // k, mask=there, other=0.0) + corrected
    ended = place < 0
    if is_end is not None:
        ended = ended | (tl.load(is_end + token, mask=there, other=0) != 0)
    if ends is not None:
        for one in tl.static_range(END_TOKENS):
            ended = ended | (token == tl.load(ends + text * END_TOKENS + one))
    here = text * nodes + first * k + place
    tl.store(tokens + here, token, mask=there)
    tl.store(scores + here, score, mask=there)
    tl.store(open_scores + here, tl.where(ended, -float("inf"), score), mask=there)
    row = first + place // k
    tl.store(parents + here, row.to(tl.int64), mask=there)
    column = report + (row * texts + text) * (2 * k + 1) + place % k
    tl.store(column, token.to(tl.float64), mask=there)
    tl.store(column + k, chance.to(tl.float64), mask=there)
    before = text * tl.maximum(nodes // k - 1, 1)
    node = tl.load(expanded + before + row - 1, mask=there & (row > 0), other=-1)
    tl.store(column + 2 * k, node.to(tl.float64), mask=there & (place % k == 0))


def note_triton(
    growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor, is_end: Tensor | None
) -> None:
    count, ends = tokens.numel() // growth.texts, None if growth.shared is None else growth.shared.ends
    _note[(growth.texts,)](
        growth.tokens, growth.scores, growth.open, growth.parents, growth.expanded, growth.report, growth.odds,
        scores, tokens.contiguous(), chances.contiguous(), is_end, ends,
        first, count, growth.tokens.shape[-1], growth.k, block=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
