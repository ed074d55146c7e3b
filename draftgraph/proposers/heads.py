"""Trained heads propose: drafts that read the target's hidden states beside the text.

A head's row j holds the state of the text's token j, as the target computed it, and for kind `states` the token behind
it. Only such rows stay in a head's cache: what it was fed while drafting was made from states of its own. Here the host
asks for each level; `device_heads` has heads that grow on their device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.protocol import PREFILL_CHUNK, PassResult, Segment
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, TokenGraph, TokenTree
from draftgraph.proposers.draft_model import DraftReader, DraftVocabulary, ModelProposer, Passes, mark_visible


def reads_of(model: Any) -> tuple[int, ...]:
    """The hidden states of its target that a draft reads; none if it reads text alone."""
    return tuple(getattr(model, "reads", ()))


class UnreadStates:
    """States of a text, from one position on without a gap, as a head takes them in. The last of them may still lie
    where the target's last pass has left them."""

    def __init__(self) -> None:
        self.start, self._rows = 0, torch.zeros((0, 0))
        self._left: list[int] = []  # places there

    @property
    def end(self) -> int:
        return self.start + len(self._rows) + len(self._left)

    def note(self, position: int, rows: Tensor) -> None:
        """The states of tokens from this position on; what was noted behind it is not true any more."""
        self._forget_from(position)
        # A copy, as rows may lie where the target's next pass writes.
        self._rows = torch.cat([self._rows, rows]) if len(self._rows) else rows.clone()

    def note_places(self, position: int, places: list[int]) -> None:
        """The same of states that the target has left."""
        self._forget_from(position)
        self._left = places

    def _forget_from(self, position: int) -> None:
        self._left = []
        if not self.start <= position <= self.end:
            self.start = position
        self._rows = self._rows[: position - self.start]

    def of(self, first: int, count: int) -> Tensor:
        """Of those that wait here."""
        return self._rows[first - self.start : first - self.start + count]

    def places(self, first: int, count: int) -> list[int]:
        """Where those behind them are."""
        begin = self.end - len(self._left)
        return self._left[max(0, first - begin) : max(0, first + count - begin)]

    def take_in(self, left: Tensor, project: Callable[[Tensor], Tensor]) -> None:
        """All wait here from now on."""
        if self._left:
            self.note(self.end - len(self._left), project(left[self._left]))

    def forget_before(self, position: int) -> None:
        if self.start < position <= self.end:
            waiting = len(self._rows)
            self._left = self._left[max(0, position - self.start - waiting) :]
            # A copy: a part of them would keep the memory of all.
            self.start, self._rows = position, self._rows[position - self.start :].clone()


def projected(head: Any, states: Tensor) -> Tensor:
    """The target's states as rows that a head reads."""
    rows: Tensor = head.project(states.to(head.dtype))
    return rows


class StatesReader(DraftReader):
    """What heads of all kinds do with the states of the text."""

    head: Any
    unread_states: UnreadStates

    @torch.no_grad()
    def note(self, position: int, states: Tensor, path: list[int] | None = None) -> None:
        """The target computed these states of the text's tokens from this position on; or those of a path. Where some
        before them are missing, it cannot read them."""
        known = max(0, len(self.context.text) - position)
        if known < len(states if path is None else path) and self.has_states(position + known):
            states = states[known:] if path is None else states[path[known:]]
            self.unread_states.note(position + known, projected(self.head, states))

    def begin(self, text: list[int]) -> None:
        super().begin(text)
        self.unread_states.forget_before(len(self.context.text))

    def has_states(self, end: int) -> bool:
        """Of all that it has not read of a text before this position."""
        states, known = self.unread_states, len(self.context.text)
        return end <= known or (states.start <= known and end <= states.end)

    def unread(self, text: list[int]) -> int:
        """Of those whose states are there."""
        states, known = self.unread_states, len(self.context.text)
        return max(0, min(super().unread(text), states.end - known)) if states.start <= known else 0

    def piece(self, text: list[int], count: int) -> Segment:
        segment = super().piece(text, count)
        segment.states = self.unread_states.of(len(self.context.text), len(segment.tokens))
        return segment

    def prefill(self, text: list[int], chunk: int | None) -> None:
        while unread := self.unread(text):
            segment = self.piece(text, min(chunk or PREFILL_CHUNK, unread))
            self.context.engine.run([segment])
            segment.commit()


class HeadProposer(StatesReader, ModelProposer):
    """A head that is asked level by level."""

    def __init__(self, context: Any, vocabulary: DraftVocabulary, k: int) -> None:
        super().__init__(context, vocabulary, k)
        self.head, self.unread_states = context.engine.model, UnreadStates()

    def commit(self, tree: TokenTree, path: list[int], graph: TokenGraph) -> None:
        """Keeps the rows of the text alone."""
        if self._ancestors:
            count = self._text_rows
            tokens = self._text[len(self.context.text) + self.shift :][:count]
            self.context.commit(list(range(count)), self._vocabulary.as_read(tokens))

    @property
    def _text_rows(self) -> int:
        """Of the first pass of a step."""
        raise NotImplementedError

    @property
    def _is_ready(self) -> bool:
        """Whether it has the states of all the text that it lacks."""
        return self.has_states(len(self.context.text) + self._text_rows)

    def _nothing(self, frontier: list[int]) -> tuple[Ints, Floats]:
        shape = len(frontier), self.k
        return np.full(shape, NO_TOKEN), np.zeros(shape)


class StatesProposer(HeadProposer):
    """EAGLE-3, MTP: level by level; behind the text a node is given what the head left at its parent."""

    shift = 1  # its rows hold the tokens behind those whose states they hold

    def begin(self, text: list[int]) -> None:
        super().begin(text)
        self._states: dict[int, Tensor] = {}  # graph node -> what the head left there

    @property
    def _text_rows(self) -> int:
        return self._lacking

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Passes:
        if not self._is_ready or not self._lacking:
            return self._nothing(frontier)
        return (yield from super().propose(graph, frontier))

    def _feed_root(self, graph: TokenGraph) -> Passes:
        missing = np.array(self._text[len(self._text) - self._lacking :])
        self._ancestors[ROOT] = np.ones(self._lacking, dtype=bool)
        segment = self._pass(missing, np.arange(self._lacking), np.tri(self._lacking, dtype=bool))
        segment.states = self.unread_states.of(len(self.context.text), self._lacking)
        result = yield segment
        self._keep([ROOT], result, [-1])
        return self._children(graph, [ROOT], result, slice(-1, None))

    def _feed(self, graph: TokenGraph, frontier: list[int]) -> Passes:
        """A pass for each generation: a node is fed what the head left at its parent, which may be in this frontier
        too, or an ancestor that was not fed before."""
        nodes = self._with_unfed_ancestors(graph, frontier)
        said: dict[int, tuple[Ints, Floats]] = {}
        while nodes:
            ready = [node for node in nodes if int(graph.parents[node]) in self._ancestors]
            tokens, probs = yield from self._feed_level(graph, ready)
            said.update(zip(ready, zip(tokens, probs, strict=True), strict=True))
            nodes = [node for node in nodes if node not in said]
        return np.stack([said[node][0] for node in frontier]), np.stack([said[node][1] for node in frontier])

    def _feed_level(self, graph: TokenGraph, nodes: list[int]) -> Passes:
        first_slot = self.context.scratch
        visible = np.zeros((len(nodes), first_slot + len(nodes)), dtype=bool)
        mark_visible(visible, first_slot, graph, nodes, self._ancestors)
        segment = self._pass(graph.tokens[nodes], self._lacking - 1 + graph.depths[nodes], visible)
        segment.states = torch.stack([self._states[int(graph.parents[node])] for node in nodes])
        result = yield segment
        self._keep(nodes, result, list(range(len(nodes))))
        return self._children(graph, nodes, result, slice(None))

    def _keep(self, nodes: list[int], result: PassResult, places: list[int]) -> None:
        assert result.states is not None
        self._states.update(zip(nodes, result.states[places].clone(), strict=True))


class BlockProposer(HeadProposer):
    """DFlash, JetSpec: one pass gives a distribution for every depth, which all nodes of that depth share."""

    @property
    def block(self) -> int:  # type: ignore[override]
        return int(self.head.block_size)

    def begin(self, text: list[int]) -> None:
        super().begin(text)
        self._drafted: tuple[Ints, Floats] | None = None  # of every depth. # [block - 1, k]
        self._depths: Tensor | None = None  # the same as logits, if they are kept

    @property
    def _text_rows(self) -> int:
        return self._lacking - 1

    @property
    def free(self) -> bool:  # type: ignore[override]
        """Once the block has been drafted."""
        return self._drafted is not None or not self._is_ready

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Any:
        if self._drafted is not None:
            return self._at(graph, frontier)
        return self._draft_block(graph, frontier) if self._is_ready else self._nothing(frontier)

    def _draft_block(self, graph: TokenGraph, frontier: list[int]) -> Passes:
        known, size, text = self._text_rows, self.head.block_size, self._text
        tokens = np.array([*text[len(text) - 1 - known :], *[self.head.mask_token_id] * (size - 1)])
        visible = np.tri(known + size, dtype=bool)
        if not self.head.causal:
            visible[known:] = True
        segment = self._pass(tokens, np.arange(known + size), visible)
        segment.wanted = None  # a place of the block is about its own token, not about the next
        rows = torch.zeros((known + size, self.head.width), dtype=self.head.dtype, device=self.context.engine.device)
        if known:
            rows[:known] = self.unread_states.of(len(self.context.text), known)
        segment.states = rows
        self._ancestors[ROOT] = np.ones(known + 1, dtype=bool)
        logits = (yield segment).logits[known + 1 :]
        if self.keep_logits:
            self._depths = self._vocabulary.to_target(logits).float().clone()
        positions = len(text) + np.arange(size - 1)
        self._drafted = self._vocabulary.best(logits, self.k, self.perturb, positions)
        return self._at(graph, frontier)

    def _at(self, graph: TokenGraph, nodes: list[int]) -> tuple[Ints, Floats]:
        """What the block says behind these nodes; nothing behind its end."""
        assert self._drafted is not None
        tokens, chances = self._nothing(nodes)
        inside = [place for place, node in enumerate(nodes) if graph.depths[node] < len(self._drafted[0])]
        depths = graph.depths[[nodes[place] for place in inside]]
        width = self._drafted[0].shape[1]
        tokens[inside, :width], chances[inside, :width] = self._drafted[0][depths], self._drafted[1][depths]
        if self._depths is not None:
            self.logits.update({nodes[place]: self._depths[depth] for place, depth in zip(inside, depths, strict=True)})
        return tokens, chances


PROPOSERS = {"states": StatesProposer, "block": BlockProposer}


def head_proposer(context: Any, vocabulary: DraftVocabulary, k: int) -> HeadProposer:
    return PROPOSERS[context.engine.model.kind](context, vocabulary, k)
