"""The steps of `growth` as Triton kernels: each is one launch of one program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftgraph.engine.growth import Growth

WORD = tl.constexpr(64)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    tokens, open_scores, parents, expanded, bits, depths, positions, length,
    next_tokens, next_positions, next_slots, next_scores, first, nodes, words, last_token,
    width: tl.constexpr, block: tl.constexpr, padded_words: tl.constexpr,
):  # fmt: skip
    place, rank = tl.arange(0, block), tl.arange(0, width)
    score = tl.load(open_scores + place, mask=place < nodes, other=-float("inf"))
    chosen, scores = tl.zeros([width], tl.int32), tl.zeros([width], tl.float32)
    for step in tl.static_range(width):
        best, at = tl.max(score, axis=0, return_indices=True)
        score = tl.where(place == at, -float("inf"), score)
        chosen, scores = tl.where(rank == step, at, chosen), tl.where(rank == step, best, scores)
    there = scores > -float("inf")
    chosen = tl.where(there, chosen, 0)
    slot = first + rank
    above = tl.load(parents + chosen)
    depth = tl.load(depths + above) + 1
    text = tl.load(length)
    token = tl.minimum(tl.load(tokens + chosen), last_token)
    word = tl.arange(0, padded_words)
    inside = (word < words)[None, :]
    seen = tl.load(bits + above[:, None] * words + word[None, :], mask=inside, other=0)
    one = tl.full([width], 1, tl.int64) << (slot % WORD).to(tl.int64)
    own = tl.where((slot // WORD)[:, None] == word[None, :], one[:, None], 0)
    tl.store(open_scores + chosen, tl.full([width], -float("inf"), tl.float32))
    tl.store(expanded + slot, tl.where(there, chosen, -1).to(tl.int64))
    tl.store(bits + (1 + slot)[:, None] * words + word[None, :], seen | own, mask=inside)
    tl.store(depths + 1 + slot, depth)
    tl.store(positions + slot, text - 1 + depth)
    tl.store(next_positions + rank, text - 1 + depth)
    tl.store(next_slots + rank, text + slot)
    tl.store(next_tokens + rank, token)
    tl.store(next_scores + rank, scores)


@triton.jit  # type: ignore[untyped-decorator]
def _note(  # type: ignore[no-untyped-def]
    tokens, scores, open_scores, parents, expanded, report, paths, proposed, chances, is_end,
    first, count, k, block: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, block)
    there = place < count
    token = tl.load(proposed + place, mask=there, other=0)
    chance = tl.load(chances + place, mask=there, other=0.0)
    score = tl.load(paths + place // k, mask=there, other=0.0) + chance
    ended = tl.load(is_end + token, mask=there, other=0) != 0
    here = first * k + place
    tl.store(tokens + here, token, mask=there)
    tl.store(scores + here, score, mask=there)
    tl.store(open_scores + here, tl.where(ended, -float("inf"), score), mask=there)
    tl.store(parents + here, (first + place // k).to(tl.int64), mask=there)
    row = first + place // k
    column = report + row * (2 * k + 1) + place % k
    tl.store(column, token.to(tl.float64), mask=there)
    tl.store(column + k, chance.to(tl.float64), mask=there)
    node = tl.load(expanded + row - 1, mask=there & (row > 0), other=-1)
    tl.store(column + 2 * k, node.to(tl.float64), mask=there & (place % k == 0))


def choose(growth: Growth, level: int, readable: int) -> None:
    words = growth.bits.shape[1]
    _choose[(1,)](
        growth.tokens, growth.open, growth.parents, growth.expanded, growth.bits, growth.depths, growth.positions,
        growth.length, growth.next_tokens, growth.next_positions, growth.next_slots, growth.next_scores,
        level * growth.width, len(growth.tokens), words, readable - 1,
        width=growth.width, block=triton.next_power_of_2(len(growth.tokens)),
        padded_words=triton.next_power_of_2(words), num_warps=4,
    )  # fmt: skip


def note(growth: Growth, first: int, scores: Tensor, tokens: Tensor, chances: Tensor, is_end: Tensor) -> None:
    count = tokens.numel()
    _note[(1,)](
        growth.tokens, growth.scores, growth.open, growth.parents, growth.expanded, growth.report,
        scores, tokens.contiguous(), chances.contiguous(), is_end,
        first, count, growth.k, block=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
