"""What heads learn that read the target's states: level by level (EAGLE-3), or a block at once (DFlash, JetSpec).

The target runs on the texts of a batch as they are learnt; its states are kept where all of them fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from draftgraph.distillation.answers import Text, epoch_of, learnt_positions, padded
from draftgraph.distillation.progress import Scores
from draftgraph.distillation.recipe import Recipe, loss_terms
from draftgraph.distillation.training import (
    CHAIN,
    SCORED_TOKENS,
    SharedHead,
    distillation_loss,
    fits,
    mixed_precision,
    naming_batch_tokens,
    scores_of,
)
from draftgraph.engine.borrowing import evaluating
from draftgraph.graph import Ints

LEVELS = 3  # that a head of kind states is unrolled for in training
LEVEL_WEIGHT = 0.8  # of a level against the one before it, as in SpecForge
FADING = 7 / 16  # of the block size: the depth at which a place weighs 1/e of the first (DFlash: 7 of 16, 4 of 8)
SCORED_TEXTS = 64  # while training: a head is asked from every token of an answer
Run = Callable[..., Any]  # the forward pass of a head


class HeadLesson:
    """What both kinds share: the target's states and logits of a batch."""

    def __init__(self, target: Any, student: Any, texts: list[Text], recipe: Recipe) -> None:
        self.target, self.student, self.texts, self.recipe = target, student, texts, recipe
        self.device = target.get_input_embeddings().weight.device
        self.head = SharedHead(target, student.get_output_embeddings())
        self.terms = loss_terms(recipe.loss)
        self.width = target.get_output_embeddings().weight.shape[1]
        columns = (len(student.reads) + 1) * self.width
        size = sum(len(text.tokens) for text in texts) * columns * target.dtype.itemsize
        # Of each text what the head reads, and behind it what the target's output matrix reads; None: they do not fit.
        self.known: dict[int, Tensor] | None = {} if fits(size, self.device) else None  # [tokens, columns]

    def __enter__(self) -> HeadLesson:
        self.head.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.head.__exit__()

    def score(self, texts: list[Text]) -> Scores:
        return score_head(self.student, self.target, texts[:SCORED_TEXTS], self.recipe.batch_tokens)

    @torch.no_grad()
    def taught(self, rows: list[int], tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The target's states that the head reads [rows, length, states], and its logits at positions of the flattened
        batch [positions, vocabulary]."""
        if self.known is not None and self.known.keys() >= set(rows):
            found = pad_sequence([self.known[row] for row in rows], batch_first=True)
            states, last = found.split([found.shape[-1] - self.width, self.width], dim=-1)
            return states, self.head.of_states(last.reshape(-1, self.width)[positions])
        states, logits = states_of(self.head, self.target, tokens, positions, self.student.reads)
        assert self.head.inputs is not None
        last = self.head.inputs
        if self.known == {} and not torch.equal(self.head.of_states(last[positions][None])[0], logits):
            self.known = None  # something follows this model's head
        if self.known is not None:
            whole = torch.cat([states, last.view(*tokens.shape, -1).to(states.dtype)], dim=-1)
            for row, found in zip(rows, whole, strict=True):
                self.known[row] = found[: len(self.texts[row].tokens)].clone()
        return states, logits


class StatesLesson(HeadLesson):
    """EAGLE-3's training-time test: from the second level on the head reads its own states, as when it drafts."""

    def __init__(self, target: Any, student: Any, texts: list[Text], recipe: Recipe) -> None:
        super().__init__(target, student, texts, recipe)
        self.positions = [learnt_positions(text, recipe.prompt_share) for text in texts]
        self.positions = [learnt[learnt >= LEVELS] for learnt in self.positions]  # all levels learn the same ones

    def loss(self, rows: list[int], step: int) -> tuple[Tensor, Tensor, float]:
        tokens = padded([self.texts[row] for row in rows]).to(self.device, non_blocking=True)
        learnt, length = [self.positions[row] for row in rows], tokens.shape[1]
        theirs_at = flattened(learnt, length).to(self.device, non_blocking=True)
        ours_at = flattened([places - 1 for places in learnt], length - 1).to(self.device, non_blocking=True)
        states, theirs = self.taught(rows, tokens, theirs_at)
        run = partial(self.head.outputs, self.student, positions=ours_at)
        total, agreement, weight = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 1.0
        with mixed_precision(self.student):
            for output in unrolled(run, self.student.project, tokens, states, LEVELS):
                loss, agree = distillation_loss(output.logits[0], theirs, self.terms)
                total, agreement = total + weight * loss, agreement + weight * agree.sum()
                weight *= LEVEL_WEIGHT
        count = len(theirs_at) * sum(LEVEL_WEIGHT**level for level in range(LEVELS))
        return total, agreement, count


class BlockLesson(HeadLesson):
    """Blocks from random places of each text, all in one pass; later depths weigh less."""

    def __init__(self, target: Any, student: Any, texts: list[Text], recipe: Recipe) -> None:
        super().__init__(target, student, texts, recipe)
        self.positions = [learnt_positions(text, recipe.prompt_share) for text in texts]

    def loss(self, rows: list[int], step: int) -> tuple[Tensor, Tensor, float]:
        texts = [self.texts[row] for row in rows]
        tokens, size = padded(texts).to(self.device, non_blocking=True), self.student.block_size
        anchors = self.anchors(rows, step)
        which, block, place = learnt_places(anchors, [len(text.tokens) for text in texts], size)
        length, blocks = tokens.shape[1], anchors.shape[1]
        ours_at = torch.from_numpy(which * (length + blocks * size) + length + block * size + place).to(self.device)
        theirs_at = torch.from_numpy(which * length + anchors[which, block] + place - 1).to(self.device)
        weights = torch.from_numpy(np.exp(-(place - 1) / (FADING * size)).astype(np.float32)).to(self.device)
        states, theirs = self.taught(rows, tokens, theirs_at)
        run = partial(self.head.outputs, self.student, positions=ours_at)
        with mixed_precision(self.student):
            output = drafted_blocks(run, self.student, tokens, states, torch.from_numpy(anchors).to(self.device))
        loss, agree = distillation_loss(output.logits[0], theirs, self.terms, weights)
        return loss, (agree * weights).sum(), float(weights.sum())

    def anchors(self, rows: list[int], step: int) -> Ints:
        """Last known tokens of blocks, drawn by the seed and the step; enough for every token to be learnt once, or as
        many as a step holds. -1: none.  # [rows, blocks]"""
        random, size = np.random.default_rng([self.recipe.seed, step]), self.student.block_size
        most = max(1, self.recipe.batch_tokens // (len(rows) * size))
        drawn = []
        for row in rows:
            learnt = self.positions[row]
            count = min(most, len(learnt), math.ceil(len(learnt) / (size - 1)))
            drawn.append(np.sort(random.choice(learnt, count, replace=False)))
        found = np.full((len(rows), max(1, *map(len, drawn))), -1, dtype=np.int64)
        for one, places in zip(found, drawn, strict=True):
            one[: len(places)] = places
        return found


def flattened(places: list[Ints], length: int) -> Tensor:
    """Places of each row as places of all rows behind one another."""
    return torch.from_numpy(np.concatenate([row * length + one for row, one in enumerate(places)]))


def states_of(
    head: SharedHead, target: Any, tokens: Tensor, positions: Tensor, reads: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The target's states [rows, length, len(reads) * hidden], and its logits at positions of the flattened batch."""
    output = head.outputs(target, tokens, positions, output_hidden_states=True)
    return torch.cat([output.hidden_states[index] for index in reads], dim=-1), output.logits[0]


def unrolled(run: Run, project: Run, tokens: Tensor, states: Tensor, levels: int) -> Iterator[Any]:
    """The outputs of so many levels of a head. Row j has the token x[j+1] and a state for x[j], and is about x[j+2]: at
    the first level the target's state, at each later one what the head made of the row before it one level earlier."""
    cache, length = DynamicCache(), tokens.shape[1] - 1
    given = project(states[:, :-1])
    positions = torch.arange(length, device=tokens.device)[None]
    for level in range(levels):
        mask = level_mask(length, level, tokens.device)
        more = {"position_ids": positions, "past_key_values": cache, "attention_mask": mask, "states": given}
        output = run(tokens=tokens[:, 1:], **more)
        yield output
        given = pad(output.states[:, :-1], (0, 0, 1, 0))


def level_mask(length: int, level: int, device: torch.device) -> Tensor:
    """What a row of a level sees: the text up to where its own draft began, then one row of each level on the way.

    >>> level_mask(3, 1, torch.device("cpu"))[0, 0].int().tolist()
    [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]
    """
    row, column = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    on_the_way = [column == row - (level - earlier) for earlier in range(1, level + 1)]
    return torch.cat([column <= row - level, *on_the_way], dim=1)[None, None]


def learnt_places(anchors: Ints, lengths: list[int], size: int) -> tuple[Ints, Ints, Ints]:
    """Rows, blocks and places in them of all that a block drafts inside of its text."""
    places = np.arange(size)
    inside = anchors[:, :, None] + places < np.array(lengths)[:, None, None]
    rows, blocks, found = np.nonzero(inside & (anchors[:, :, None] >= 0) & (places > 0))
    return rows, blocks, found


def drafted_blocks(run: Run, head: Any, tokens: Tensor, states: Tensor, anchors: Tensor) -> Any:
    """The output of a head for the blocks behind these places of a text, its rows behind those of the text."""
    (rows, length), size, blocks = tokens.shape, head.block_size, anchors.shape[1]
    known = anchors.clamp(min=0)
    ids = tokens.new_full((rows, blocks, size), head.mask_token_id)
    ids[:, :, 0] = tokens.gather(1, known)
    here = torch.arange(size, device=tokens.device)
    before = torch.arange(length, device=tokens.device)
    positions = torch.cat([before.expand(rows, -1), (known[:, :, None] + here).flatten(1)], dim=1)
    projected = head.project(states)
    given = torch.cat([projected, projected.new_zeros(rows, blocks * size, projected.shape[-1])], dim=1)
    return run(
        tokens=torch.cat([tokens, ids.flatten(1)], dim=1),
        position_ids=positions,
        attention_mask=block_mask(known, length, size, head.causal),
        states=given,
    )


def block_mask(anchors: Tensor, length: int, size: int, causal: bool) -> Tensor:
    """Who sees whom: a block the text before it, and itself; rows of the text, which only lend keys and values,
    themselves.  # [rows, 1, length + blocks * size, the same]

    >>> block_mask(torch.tensor([[1]]), 2, 2, True)[0, 0].int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    """
    (rows, blocks), device = anchors.shape, anchors.device
    nodes = length + blocks * size
    mask = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    before = torch.arange(length, device=device) < anchors[:, :, None]  # [rows, blocks, length]
    mask[:, length:, :length] = before.repeat_interleave(size, dim=1)
    within = torch.ones(size, size, dtype=torch.bool, device=device)
    same_block = torch.eye(blocks, dtype=torch.bool, device=device)
    inside = same_block.repeat_interleave(size, 0).repeat_interleave(size, 1)
    mask[:, length:, length:] = inside & (within.tril() if causal else within).repeat(blocks, blocks)
    return mask[:, None]


def score_head(student: Any, target: Any, texts: list[Text], batch_tokens: int = SCORED_TOKENS) -> Scores:
    """Agreement of the first drafted token, and tokens per pass of chains, each depth as the head drafts it."""
    hits_of = {"states": hits_by_level, "block": hits_by_place}[student.kind]
    head, hits = SharedHead(target, student.get_output_embeddings()), [np.zeros((1, 0), dtype=bool) for _ in texts]
    lengths = np.array([len(text.tokens) for text in texts])
    most = min(batch_tokens, SCORED_TOKENS)
    with naming_batch_tokens(batch_tokens), torch.no_grad(), evaluating(target), evaluating(student):
        for rows in epoch_of(lengths, most, 0):
            tokens = padded([texts[row] for row in rows]).to(target.get_input_embeddings().weight.device)
            with head:
                states, _ = states_of(head, target, tokens, torch.zeros(1, dtype=torch.long), student.reads)
            with mixed_precision(student):
                found = hits_of(student, tokens, states, [texts[row] for row in rows], most)
            for row, one in zip(rows, found, strict=True):
                hits[row] = one
    return replace(scores_of(hits), by_depth=agreement_by_depth(hits))


def agreement_by_depth(hits: list[NDArray[np.bool_]]) -> tuple[float, ...]:
    """The share of hits at each depth. Nothing is drafted so deep before the answer's first tokens.

    >>> agreement_by_depth([np.array([[True, False, True], [False, True, False]])])
    (0.6666666666666666, 0.5)
    """
    depths = max((len(row) for row in hits), default=0)
    found = [np.concatenate([row[depth, depth:] for row in hits if depth < len(row)]) for depth in range(depths)]
    return tuple(float(one.mean()) if len(one) else 0.0 for one in found)


def best_tokens(student: Any, output: Any) -> Tensor:
    best: Tensor = output.logits.argmax(dim=-1)
    token_map = getattr(student, "token_map", None)
    return best if token_map is None else token_map[best]


def pass_of(student: Any, tokens: Tensor, **more: Any) -> Any:
    return student(input_ids=tokens, use_cache=False, **more)


def hits_by_level(
    student: Any, tokens: Tensor, states: Tensor, texts: list[Text], most: int
) -> list[NDArray[np.bool_]]:
    """For each level and token of an answer, whether the head's best token is the target's.  # [levels, tokens]"""
    table = []
    for output in unrolled(partial(pass_of, student), student.project, tokens, states, CHAIN):
        agree = best_tokens(student, output)[:, :-1] == tokens[:, 2:]
        table.append(pad(agree, (2, 0)))  # nothing is said about the first two
    found = torch.stack(table, dim=1).cpu().numpy()
    pairs = zip(found, texts, strict=True)
    return [one[:, text.prompt_length : len(text.tokens)] for one, text in pairs]


def hits_by_place(
    student: Any, tokens: Tensor, states: Tensor, texts: list[Text], most: int
) -> list[NDArray[np.bool_]]:
    """The same for the places of a block, drafted behind every token before one of the answer."""
    size, found = student.block_size, []
    for row, text in enumerate(texts):
        length, first = len(text.tokens), text.prompt_length - 1
        agree = np.zeros((size - 1, length), dtype=bool)
        for anchors in torch.arange(first, length - 1, device=tokens.device)[None].split(max(1, most // size), dim=1):
            own = (tokens[row : row + 1, :length], states[row : row + 1, :length])
            output = drafted_blocks(partial(pass_of, student), student, *own, anchors)
            said = best_tokens(student, output)[0, length:].view(-1, size).cpu().numpy()
            _, blocks, places = learnt_places(anchors.cpu().numpy(), [length], size)
            at = anchors[0].cpu().numpy()[blocks] + places
            agree[places - 1, at] = said[blocks, places] == text.tokens[at]
        found.append(agree[:CHAIN, text.prompt_length :])
    return found
