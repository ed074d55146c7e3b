"""The reference engine: plain forward passes of the user's own module with masks, a cache for every sequence.

It serves any decoder-only model with a rewindable cache, also those that paged passes cannot serve: models that do not
look their attention up in the registry, that count positions themselves, or whose rotary embedding changes with length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.adapters import Adapters
from draftgraph.engine.attention import graph_masks
from draftgraph.engine.borrowing import Linears, adapters, unwrapped
from draftgraph.engine.cache import SlotCache
from draftgraph.engine.protocol import PREFILL_CHUNK, PassResult, Segment
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.states import Taps, own_states
from draftgraph.graph import Bools, Ints
from draftgraph.kernels.rows import rows_apart


class EagerEngine:
    """See `Engine`."""

    asynchronous = captured = compiled = goes_ahead = False
    widths: tuple[int, ...] = ()
    slots = used = launched = 0
    left: Tensor | None = None
    ranks = 1

    def __init__(self, model: Any, branching: bool = True, offsets: bool = True) -> None:
        self.model, self.branching, self.adapters = model, branching, Adapters(model, {})
        self.offsets = offsets  # whether the model can be told the text's length per token
        self.switch = RopeSwitch.of(model)
        self.most = None if self.switch is None else 1  # the model remembers the length of the text that it last saw
        self.config = model.config.get_text_config(decoder=True)
        self.linears = Linears(model, parts_only=True)
        parameters = inspect.signature(unwrapped(model).forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.taps = Taps(model)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def open(self, tenant: str = "", adapter: int = 0) -> EagerContext:
        return EagerContext(self, adapter)

    def adapt(self, adapters: Adapters) -> None:
        self.adapters = adapters

    def read_states(self, reads: tuple[int, ...]) -> None:
        self.taps = Taps(self.model, reads)

    def run(self, segments: Sequence[Segment]) -> list[PassResult]:
        """One sequence after the other."""
        found = [(one, one.context.compute(one.tokens, one.depths, one.visible, one.states)) for one in segments]
        return [PassResult(logits if one.scored else logits[:0], states=states) for one, (logits, states) in found]

    def wait(self) -> None: ...

    def fits_one_pass(self, segments: Sequence[Segment]) -> bool:
        return len(segments) == 1

    def fitting(self, nodes: int, wanted: int) -> int:
        return wanted

    def mark(self) -> Callable[[], None]:
        return self.wait

    def has_room(self, tokens: int, without: Sequence[EagerContext] = ()) -> bool:
        return True

    def reserve(self, slots: int) -> None: ...

    def prepare(self, sequences: int, reading_only: bool = False) -> None: ...


class EagerContext:
    """See `Context`."""

    expected, reuses = 0, False
    on_states: Callable[[Tensor], None] | None = None

    def __init__(self, engine: EagerEngine, adapter: int = 0) -> None:
        self.engine, self.adapter = engine, adapter
        self.text: list[int] = []
        self.scratch = 0
        self._scratch_depths: list[int] = []
        self._cache = SlotCache()
        self._adapters = adapters(engine.model)

    def begin(self, length: int, reuse: bool) -> None:
        engine = self.engine
        known, self._adapters = self._adapters, adapters(engine.model)
        crosses = engine.switch is not None and max(length, len(self.text)) > engine.switch.boundary
        if not reuse or crosses or known != self._adapters:
            self.rewind(0)
            if engine.switch and engine.switch.changes_always:  # it keeps the longest length until it sees a short one
                self._run([0], [0], None, keep=1)
                self.rewind(0)

    def begin_with(self, tokens: list[int], following: int) -> int:
        """Reads it all at once: its rotary embedding may depend on the length."""
        self.prefill(tokens, None, following)
        return 0

    def publish(self) -> None: ...

    def close(self) -> None:
        self.rewind(0)

    def reserve(self, capacity: int) -> None:
        self._cache.reserve(capacity)

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        if self.engine.switch and tokens:  # its frequencies are those of the longest position, as in `generate`
            extra = [] if following is None else [following]
            _, states = self._run([*tokens, *extra], range(len(tokens) + len(extra)), None, keep=1)
            return self._commit_text(tokens, states)
        chunk = chunk or PREFILL_CHUNK
        for start in range(0, len(tokens), max(chunk, 1)):
            piece = tokens[start : start + chunk]
            _, states = self._run(piece, range(len(piece)), None, keep=1)
            self._commit_text(piece, states)

    def _commit_text(self, tokens: list[int], states: Tensor | None) -> None:
        self.commit(list(range(len(tokens))), tokens)
        if self.on_states is not None and states is not None:
            self.on_states(states[: len(tokens)])

    def forward(self, tokens: Ints, depths: Ints, visible: Bools) -> Tensor:
        """The logits that `compute` gives."""
        return self.compute(tokens, depths, visible)[0]

    def compute(
        self, tokens: Ints, depths: Ints, visible: Bools, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [nodes, vocabulary] of nodes `depths` behind the text, and their hidden states, where they are read;
        row i of `visible` [nodes, scratch after this pass] marks the scratch slots that node i sees, itself among them.
        All of the text is seen. `states`: what a head reads."""
        switch, length = self.engine.switch, len(self.text)
        if switch and not self.scratch and switch.crossed_by(length, length + int(depths.max())):
            self._recompute(int(tokens[0]))
        sequential = self.scratch + np.arange(len(tokens))
        is_chain = bool((depths == sequential).all()) and bool(visible.sum() == (sequential + 1).sum())
        return self._run(tokens.tolist(), depths.tolist(), None if is_chain else visible, given=states)

    def commit(self, slots: list[int], tokens: list[int]) -> None:
        self._cache.gather(len(self.text), slots)
        self.text.extend(tokens)
        self.scratch = 0
        self._scratch_depths.clear()

    def forget(self, scratch: int) -> None:
        self.scratch = scratch
        del self._scratch_depths[scratch:]

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)
        del self.text[length:]
        self.scratch = 0
        self._scratch_depths.clear()

    def depth_limit(self, root: int) -> int | None:
        return self.engine.switch.depth_limit(root) if self.engine.switch else None

    def _recompute(self, next_token: int) -> None:
        # The switch looks at the largest position of a pass, so the next token must be in it.
        text = self.text.copy()
        self.rewind(0)
        self._run([*text, next_token], range(len(text) + 1), None, keep=1)
        self.commit(list(range(len(text))), text)

    def _run(
        self, tokens: list[int], depths: Any, visible: Bools | None, keep: int = 0, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        engine, length = self.engine, len(self.text)
        device = engine.device
        self._scratch_depths.extend(depths)
        arguments: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=device), "use_cache": True}
        positions = length + torch.tensor(self._scratch_depths, device=device)
        if engine.takes_positions:
            arguments["position_ids"] = positions[None, self.scratch :]
        if keep and engine.takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        offsets = None
        if visible is not None:
            seen = torch.ones((len(tokens), length + len(positions)), dtype=torch.bool, device=device)
            seen[:, length:] = torch.from_numpy(visible).to(device)
            keys = torch.cat([torch.arange(length, device=device), positions])
            told = (engine.config, seen, positions[self.scratch :], keys, engine.model.dtype)
            arguments["attention_mask"] = graph_masks(*told)
            if engine.offsets:
                offsets = positions[self.scratch :] - torch.arange(len(tokens), device=device)
        self._cache.offsets = offsets
        self._cache.rewind(length + self.scratch)  # drops what an interrupted pass may have left
        numbers = torch.full((len(tokens),), self.adapter, device=device) if self.adapter else None
        if given is not None:
            arguments["states"] = given[None]
        lent = engine.linears.borrowed(), engine.adapters.added(numbers), engine.taps.reading()
        with rows_apart(engine.device), lent[0], lent[1], lent[2]:
            out = engine.model(**arguments, past_key_values=self._cache, return_dict=True)
        self.scratch += len(tokens)
        return out.logits[0], own_states(out, engine.taps)
