"""Engines of rank 0 whose passes all ranks compute: what is asked of one is asked of those of the other ranks too.

All that an engine and its contexts decide (pages, shapes, recordings) follows from what they were asked, so they stay
alike on all ranks without a word about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftgraph.engine.adapters import Adapters
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.protocol import Context, Engine, PassResult, Segment
from draftgraph.engine.ranks import Led, Ranks

ENGINES: dict[str, Callable[..., Engine]] = {"paged": PagedEngine, "eager": EagerEngine}


class LeadEngine(Led):
    """See `Engine`. Tokens are ranked and sampled on this rank alone, and proposals are read from the logits."""

    compiled = goes_ahead = False

    def __init__(self, group: Ranks, model: Any, kind: str, *options: Any) -> None:
        number = group.number()
        with group.telling("engine", number, group.number_of(model), kind, *options):
            inner = ENGINES[kind](model, *options)
        super().__init__(group, inner, number)
        self.model, self.ranks = model, group.size
        self.branching, self.most, self.widths = inner.branching, inner.most, inner.widths
        self.asynchronous, self.captured, self.adapters = inner.asynchronous, inner.captured, inner.adapters

    @property
    def device(self) -> torch.device:
        return self.inner.device  # type: ignore[no-any-return]

    @property
    def left(self) -> Tensor | None:
        return self.inner.left  # type: ignore[no-any-return]

    @property
    def slots(self) -> int:
        return self.inner.slots  # type: ignore[no-any-return]

    @property
    def used(self) -> int:
        return self.inner.used  # type: ignore[no-any-return]

    def has_room(self, tokens: int, without: Sequence[LeadContext] = ()) -> bool:
        return self.inner.has_room(tokens, [context.inner for context in without])  # type: ignore[no-any-return]

    def open(self, tenant: str = "", adapter: int = 0) -> LeadContext:
        number = self.group.number()
        with self.group.telling("open", number, self.number, tenant, adapter, now=False):
            return LeadContext(self, self.inner.open(tenant, adapter), number)

    def adapt(self, adapters: Adapters) -> None:
        with self.group.telling("adapt", self.number, adapters.given):
            self.inner.adapt(adapters)
        self.adapters = adapters

    def read_states(self, reads: tuple[int, ...]) -> None:
        with self.group.telling("ask", self.number, "read_states", reads, now=False):
            self.inner.read_states(reads)

    def run(self, segments: Sequence[Segment]) -> list[PassResult]:
        self.wait()  # so that a pass that never ends is noticed where passes are only launched
        own = [replace(segment, context=segment.context.inner, wanted=None) for segment in segments]
        with self.group.telling("run", self.number, [told(segment) for segment in segments]):
            return self.inner.run(own)  # type: ignore[no-any-return]

    def wait(self) -> None:
        with self.group.waiting():
            self.inner.wait()

    @property
    def launched(self) -> int:
        return self.inner.launched  # type: ignore[no-any-return]

    def fits_one_pass(self, segments: Sequence[Segment]) -> bool:
        return self.inner.fits_one_pass(segments)  # type: ignore[no-any-return]

    def fitting(self, nodes: int, wanted: int) -> int:
        return self.inner.fitting(nodes, wanted)  # type: ignore[no-any-return]

    def mark(self) -> Callable[[], None]:
        return self.wait

    def reserve(self, slots: int) -> None:
        with self.group.telling("ask", self.number, "reserve", slots, now=False):
            self.inner.reserve(slots)

    def prepare(self, sequences: int, reading_only: bool = False) -> None:
        with self.group.telling("ask", self.number, "prepare", sequences, reading_only):
            self.inner.prepare(sequences, reading_only)


class LeadContext(Led):
    """See `Context`."""

    def __init__(self, engine: LeadEngine, inner: Context, number: int) -> None:
        super().__init__(engine.group, inner, number)
        self.engine, self.reuses = engine, inner.reuses

    @property
    def text(self) -> list[int]:
        return self.inner.text  # type: ignore[no-any-return]

    @property
    def scratch(self) -> int:
        return self.inner.scratch  # type: ignore[no-any-return]

    @property
    def expected(self) -> int:
        return self.inner.expected  # type: ignore[no-any-return]

    @expected.setter
    def expected(self, tokens: int) -> None:
        with self.group.telling("expect", self.number, tokens, now=False):
            self.inner.expected = tokens

    @property
    def on_states(self) -> Callable[[Tensor], None] | None:
        return self.inner.on_states  # type: ignore[no-any-return]

    @on_states.setter
    def on_states(self, act: Callable[[Tensor], None] | None) -> None:
        self.inner.on_states = act

    def begin(self, length: int, reuse: bool) -> None:
        self._ask("begin", length, reuse, now=True)

    def begin_with(self, tokens: list[int], following: int) -> int:
        return self._ask("begin_with", tokens, following, now=True)  # type: ignore[no-any-return]

    def reserve(self, capacity: int) -> None:
        self._ask("reserve", capacity)

    def prefill(self, tokens: list[int], chunk: int | None = None, following: int | None = None) -> None:
        self._ask("prefill", tokens, chunk, following, now=True)

    def commit(self, slots: list[int], tokens: list[int]) -> None:
        self._ask("commit", slots, tokens)

    def forget(self, scratch: int) -> None:
        self._ask("forget", scratch)

    def rewind(self, length: int) -> None:
        self._ask("rewind", length)

    def publish(self) -> None:
        self._ask("publish")

    def close(self) -> None:
        self._ask("close")

    def depth_limit(self, root: int) -> int | None:
        return self.inner.depth_limit(root)  # type: ignore[no-any-return]

    def _ask(self, what: str, *given: Any, now: bool = False) -> Any:
        with self.group.telling("ask", self.number, what, *given, now=now):
            return getattr(self.inner, what)(*given)


def told(segment: Segment) -> list[Any]:
    """What makes a pass the same on another rank."""
    visible = None if segment.chain else segment.visible
    return [segment.context.number, segment.tokens, segment.depths, visible, segment.scored, segment.chain]
