"""A draft model proposes: one forward pass per level, every node seeing the text and its own ancestors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftgraph.config import CostModel
from draftgraph.cost.budget import Budget, DraftBudget
from draftgraph.engine.protocol import PassResult, Sampling, Segment, Wanted, possible
from draftgraph.graph import NO_TOKEN, ROOT, Bools, Floats, Ints, Source, TokenGraph, TokenTree

NOWHERE = np.zeros(0, dtype=np.int64)
Ancestors = dict[int, Bools]  # graph node -> the scratch slots that it sees, its own last
Passes = Generator[Segment, PassResult, tuple[Ints, Floats]]  # asks for each pass of the draft


class Perturb(Protocol):
    """The noise that a draft adds to its logits."""

    def __call__(self, logits: Tensor, positions: Ints, tokens: Tensor | None = None, size: int = 0) -> Tensor:
        """Of nodes [nodes, tokens] whose next tokens have these positions: of all tokens, or of these of so many."""

    @property
    def sampling(self) -> Sampling:
        """What a device needs to add it by itself."""


class DraftVocabulary:
    """Which of the target's tokens the draft can read and write."""

    def __init__(self, draft: Any, target_size: int) -> None:
        self.readable = int(draft.get_input_embeddings().weight.shape[0])
        self.target_size = target_size
        written = getattr(draft, "token_map", None)  # row of the draft's head -> token, for a reduced vocabulary
        if written is None:
            written = getattr(draft.config, "draftgraph_token_map", None)
        self.written = None if written is None else torch.as_tensor(written, dtype=torch.long)
        self._columns: Tensor | None = None
        self._tokens = None if self.written is None else self.written.cpu().numpy()
        self.largest = target_size - 1 if self._tokens is None else int(self._tokens.max())  # token that it can write

    def columns(self, device: torch.device) -> Tensor:
        """The tokens that the columns of the draft's logits stand for."""
        if self._columns is None or self._columns.device != device:
            written = torch.arange(self.target_size) if self.written is None else self.written
            self._columns = written.to(device)
        return self._columns

    def wanted(self, k: int, perturb: Perturb | None, device: torch.device, shift: int = 0) -> Wanted | None:
        """What an engine is asked for by a draft with this `shift`; None where tokens that the target does not have
        must be left out."""
        if self.largest >= self.target_size:
            return None
        return Wanted(self.columns(device), k, None if perturb is None else perturb.sampling, shift)

    def to_draft(self, tokens: Ints) -> Ints:
        """Tokens without a row in the draft's embedding are read as its first one."""
        return np.where(tokens < self.readable, tokens, 0)

    def as_read(self, text: list[int]) -> list[int]:
        """The same for a list."""
        return [token if token < self.readable else 0 for token in text]

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; what the draft cannot write is impossible. # [nodes, target_size]"""
        if self.written is not None:
            full = logits.new_full((len(logits), max(self.target_size, self.largest + 1)), -torch.inf)
            logits = full.index_copy_(1, self.columns(logits.device), logits[:, : len(self.written)])
        elif logits.shape[1] < self.target_size:
            logits = torch.nn.functional.pad(logits, (0, self.target_size - logits.shape[1]), value=-torch.inf)
        return logits[:, : self.target_size]

    def best(
        self, logits: Tensor, k: int, perturb: Perturb | None = None, positions: Ints = NOWHERE
    ) -> tuple[Ints, Floats]:
        """The target's tokens that the draft likes best, with the noise of their positions: see `likeliest`."""
        if self._tokens is None or self.largest >= self.target_size:
            logits = self.to_target(logits).float()
            return likeliest(logits if perturb is None else perturb(logits, positions), k)
        logits = logits[:, : len(self._tokens)].float()
        if perturb is not None:
            logits = perturb(logits, positions, self.columns(logits.device), self.target_size)
        columns, probs = likeliest(logits, k)
        tokens: Ints = np.where(columns == NO_TOKEN, NO_TOKEN, self._tokens[columns])
        return tokens, probs


class DraftReader:
    """How a draft reads the text."""

    context: Any
    shift = 0  # tokens of the text that come before those that it reads

    def begin(self, text: list[int]) -> None:
        """A step starts at the last token of this text."""
        raise NotImplementedError

    def as_read(self, text: list[int]) -> list[int]:
        raise NotImplementedError

    def text_read(self, text: list[int]) -> list[int]:
        """All that it reads of a text, the root included."""
        return self.as_read(text[self.shift :])

    def depth_limit(self, text: list[int]) -> int | None:
        """How far behind a text one of its passes may reach: see `Context`."""
        limit: int | None = self.context.depth_limit(len(text) - 1)
        return limit

    def unread(self, text: list[int]) -> int:
        """Tokens before the last one that it has not read."""
        return len(text) - 1 - self.shift - len(self.context.text)

    def piece(self, text: list[int], count: int) -> Segment:
        """The next of them."""
        start = len(self.context.text) + self.shift
        return Segment.of_text(self.context, self.as_read(text[start : start + count]))

    def prefill(self, text: list[int], chunk: int | None) -> None:
        """Reads all of them."""
        self.context.prefill(self.as_read(text[len(self.context.text) : -1]), chunk, text[-1])


class ModelProposer(DraftReader):
    """A draft model proposes, level by level; it is fed exactly the tokens that it lacks."""

    source: Source = "draft"
    free = on_device = False
    group = None  # of drafts that are launched together
    block = 0  # nodes of a pass that drafts all levels; 0: each level has a pass of its own

    def __init__(self, context: Any, vocabulary: DraftVocabulary, k: int, perturb: Perturb | None = None) -> None:
        self.context, self.k, self.perturb = context, k, perturb
        self.passes = self.tokens_fed = 0
        self.keep_logits = False
        self.logits: dict[int, Tensor] = {}  # graph node -> what the draft said there, for rejection sampling
        self._vocabulary = vocabulary
        self._text: list[int] = []
        self._lacking = 0
        self._wanted: Wanted | None = None
        self._ancestors: Ancestors = {}

    def as_read(self, text: list[int]) -> list[int]:
        return self._vocabulary.as_read(text)

    def begin(self, text: list[int]) -> None:
        self._text = text
        self._lacking = len(text) - self.shift - len(self.context.text)
        self._wanted = self._vocabulary.wanted(self.k, self.perturb, self.context.engine.device, self.shift)
        self._ancestors.clear()
        self.logits.clear()

    def budget(self, graph: TokenGraph, cost: CostModel, hit: float) -> Budget:
        """How far it goes in one step of mode `auto`; `hit`: how often its best child has been right."""
        levels = min(graph.max_depth, self.block - 1) if self.block else graph.max_depth
        return DraftBudget(cost, levels, hit, graph.max_nodes, self.block)

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Passes:
        """The root, if it is among the frontier, is the first."""
        below = [node for node in frontier if node != ROOT]
        if ROOT in self._ancestors:
            return (yield from self._feed(graph, below))
        tokens, probs = yield from self._feed_root(graph)
        tokens, probs = tokens[: len(frontier) - len(below)], probs[: len(frontier) - len(below)]
        if not below:
            return tokens, probs
        others = yield from self._feed(graph, below)
        return np.concatenate([tokens, others[0]]), np.concatenate([probs, others[1]])

    def commit(self, tree: TokenTree, path: list[int], graph: TokenGraph) -> None:
        """Keeps what the draft was fed along the accepted path: up to the first leaf, merge or copy."""
        if not self._ancestors:
            return
        slots = list(range(self._lacking))
        tokens = self._text[len(self._text) - self._lacking :]
        before = ROOT
        for node in path:
            here = int(tree.nodes[node])
            if graph.parents[here] != before or here not in self._ancestors:
                break
            slots.append(len(self._ancestors[here]) - 1)
            tokens.append(int(graph.tokens[here]))
            before = here
        self.context.commit(slots, self._vocabulary.as_read(tokens))

    def _feed_root(self, graph: TokenGraph) -> Passes:
        missing = np.array(self._text[len(self._text) - self._lacking :])
        self._ancestors[ROOT] = np.ones(self._lacking, dtype=bool)
        result = yield self._pass(missing, np.arange(self._lacking), np.tri(self._lacking, dtype=bool))
        return self._children(graph, [ROOT], result, slice(-1, None))

    def _feed(self, graph: TokenGraph, frontier: list[int]) -> Passes:
        nodes = self._with_unfed_ancestors(graph, frontier)
        first_slot = self.context.scratch
        visible = np.zeros((len(nodes), first_slot + len(nodes)), dtype=bool)
        mark_visible(visible, first_slot, graph, nodes, self._ancestors)
        result = yield self._pass(graph.tokens[nodes], self._lacking - 1 + graph.depths[nodes], visible)
        places = slice(None) if nodes == frontier else [nodes.index(node) for node in frontier]
        return self._children(graph, frontier, result, places)

    def _children(
        self, graph: TokenGraph, nodes: list[int], result: PassResult, places: slice | list[int]
    ) -> tuple[Ints, Floats]:
        """What the draft says at these nodes, which have these places in its last pass."""
        if self.keep_logits:
            full = self._vocabulary.to_target(result.logits[places]).float()
            self.logits.update(zip(nodes, full.clone(), strict=True))
        if (proposed := result.proposed) is not None:
            return proposed[0][places, : self.k], proposed[1][places, : self.k]
        positions = len(self._text) + graph.depths[nodes]
        return self._vocabulary.best(result.logits[places], self.k, self.perturb, positions)

    def _with_unfed_ancestors(self, graph: TokenGraph, frontier: list[int]) -> list[int]:
        """A node may be likely through an alias of it while nothing on its own path was worth drafting."""
        nodes: dict[int, None] = {}
        for node in frontier:
            path = [node]
            while (above := int(graph.parents[path[-1]])) not in self._ancestors and above not in nodes:
                path.append(above)
            nodes.update(dict.fromkeys(reversed(path)))
        return list(nodes)

    def _pass(self, tokens: Ints, depths: Ints, visible: Bools) -> Segment:
        self.passes += 1
        self.tokens_fed += len(tokens)
        return Segment(self.context, self._vocabulary.to_draft(tokens), depths, visible, wanted=self._wanted)


def mark_visible(visible: Bools, first_slot: int, graph: TokenGraph, frontier: list[int], seen: Ancestors) -> None:
    """Fills `visible` [frontier, slots] for nodes that take the slots from `first_slot` on, and notes it in `seen`."""
    for row, node in enumerate(frontier):
        above = seen[int(graph.parents[node])]
        visible[row, : len(above)] = above
        visible[row, first_slot + row] = True
        seen[node] = visible[row, : first_slot + row + 1]


def likeliest(logits: Tensor, k: int) -> tuple[Ints, Floats]:
    """The k most probable tokens and their probabilities, each [nodes, k], best first, padded with NO_TOKEN."""
    best = torch.topk(torch.softmax(logits, dim=-1), min(k, logits.shape[-1]))
    tokens, probs = best.indices.cpu().numpy(), best.values.double().cpu().numpy()
    return possible(tokens, probs)
