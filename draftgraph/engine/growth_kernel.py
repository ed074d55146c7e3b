"""The steps of `growth` as Triton kernels: each is one launch, with a program for every text."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftgraph.engine import growth as plain
from draftgraph.engine.growth import Growth

WORD, ENDS = tl.constexpr(64), tl.constexpr(plain.ENDS)


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
    one = tl.full([width], 1, tl.int64) << (slot % WORD).to(tl.int64)
    own = tl.where((slot // WORD)[:, None] == word[None, :], one[:, None], 0)
    expansion = text * expansions + 1 + slot
    tl.store(open_scores + here + chosen, tl.full([width], -float("inf"), tl.float32))
    tl.store(expanded + text * tl.maximum(expansions - 1, 1) + slot, tl.where(there, chosen, -1).to(tl.int64))
    tl.store(bits + expansion[:, None] * words + word[None, :], seen | own, mask=inside)
    tl.store(depths + expansion, depth)
    tl.store(positions + text * words * WORD + slot, end - 1 + depth)
    row = text * width + rank
    tl.store(next_positions + row, end - 1 + depth)
    tl.store(next_tokens + row, token)
    tl.store(next_scores + row, scores)
    if levels is None:
        tl.store(next_slots + row, end + slot)
    else:
        tl.store(next_slots + row, tl.load(slots + text * words * WORD + slot))
        tl.store(lengths + text, tl.where(counts, end, 0).to(lengths.dtype.element_ty))
        first_alone = tl.where(word == 0, 1, 0)[None, :].to(tl.int64)
        tl.store(
            ancestors + row[:, None] * words + word[None, :], tl.where(counts, seen | own, first_alone), mask=inside
        )


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
        for one in tl.static_range(ENDS):
            ended = ended | (token == tl.load(ends + text * ENDS + one))
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


def choose(growth: Growth, level: int, readable: int) -> None:
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
    count, ends = tokens.numel() // growth.texts, None if growth.shared is None else growth.shared.ends
    _note[(growth.texts,)](
        growth.tokens, growth.scores, growth.open, growth.parents, growth.expanded, growth.report, growth.odds,
        scores, tokens.contiguous(), chances.contiguous(), is_end, ends,
        first, count, growth.tokens.shape[-1], growth.k, block=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
