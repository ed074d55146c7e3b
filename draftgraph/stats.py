"""What happened in one step, kept whole for whoever wants to look, and the figures of a generation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from draftgraph.graph import State, TokenGraph, TokenTree

Reason = Literal["k", "theta_prob", "theta_sib", "budget", "not drafted"]


@dataclass(frozen=True)
class Step:
    """One draft-and-verify step."""

    position: int  # of the root, in the text
    graph: TokenGraph  # what the tree is an unrolled view of
    tree: TokenTree
    path: list[int]  # accepted tree nodes, the root left out
    tokens: list[int]  # what the target chose: the accepted tokens and one more
    finish_reason: str | None = None  # the text ended inside this step

    @property
    def stopped(self) -> bool:
        return self.finish_reason is not None

    @property
    def rejection(self) -> Reason | None:
        """Why the target's last token was not in the tree; None if it was."""
        node, token = (self.path[-1] if self.path else 0), self.tokens[-1]
        if len(self.path) == len(self.tokens):
            return None
        graph = self.graph
        here = int(graph.canonical[self.tree.nodes[node]])
        if token in graph.children_of(here) or (here, token) in graph.crowded_out:
            return "budget"
        if (here, token) in graph.dropped:
            return "theta_sib"
        state = graph.state_of(here)
        if state is State.LEAF:
            return "theta_sib" if here in graph.weak_siblings else "theta_prob"
        if state is State.OPEN:
            return "budget"
        return "k" if graph.is_drafted(here) else "not drafted"


Observer = Callable[[Step], None]


Phase = Literal["prefill", "draft", "verify", "other"]
SOURCES = ("draft", "merged", "copied", "recycled")  # and "forced", where a grammar forces tokens


@dataclass
class Stats:
    """What was drafted, verified and accepted, and where the time went.

    Attributes:
        exact: Logits have the same bits in every pass, so all modes and batches give the same tokens.
        steps: Passes of the target, prefill apart.
        drafts: Of them had a draft to check.
        new_tokens: Of the answer.
        prompt_tokens: Of the prompt.
        draft_passes: Passes of the draft model.
        draft_tokens: Tokens that the draft model was fed.
        verified_tokens: Tree nodes that the target scored, roots included.
        checked_by_source: Tree nodes by who proposed them, roots apart: `draft`, `merged`, `copied`, `recycled`.
        accepted_by_source: Those that the target accepted.
        accepted_by_depth: The same, by level.
        checked_by_depth: Tree nodes by level.
        rejected_by: Why the tree lacked the target's token: `k`, `theta_prob`, `theta_sib`, `budget` or `not drafted`.
        seconds: Of `prefill`, `draft`, `verify` and `other`.

    Examples:
        >>> stats = pair.generate("Count to ten.", max_new_tokens=16).stats
        >>> stats.mean_accepted_length == 16 / stats.steps
        True
    """

    exact: bool = True
    steps: int = 0
    drafts: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    draft_passes: int = 0
    draft_tokens: int = 0
    verified_tokens: int = 0
    checked_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    accepted_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    accepted_by_depth: dict[int, int] = field(default_factory=dict)
    checked_by_depth: dict[int, int] = field(default_factory=dict)
    rejected_by: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}
    )

    @classmethod
    def read(cls, figures: dict[str, Any]) -> Stats:
        """Of fields that were JSON meanwhile, where every key is a text."""
        by_depth = ("accepted_by_depth", "checked_by_depth")
        numbered = {name: {int(depth): one for depth, one in figures[name].items()} for name in by_depth}
        return cls(**figures | numbered)

    @property
    def mean_accepted_length(self) -> float:
        """New tokens per target pass, the bonus token included."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target accepted."""
        return sum(self.accepted_by_source.values())

    @property
    def merged_share(self) -> float:
        """How much of the accepted drafts came without drafting: merged, copied, recycled or forced."""
        return 1.0 - self.accepted_by_source["draft"] / self.accepted if self.accepted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: prefill apart."""
        decoding = sum(self.seconds.values()) - self.seconds["prefill"]
        return self.new_tokens / decoding if decoding else 0.0

    @contextmanager
    def clock(self, phase: Phase) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def count(self, step: Step) -> None:
        self.steps += 1
        self.drafts += len(step.tree) > 1
        self.new_tokens += len(step.tokens)
        self.verified_tokens += len(step.tree)
        for source in step.tree.sources[1:]:
            self.checked_by_source[source] = self.checked_by_source.get(source, 0) + 1
        for node in step.path:
            source = step.tree.sources[node]
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
        for depth in step.tree.depths[1:].tolist():
            self.checked_by_depth[depth] = self.checked_by_depth.get(depth, 0) + 1
        for depth in range(1, len(step.path) + 1):
            self.accepted_by_depth[depth] = self.accepted_by_depth.get(depth, 0) + 1
        if len(step.graph) > 1 and (reason := step.rejection) is not None:
            self.rejected_by[reason] = self.rejected_by.get(reason, 0) + 1

    def __add__(self, other: Stats) -> Stats:
        """Figures of two generations together."""
        total = Stats()
        for name, value in vars(self).items():
            added = getattr(other, name)
            total.__dict__[name] = dict(Counter(value) + Counter(added)) if isinstance(value, dict) else value + added
        total.exact = self.exact and other.exact
        for source in SOURCES:
            total.checked_by_source.setdefault(source, 0)
            total.accepted_by_source.setdefault(source, 0)
        for phase in self.seconds:
            total.seconds.setdefault(phase, 0.0)
        return total

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        derived = ("mean_accepted_length", "merged_share", "tokens_per_second")
        return vars(self) | {name: getattr(self, name) for name in derived}
