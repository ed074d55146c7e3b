"""What decoding needs of a model: an engine, which runs passes, a context in it for every sequence, what a pass is
given (segments) and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftgraph.engine.adapters import Adapters
from draftgraph.graph import NO_TOKEN, Bools, Floats, Ints, TokenTree
from draftgraph.graph.unroll import FIRST, ITSELF
from draftgraph.kernels.best import best_logits, best_tokens
from draftgraph.kernels.noise import perturbed

KEPT = 16  # tokens of a node in a ranking; noise may put any of them first


@dataclass(frozen=True)
class Ranking:
    """The model's best tokens at each node of a pass, best first."""

    tokens: Ints  # [nodes, kept]
    logits: Floats

    @classmethod
    def of(cls, logits: Tensor, kept: int = KEPT) -> Ranking:
        tokens, values = best_logits(logits, kept)
        return cls(tokens.cpu().numpy(), values.double().cpu().numpy())

    @classmethod
    def read(cls, found: Floats) -> Ranking:
        return cls(found[:, 0].astype(np.int64), found[:, 1].copy())

    def best(self, node: int) -> int:
        """The argmax of a node: of equals the first."""
        return int(self.tokens[node, 0])

    def finite(self, nodes: list[int]) -> bool:
        """Whether these nodes have a best token at all."""
        return all(isfinite(self.logits[node, 0]) for node in nodes)


def ranked(logits: Tensor, kept: int = KEPT) -> Tensor:
    """What a ranking holds, on the device. # [nodes, 2, kept] float64"""
    tokens, values = best_logits(logits, kept)
    return torch.stack([tokens.double(), values.double()], dim=1)


# In the order of `generate`: each sees what the one before it has left.
FIELDS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True)
class Warping:
    """What `sample` can do to scores."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Warping | None:
        """What these processors do; None if that is anything else, or in another order."""
        kinds = [type(processor) for processor in processors]
        if kinds != [kind for kind in FIELDS if kind in kinds] or any(map(unusual, processors)):
            return None
        return cls(**{FIELDS[type(processor)]: getattr(processor, FIELDS[type(processor)]) for processor in processors})


def unusual(processor: Any) -> bool:
    filter_value = getattr(processor, "filter_value", -torch.inf)
    return bool(filter_value != -torch.inf or getattr(processor, "min_tokens_to_keep", 1) != 1)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are sampled."""

    key: int  # of its noise: see `KeyedNoise.stream_key`
    warping: Warping


@dataclass(frozen=True)
class Wanted:
    """What a draft is asked for at every node of a pass: its best few tokens."""

    tokens: Tensor  # that its columns stand for
    k: int
    sampling: Sampling | None  # whose noise it adds; None: none
    shift: int = 0  # tokens of the text before those that it reads: its positions are less by as many


def proposals(
    logits: Tensor, tokens: Tensor, k: int, positions: Tensor, noise: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The k best of the tokens that columns stand for and their log-probabilities, best first; with noise of these keys
    and temperatures at these positions, if any. # [rows, k] each"""
    logits, tokens = logits[:, : len(tokens)], tokens[: logits.shape[1]]
    if noise is not None:
        logits = perturbed(logits, noise[0], positions, tokens, noise[1])
    best, chances = best_tokens(logits, k)
    return tokens[best], chances


def possible(tokens: Ints, probs: Floats) -> tuple[Ints, Floats]:
    """The same, with NO_TOKEN and 0 where a probability is none, or no number."""
    likely = probs > 0
    return np.where(likely, tokens, NO_TOKEN), np.where(likely, probs, 0.0)


class PassResult:
    """What a model says at the nodes of one sequence. What comes from the device is waited for when it is read."""

    def __init__(
        self,
        logits: Tensor,  # [nodes, vocabulary]; of a captured pass good until the next one
        rows: slice = slice(None),  # those of the sequence
        ranking: Callable[[], Ranking] | None = None,
        sampled: Callable[[], list[int]] | None = None,
        proposed: Callable[[], tuple[Ints, Floats]] | None = None,
        states: Tensor | None = None,  # of all nodes, scored or not, where they are read; as long good as the logits
        row: Callable[[], int | None] | None = None,
    ) -> None:
        self._logits, self._rows, self.states = logits, rows, states
        self._row = row
        self._ranking, self._sampled, self._proposed = ranking, sampled, proposed

    @cached_property
    def logits(self) -> Tensor:
        return self._logits[self._rows]

    @cached_property
    def ranking(self) -> Ranking:
        """The best tokens of every node; a captured pass brings them along."""
        return Ranking.of(self.logits) if self._ranking is None else self._ranking()

    @cached_property
    def sampled(self) -> list[int] | None:
        """The sampled token of every node; None: tokens are chosen along the accepted walk alone."""
        return None if self._sampled is None else self._sampled()

    @cached_property
    def proposed(self) -> tuple[Ints, Floats] | None:
        """Tokens and probabilities [nodes, k] as they were wanted; None: they are to be read from the logits."""
        return None if self._proposed is None else self._proposed()

    @property
    def row(self) -> int | None:
        """Where the next pass finds the token that the device has chosen at the first node: see `Segment.follows`;
        None: nowhere, or no longer."""
        return None if self._row is None else self._row()

    @property
    def is_sampled(self) -> bool:
        """Whether the device samples at the nodes."""
        return self._sampled is not None

    @property
    def chosen(self) -> int:
        """The token that the device has chosen at the first node."""
        return self.best(0) if self.sampled is None else self.sampled[0]

    def best(self, node: int) -> int:
        """The argmax of a node."""
        return self.ranking.best(node)


PREFILL_CHUNK = 2048  # tokens that are read in one pass, if nothing else is asked for


class Context(Protocol):
    """The keys and values of one sequence: committed text, and scratch nodes behind it."""

    text: list[int]  # the committed tokens
    scratch: int  # nodes computed since the last commit
    expected: int  # tokens that the text is going to have
    reuses: bool  # what the engine has of a text; if not, `begin_with` reads all of it
    on_states: Callable[[Tensor], None] | None  # is given the states of what `prefill` commits

    def begin(self, length: int, reuse: bool) -> None:
        """Before a prompt of this length: keeps the text so far only if asked, and if it would be computed the same
        way again."""

    def begin_with(self, tokens: list[int], following: int) -> int:
        """Begins with what the engine has of a text, which `following` comes behind; how many tokens were reused."""

    def reserve(self, capacity: int) -> None:
        """Room for so many tokens, scratch included."""

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        """Commits tokens without looking at their logits; `following` comes behind them and is computed later."""

    def commit(self, slots: list[int], tokens: list[int]) -> None:
        """Keeps the scratch slots of an accepted path as text; everything else of the scratch is forgotten."""

    def forget(self, scratch: int) -> None:
        """Keeps the first scratch nodes alone; the next pass writes over the others."""

    def rewind(self, length: int) -> None:
        """Forgets the text from here on, and the scratch."""

    def publish(self) -> None:
        """Other sequences of the tenant may begin with what this one has so far."""

    def close(self) -> None: ...

    def depth_limit(self, root: int) -> int | None:
        """How far behind a root at this position one pass may reach; None: as far as wished."""


class Engine(Protocol):
    """A model, its passes, and the contexts of its sequences."""

    model: Any
    adapters: Adapters
    branching: bool  # False: the nodes of a sequence must form one chain
    asynchronous: bool  # a pass is only launched: the host has time until its result is read
    captured: bool  # passes have fixed shapes, so drafts can grow on the device
    most: int | None  # sequences at a time; None: as many as there is room for
    widths: tuple[int, ...]  # nodes that passes are padded to; none: no padding
    ranks: int  # processes that compute every pass together

    @property
    def launched(self) -> int:
        """Passes so far."""

    @property
    def goes_ahead(self) -> bool:
        """Whether a pass may set off before the one before it was read: see `Segment.follows`."""

    @property
    def left(self) -> Tensor | None:
        """The states of all nodes of the last pass that are read; None: they lie in no fixed place."""

    @property
    def device(self) -> torch.device: ...

    @property
    def compiled(self) -> bool:
        """Whether passes are compiled functions, which threads of our own run on a CPU."""

    @property
    def slots(self) -> int:
        """Tokens that there is room for; 0: no bound is known."""

    @property
    def used(self) -> int: ...

    def open(self, tenant: str = "", adapter: int = 0) -> Any:
        """A context for one more sequence, computed with the adapter of this number."""

    def adapt(self, adapters: Adapters) -> None:
        """Contexts may have these: called before the first is opened."""

    def read_states(self, reads: tuple[int, ...]) -> None:
        """Results of passes have these hidden states from now on: see `Taps`."""

    def run(self, segments: Sequence[Segment]) -> list[PassResult]:
        """One pass over the nodes of all segments, which are scratch after it."""

    def wait(self) -> None:
        """Until the last pass is done."""

    def fits_one_pass(self, segments: Sequence[Segment]) -> bool: ...

    def fitting(self, nodes: int, wanted: int) -> int:
        """How many more nodes than these go into a pass, if so many are wanted: as many as its shape has room for."""

    def mark(self) -> Callable[[], None]:
        """What waits until the pass that was launched last is done, whatever is launched meanwhile."""

    def has_room(self, tokens: int, without: Sequence[Any] = ()) -> bool:
        """For so many more tokens, once these contexts are closed."""

    def reserve(self, slots: int) -> None:
        """Room for so many tokens of all sequences together, if the pool grows: at once is better than bit by bit."""

    def prepare(self, sequences: int, reading_only: bool = False) -> None:
        """Records what passes over so many sequences need: else the first of them wait for it."""


@dataclass(eq=False)
class Segment:
    """Nodes of one sequence in a pass: they see all of its text, and of its scratch nodes what `visible` says."""

    context: Any
    tokens: Ints
    depths: Ints  # behind the text
    visible: Bools  # [nodes, scratch slots after this pass]
    scored: bool = True  # False: nobody asks for logits
    chain: bool = False  # each sees all before it, and there is no other scratch
    sampling: Sampling | None = None  # how tokens are chosen at the nodes, where the device can do that
    wanted: Wanted | None = None  # what a draft proposes at the nodes, where the device can find it
    states: Tensor | None = None  # [nodes, width]: what a head reads beside the tokens; None: zeros
    ahead: int = 0  # tokens between the text and a chain, which passes before this one compute: they become text first
    follows: int | None = None  # its one token is the one chosen in this row of the pass before; None: `tokens`

    @classmethod
    def of_text(
        cls, context: Any, tokens: list[int], scored: bool = False, states: Tensor | None = None, ahead: int = 0
    ) -> Segment:
        """The text goes on with these: commit them after the pass."""
        count, seen = len(tokens), np.tri(len(tokens), dtype=bool)
        return cls(context, np.array(tokens), np.arange(count), seen, scored, chain=True, states=states, ahead=ahead)

    @classmethod
    def of_root(cls, context: Any, token: int, sampling: Sampling | None, ahead: int, follows: int | None) -> Segment:
        """One token behind the text, and behind what passes before this one compute."""
        return cls(context, np.array([token]), FIRST, ITSELF, True, True, sampling, None, None, ahead, follows)

    @classmethod
    def of_tree(cls, context: Any, tree: TokenTree, sampling: Sampling | None = None) -> Segment:
        return cls(context, tree.tokens, tree.depths, tree.mask, sampling=sampling)

    def __len__(self) -> int:
        return len(self.tokens)

    def commit(self) -> None:
        """The nodes are text now."""
        self.context.commit(list(range(len(self.tokens))), self.tokens.tolist())


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two texts share from the start."""
    pairs = zip(first, second, strict=False)
    return next((length for length, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
