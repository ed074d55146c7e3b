"""Runs a `transformers` model over tokens that need not be a sequence: nodes that see the text and their ancestors."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.attention import graph_masks
from draftgraph.engine.borrowing import NarrowLinears, adapters, unwrapped
from draftgraph.engine.cache import SlotCache
from draftgraph.engine.proposals import Wanted
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.sampler import Sampling
from draftgraph.graph import Bools, Floats, Ints, TokenTree
from draftgraph.ranking import Ranking

PREFILL_CHUNK = 2048


class Engine(Protocol):
    """What the decoder needs of a model: committed text, scratch nodes scored over it, and a commit."""

    branching: bool  # False: nodes must form one chain
    ranks: bool  # the best tokens of a pass come with it, at no further cost
    works_alone: bool  # a pass is only set off: the host has time until its result is read
    text: list[int]  # the committed tokens
    scratch: int  # nodes scored since the last commit

    @property
    def device(self) -> torch.device: ...

    def begin(self, length: int, reuse: bool) -> None: ...

    def reserve(self, capacity: int) -> None: ...

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None: ...

    def forward(self, tokens: Ints, depths: Ints, visible: Bools, wanted: Wanted | None = None) -> Tensor: ...

    def check(self, tree: TokenTree) -> Tensor: ...

    def rank(self, logits: Tensor) -> Ranking: ...

    def sample(self, logits: Tensor, sampling: Sampling) -> list[int] | None: ...

    def proposed(self, logits: Tensor) -> tuple[Ints, Floats] | None: ...

    def commit(self, slots: list[int], tokens: list[int]) -> None: ...

    def forget(self, scratch: int) -> None: ...

    def rewind(self, length: int) -> None: ...

    def depth_limit(self, root: int) -> int | None: ...


class EagerEngine:
    """Plain forward passes of the user's own module, on its device and in its dtype."""

    ranks = works_alone = False

    def __init__(self, model: Any, branching: bool = True, offsets: bool = True) -> None:
        self.model = model
        self.branching = branching
        self._offsets = offsets  # whether the model can be told the text's length per token
        self.text: list[int] = []
        self.scratch = 0
        self._scratch_depths: list[int] = []
        self._cache = SlotCache()
        self._config = model.config.get_text_config(decoder=True)
        self._switch = RopeSwitch.of(model)
        self._adapters = adapters(model)
        self._linears = NarrowLinears(model, ("cpu",))
        parameters = inspect.signature(unwrapped(model).forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def begin(self, length: int, reuse: bool) -> None:
        """Before a prompt of this length: keeps the text so far only if it would be computed the same way again."""
        self._linears.begin()
        known, self._adapters = self._adapters, adapters(self.model)
        crosses = self._switch is not None and max(length, len(self.text)) > self._switch.boundary
        if not reuse or crosses or known != self._adapters:
            self.rewind(0)
            if self._switch and self._switch.changes_always:  # it remembers the longest text, until it sees a short one
                self._run([0], [0], None, keep=1)
                self.rewind(0)

    def reserve(self, capacity: int) -> None:
        self._cache.reserve(capacity)

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        """Commits tokens without looking at their logits; `following` comes behind them and is scored later."""
        if self._switch and tokens:  # its frequencies are those of the longest position, as in `generate`'s first pass
            extra = [] if following is None else [following]
            self._run([*tokens, *extra], range(len(tokens) + len(extra)), None, keep=1)
            return self.commit(list(range(len(tokens))), tokens)
        chunk = chunk or PREFILL_CHUNK
        for start in range(0, len(tokens), max(chunk, 1)):
            piece = tokens[start : start + chunk]
            self._run(piece, range(len(piece)), None, keep=1)
            self.commit(list(range(len(piece))), piece)

    def forward(self, tokens: Ints, depths: Ints, visible: Bools, wanted: Wanted | None = None) -> Tensor:
        """Logits [nodes, vocabulary] of nodes `depths` behind the text; row i of `visible` [nodes, scratch after
        this pass] marks the scratch slots that node i sees, itself among them. All of the text is seen. What is
        `wanted` besides may be had from `proposed`."""
        if (
            self._switch
            and not self.scratch
            and self._switch.crossed_by(len(self.text), len(self.text) + int(depths.max()))
        ):
            self._recompute(int(tokens[0]))
        sequential = self.scratch + np.arange(len(tokens))
        is_chain = bool((depths == sequential).all()) and bool(visible.sum() == (sequential + 1).sum())
        return self._run(tokens.tolist(), depths.tolist(), None if is_chain else visible)

    def check(self, tree: TokenTree) -> Tensor:
        """Logits of the nodes of a tree right behind the text."""
        return self.forward(tree.tokens, tree.depths, tree.mask)

    def rank(self, logits: Tensor) -> Ranking:
        """The best tokens of the last pass, whose logits are these."""
        return Ranking.of(logits)

    def sample(self, logits: Tensor, sampling: Sampling) -> list[int] | None:
        """The sampled tokens of the last pass; None: they are chosen along the accepted walk alone."""
        return None

    def proposed(self, logits: Tensor) -> tuple[Ints, Floats] | None:
        """What was wanted of the last pass, whose logits are these; None: it is read from them."""
        return None

    def commit(self, slots: list[int], tokens: list[int]) -> None:
        """Keeps the scratch slots of an accepted path as text; everything else of the scratch is forgotten."""
        self._cache.gather(len(self.text), slots)
        self.text.extend(tokens)
        self.scratch = 0
        self._scratch_depths.clear()

    def forget(self, scratch: int) -> None:
        """Keeps the first scratch nodes alone; the next pass writes over the others."""
        self.scratch = scratch
        del self._scratch_depths[scratch:]

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)
        del self.text[length:]
        self.scratch = 0
        self._scratch_depths.clear()

    def depth_limit(self, root: int) -> int | None:
        """How far behind a root at this position one pass may reach; None: as far as wished."""
        return self._switch.depth_limit(root) if self._switch else None

    def _recompute(self, next_token: int) -> None:
        # The switch looks at the largest position of a pass, so the next token must be in it.
        text = self.text.copy()
        self.rewind(0)
        self._run([*text, next_token], range(len(text) + 1), None, keep=1)
        self.commit(list(range(len(text))), text)

    def _run(self, tokens: list[int], depths: Any, visible: Bools | None, keep: int = 0) -> Tensor:
        device, length = self.device, len(self.text)
        self._scratch_depths.extend(depths)
        arguments: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=device), "use_cache": True}
        positions = length + torch.tensor(self._scratch_depths, device=device)
        if self._takes_positions:
            arguments["position_ids"] = positions[None, self.scratch :]
        if keep and self._takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        offsets = None
        if visible is not None:
            seen = torch.ones((len(tokens), length + len(positions)), dtype=torch.bool, device=device)
            seen[:, length:] = torch.from_numpy(visible).to(device)
            keys = torch.cat([torch.arange(length, device=device), positions])
            arguments["attention_mask"] = graph_masks(
                self._config, seen, positions[self.scratch :], keys, self.model.dtype
            )
            if self._offsets:
                offsets = positions[self.scratch :] - torch.arange(len(tokens), device=device)
        self._cache.offsets = offsets
        self._cache.rewind(length + self.scratch)  # drops what an interrupted pass may have left
        with self._linears.borrowed(len(tokens)):
            logits = self.model(**arguments, past_key_values=self._cache, return_dict=True).logits[0]
        self.scratch += len(tokens)
        return logits  # type: ignore[no-any-return]


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two texts share from the start."""
    pairs = zip(first, second, strict=False)
    return next((length for length, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
