"""Trained heads grow their trees on their device: what they are fed there, and where their children come from.

States of accepted tokens never come to the host: the target's pass leaves those of all its nodes in one place, and the
pass in which the head reads new text gathers the accepted path from there. Heads of kind `states` then go on level by
level, each node with what the head left at its parent. Heads of kind `block` have said everything in that pass: what
follows at every depth, from which the best paths are grown without another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.config import GraphConfig
from draftgraph.engine.protocol import Segment
from draftgraph.engine.states import place_in
from draftgraph.graph import WORD
from draftgraph.kernels import growth
from draftgraph.proposers.device_draft import NEW_TOKENS, DeviceDraft, DeviceDrafts, Program, Row
from draftgraph.proposers.draft_model import DraftVocabulary
from draftgraph.proposers.heads import StatesReader, UnreadStates, projected

NOWHERE = -1  # the place of states that a node does not have


class HeadProgram(Program):
    """Reads states beside tokens: those of some new tokens wait in rows of its own, the target has left the others."""

    draft: HeadDrafts

    def __init__(self, draft: HeadDrafts, sequences: int, sampled: bool) -> None:
        super().__init__(draft, sequences, sampled)
        head, new = draft.engine.model, len(self.data.host["states"])
        # One more, the first, stays empty.
        self._waiting = torch.zeros((1 + new, head.width), dtype=head.dtype, device=self.device)

    def _fill(self, rows: Sequence[Row], width: int) -> None:
        super()._fill(rows, width)
        places, node = self.data.host["states"], 0
        places[:] = NOWHERE
        for row in rows:
            waiting = 0 if row.waiting is None else len(row.waiting)
            if row.waiting is not None and waiting:
                self._waiting[1 + node : 1 + node + waiting].copy_(row.waiting)
            places[node : node + waiting] = NOWHERE - 1 - np.arange(node, node + waiting)
            places[node + waiting : node + waiting + len(row.left)] = row.left
            node += len(row.new)

    def _states_of_text(self, width: int) -> Tensor:
        places = self.data.device["states"][:width]
        gathered = projected(self.draft.engine.model, self.draft.left.index_select(0, places.clamp(min=0)))
        waiting = self._waiting.index_select(0, (NOWHERE - places).clamp(min=0))
        return torch.where(places[:, None] >= 0, gathered, waiting)


class StatesProgram(HeadProgram):
    """Level by level; behind the text a node is given what the head left at its parent."""

    def __init__(self, draft: HeadDrafts, sequences: int, sampled: bool) -> None:
        super().__init__(draft, sequences, sampled)
        head, expansions = draft.engine.model, len(self.growth.report)
        self._left = torch.zeros((sequences, expansions, head.width), dtype=head.dtype, device=self.device)

    def _keep(self, first: int, states: Tensor | None) -> None:
        assert states is not None
        count = len(states) // self.sequences
        self._left[:, first : first + count] = states.view(self.sequences, count, -1)

    def _states_above(self, level: int) -> Tensor:
        here = slice(level * self.growth.width, (level + 1) * self.growth.width)
        above = self.growth.parents.gather(1, self.growth.expanded[:, here].clamp(min=0))
        return self._left.gather(1, above[..., None].expand(-1, -1, self._left.shape[2])).flatten(0, 1)

    def _proposals(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Its rows hold the tokens behind those whose places they have."""
        return super()._proposals(logits, positions + self.draft.shift)


class BlockProgram(HeadProgram):
    """One pass, in which the nodes of a block follow each text; one kernel grows the tree."""

    draft: BlockDrafts

    def _lengths(self) -> Tensor:
        return (super()._lengths() - self.draft.masks).clamp(min=0)

    def _begin(self, logits: Tensor, states: Tensor | None) -> None:
        """A node of the block is about its own token, not about the next."""
        depths = torch.arange(self.draft.deepest, device=self.device)
        nodes = self.data.device["last"][:, None] - (self.draft.masks - 1) + depths  # an absent sequence has none
        positions = self.growth.length[:, None] + depths
        found = self._proposals(logits.index_select(0, nodes.clamp(min=0).flatten()), positions.flatten())
        tokens, chances = (part.view(self.sequences, len(depths), -1) for part in found)
        growth.grow_by_depth(self.growth, tokens, chances, self.draft.vocabulary.readable)
        self._report.copy_(self.growth.report, non_blocking=True)

    def _known_after(self, part: int) -> int:
        return len(self._told)


class HeadDrafts(DeviceDrafts):
    """A head for the sequences of an engine."""

    reads_states = True

    def __init__(self, engine: Any, vocabulary: DraftVocabulary, k: int, levels: int, width: int, left: Tensor) -> None:
        """`left`: where the target leaves the states of its passes."""
        super().__init__(engine, vocabulary, k, levels, width)
        self.left = left


class StatesDrafts(HeadDrafts):
    shift = 1

    def open(self, context: Any, ends: frozenset[int]) -> DeviceDraft:
        return StatesDraft(self, context, ends)

    def program(self, sequences: int, sampled: bool) -> Program:
        return StatesProgram(self, sequences, sampled)


class BlockDrafts(HeadDrafts):
    """Its growth has levels of one node, which take no pass: as many as the target may check."""

    def __init__(
        self, engine: Any, vocabulary: DraftVocabulary, k: int, levels: int, expansions: int, left: Tensor
    ) -> None:
        super().__init__(engine, vocabulary, k, levels, 1, left)
        head = engine.model
        self.block, self.together = head.block_size, 0 if head.causal else head.block_size
        self.most, self.passes, self.deepest = expansions, 1, min(self.deepest, head.block_size - 1)

    @staticmethod
    def shape_for(config: GraphConfig, captured: bool) -> tuple[int, int, int]:
        return config.k, config.levels, max(1, config.nodes - 1)

    def open(self, context: Any, ends: frozenset[int]) -> DeviceDraft:
        return BlockDraft(self, context, ends)

    def program(self, sequences: int, sampled: bool) -> Program:
        return BlockProgram(self, sequences, sampled)

    def nodes_behind(self, levels: int) -> int:
        return self.masks


class HeadDraft(StatesReader, DeviceDraft):
    """One sequence's head."""

    group: HeadDrafts

    def __init__(self, drafts: HeadDrafts, context: Any, ends: frozenset[int]) -> None:
        super().__init__(drafts, context, ends)
        self.head, self.unread_states = drafts.engine.model, UnreadStates()

    def note(self, position: int, states: Tensor, path: list[int] | None = None) -> None:
        if self.group.gave_up:
            return
        place = None if path is None else place_in(self.group.left, states)
        if path is None or place is None:
            return super().note(position, states, path)
        known = max(0, len(self.context.text) - position)
        if self.has_states(position + known):
            self.unread_states.note_places(position + known, [place + node for node in path[known:]])

    def settle(self) -> None:
        """Where memory is short it loses them and rests: the target's step has been taken already."""
        if self.group.gave_up:
            self.unread_states = UnreadStates()
        try:
            self._take_in()
        except torch.OutOfMemoryError:
            self.unread_states = UnreadStates()

    @torch.no_grad()
    def _take_in(self) -> None:
        self.unread_states.take_in(self.group.left, partial(projected, self.head))

    def piece(self, text: list[int], count: int) -> Segment:
        self._take_in()
        return super().piece(text, count)

    def rehearse(self, root: int) -> None:
        super().rehearse(root)
        empty = torch.zeros((1, self.head.width), dtype=self.head.dtype, device=self.group.engine.device)
        self.unread_states.note(len(self.context.text), empty)

    def is_ready(self) -> bool:
        missing = self.missing()
        return bool(missing) and self.has_states(len(self.context.text) + self._rows_of_text(missing))

    def _rows_of_text(self, missing: list[int]) -> int:
        return len(missing)

    def row(self) -> Row:
        row = super().row()
        count = self._rows_of_text(row.new)
        waiting, left = self.unread_states.of(row.read, count), self.unread_states.places(row.read, count)
        return replace(row, text=count, waiting=waiting, left=left)

    def launched(self, program: Program, number: int, row: Row) -> None:
        super().launched(program, number, row)
        self.unread_states.forget_before(len(self.context.text))


class StatesDraft(HeadDraft):
    def missing(self) -> list[int]:
        """Nothing if the step is begun again: its last state is gone, and it rests until there are more."""
        return self.as_read(self._text[len(self.context.text) + self.shift :])


class BlockDraft(HeadDraft):
    def _rows_of_text(self, missing: list[int]) -> int:
        """The root begins the block, and becomes text when its state is there."""
        return len(missing) - 1

    def row(self) -> Row:
        row = super().row()
        masks = [self.head.mask_token_id] * self.group.masks
        return replace(row, new=[*row.new, *masks], levels=self.group.most, deepest=self.levels)


KINDS: dict[str, type[HeadDrafts]] = {"states": StatesDrafts, "block": BlockDrafts}


def kind_for(head: Any) -> type[HeadDrafts] | None:
    """How a head drafts on its device; None if what is new of a text and its block have no bit for each node."""
    masks = getattr(head, "block_size", 1) - 1
    return KINDS[head.kind] if NEW_TOKENS + masks <= WORD else None
