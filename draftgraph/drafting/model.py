"""A draft model proposes: one forward pass per level, every node seeing the text and its own ancestors."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.runner import Engine, common_prefix
from draftgraph.graph import NO_TOKEN, ROOT, Bools, Floats, Ints, Source, TokenGraph, TokenTree

Perturb = Callable[..., Tensor]  # logits [nodes, tokens], positions of the next tokens; which tokens, of how many
Ancestors = dict[int, Bools]  # graph node -> the scratch slots that it sees, its own last
Told = Tensor  # logits [nodes, tokens]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """A pass that a draft needs before it can go on: see `Engine.forward`."""

    engine: Engine
    tokens: Ints
    depths: Ints
    visible: Bools


def answered(asking: Generator[Asked, Told, Result]) -> Result:
    """Makes every pass as soon as it is asked for."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(asked.engine.forward(asked.tokens, asked.depths, asked.visible))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


class DraftVocabulary:
    """Which of the target's tokens the draft can read and write."""

    def __init__(self, draft: Any, target_size: int) -> None:
        self.readable = int(draft.get_input_embeddings().weight.shape[0])
        self.target_size = target_size
        written = getattr(draft, "token_map", None)  # row of the draft's head -> token, for a reduced vocabulary
        if written is None:
            written = getattr(draft.config, "draftgraph_token_map", None)
        self.written = None if written is None else torch.as_tensor(written, dtype=torch.long)

    def to_draft(self, tokens: Ints) -> Ints:
        """Tokens without a row in the draft's embedding are read as its first one."""
        return np.where(tokens < self.readable, tokens, 0)

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; what the draft cannot write is impossible. # [nodes, target_size]"""
        if self.written is not None:
            self.written = self.written.to(logits.device)
            full = logits.new_full((len(logits), max(self.target_size, int(self.written.max()) + 1)), -torch.inf)
            logits = full.index_copy_(1, self.written, logits[:, : len(self.written)])
        elif logits.shape[1] < self.target_size:
            logits = torch.nn.functional.pad(logits, (0, self.target_size - logits.shape[1]), value=-torch.inf)
        return logits[:, : self.target_size]

    def best(
        self, logits: Tensor, k: int, perturb: Perturb | None = None, positions: Ints | None = None
    ) -> tuple[Ints, Floats]:
        """The target's tokens that the draft likes best, with the noise of their positions: see `likeliest`."""
        if self.written is None or int(self.written.max()) >= self.target_size:
            logits = self.to_target(logits).float()
            return likeliest(logits if perturb is None else perturb(logits, positions), k)
        self.written = self.written.to(logits.device)
        logits = logits[:, : len(self.written)].float()
        if perturb is not None:
            logits = perturb(logits, positions, self.written, self.target_size)
        columns, probs = likeliest(logits, k)
        tokens: Ints = np.where(columns == NO_TOKEN, NO_TOKEN, self.written.cpu().numpy()[columns])
        return tokens, probs


class ModelProposer:
    """Grows a graph with a draft model, which is fed exactly the tokens that it lacks."""

    source: Source = "draft"
    free = False

    def __init__(self, engine: Engine, vocabulary: DraftVocabulary, k: int, perturb: Perturb | None = None) -> None:
        self.engine = engine
        self.k = k
        self.passes = 0
        self.tokens_fed = 0
        self.keep_logits = False
        self.logits: dict[int, Tensor] = {}  # graph node -> what the draft said there, for rejection sampling
        self._vocabulary = vocabulary
        self.perturb = perturb
        self._text: list[int] = []
        self._lacking = 0
        self._ancestors: Ancestors = {}

    def catch_up(self, text: list[int], chunk: int | None = None) -> None:
        """Reads the text but for its last token, keeping what was read before of the same text."""
        known = self.as_read(text[:-1])
        self.engine.rewind(common_prefix(self.engine.text, known))
        self.engine.prefill(known[len(self.engine.text) :], chunk)

    def as_read(self, text: list[int]) -> list[int]:
        """The tokens that the draft reads for these."""
        read: list[int] = self._vocabulary.to_draft(np.array(text, dtype=np.int64)).tolist()
        return read

    def begin(self, text: list[int]) -> None:
        self._text = text
        self._lacking = len(text) - len(self.engine.text)
        self._ancestors.clear()
        self.logits.clear()

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        return answered(self.proposing(graph, frontier))

    def proposing(self, graph: TokenGraph, frontier: list[int]) -> Generator[Asked, Told, tuple[Ints, Floats]]:
        logits = yield from self._fed(graph, frontier)
        if self.keep_logits:
            full = self._vocabulary.to_target(logits).float()
            self.logits.update(zip(frontier, full.clone(), strict=True))
        positions = len(self._text) + np.array([graph.depths[node] for node in frontier])
        return self._vocabulary.best(logits, self.k, self.perturb, positions)

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
            tokens.append(graph.tokens[here])
            before = here
        self.engine.commit(slots, self._vocabulary.to_draft(np.array(tokens)).tolist())

    def _fed(self, graph: TokenGraph, frontier: list[int]) -> Generator[Asked, Told, Tensor]:
        """What the draft says at these nodes; the root, if it is among them, is the first."""
        if ROOT in self._ancestors:
            return (yield from self._feed(graph, frontier))
        at_root = yield from self._feed_root()
        below = [node for node in frontier if node != ROOT]
        at_root = at_root[: len(frontier) - len(below)]
        if not below:
            return at_root
        at_root = at_root.clone()
        return torch.cat([at_root, (yield from self._feed(graph, below))])

    def _feed_root(self) -> Generator[Asked, Told, Tensor]:
        missing = np.array(self._text[len(self._text) - self._lacking :])
        self._ancestors[ROOT] = np.ones(self._lacking, dtype=bool)
        causal = np.tri(self._lacking, dtype=bool)
        return (yield self._pass(missing, np.arange(self._lacking), causal))[-1:]

    def _feed(self, graph: TokenGraph, frontier: list[int]) -> Generator[Asked, Told, Tensor]:
        nodes = self._with_unfed_ancestors(graph, frontier)
        first_slot = self.engine.scratch
        visible = np.zeros((len(nodes), first_slot + len(nodes)), dtype=bool)
        mark_visible(visible, first_slot, graph, nodes, self._ancestors)
        tokens = np.array([graph.tokens[node] for node in nodes])
        depths = self._lacking - 1 + np.array([graph.depths[node] for node in nodes])
        logits = yield self._pass(tokens, depths, visible)
        return logits if nodes == frontier else logits[[nodes.index(node) for node in frontier]]

    def _with_unfed_ancestors(self, graph: TokenGraph, frontier: list[int]) -> list[int]:
        """A node may be likely through an alias of it while nothing on its own path was worth drafting."""
        nodes: dict[int, None] = {}
        for node in frontier:
            path = [node]
            while (above := graph.parents[path[-1]]) not in self._ancestors and above not in nodes:
                path.append(above)
            nodes.update(dict.fromkeys(reversed(path)))
        return list(nodes)

    def _pass(self, tokens: Ints, depths: Ints, visible: Bools) -> Asked:
        self.passes += 1
        self.tokens_fed += len(tokens)
        return Asked(self.engine, self._vocabulary.to_draft(tokens), depths, visible)


def mark_visible(visible: Bools, first_slot: int, graph: TokenGraph, frontier: list[int], seen: Ancestors) -> None:
    """Fills `visible` [frontier, slots] for nodes that take the slots from `first_slot` on, and notes it in `seen`."""
    for row, node in enumerate(frontier):
        above = seen[graph.parents[node]]
        visible[row, : len(above)] = above
        visible[row, first_slot + row] = True
        seen[node] = visible[row, : first_slot + row + 1]


def likeliest(logits: Tensor, k: int) -> tuple[Ints, Floats]:
    """The k most probable tokens and their probabilities, each [nodes, k], best first, padded with NO_TOKEN."""
    best = torch.topk(torch.softmax(logits, dim=-1), min(k, logits.shape[-1]))
    tokens, probs = best.indices.cpu().numpy(), best.values.double().cpu().numpy()
    probs = np.nan_to_num(probs)
    return np.where(probs > 0, tokens, NO_TOKEN), probs
