"""How a graph is grown: one frozen dataclass, the paper's symbols under the paper's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from draftgraph.errors import UsageError

Mode = Literal["auto", "graph", "tree", "chain", "off"]

PAPER: dict[str, Any] = {"k": 4, "tau": 2, "theta_prob": 0.2, "theta_sib": 0.3, "max_depth": 8, "growth": "level"}
OURS: dict[str, Any] = {"k": 8, "theta_prob": 0.0, "theta_sib": 0.0, "max_depth": 16, "growth": "best-first"}
MODE_DEFAULTS: dict[str, dict[str, Any]] = {
    "graph": PAPER,
    "tree": PAPER,
    "chain": PAPER | {"k": 1, "theta_prob": 0.0, "theta_sib": 0.0},
    "off": PAPER,
    "auto": PAPER | OURS,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": tuple(MODE_DEFAULTS),
    "growth": ("level", "best-first"),
    "sibling_pruning": ("drop", "leaf"),
    "verification": ("keyed", "rejection"),
}
PRICES = ("measured", "flat")
RANGES: dict[str, tuple[float, float | None]] = {
    "k": (1, None),
    "tau": (1, None),
    "theta_prob": (0, 1),
    "theta_sib": (0, 1),
    "max_nodes": (1, None),
    "max_depth": (0, None),
    "chain_length": (1, None),
}


@runtime_checkable
class CostModel(Protocol):
    """The prices of passes, in any one unit: what mode `auto` decides by. Any object with these methods will do.

    Examples:
        >>> class Linear:
        ...     def of_pass(self, nodes):
        ...         return 1 + 0.02 * nodes
        ...     def of_level(self, nodes):
        ...         return 0.1 + 0.002 * nodes
        ...     def floor(self):
        ...         return 0.01
        >>> isinstance(GraphConfig(cost=Linear()).cost, CostModel)
        True
    """

    def of_pass(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """What passes of the target over so many nodes cost, the root counted."""

    def of_level(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """What passes of the draft over so many nodes cost."""

    def floor(self) -> float:
        """The acceptance estimate under which a node is not worth drafting on."""


@dataclass(frozen=True)
class GraphConfig:
    """What to draft and how much of it. Fields left out take the mode's defaults; those it does not use are ignored.

    Attributes:
        mode: `auto`, `graph` (the paper's method), `tree` (without merging), `chain` (one guess) or `off` (none).
        k: Children of a node, at most: 4 in the paper, 8 in `auto`.
        tau: Tokens of a repeated n-gram that make a merge: 2.
        theta_prob: A node whose probability is under it stays a leaf: 0.2 in the paper, 0 in `auto`.
        theta_sib: A child under it times its best sibling is pruned: 0.3 in the paper, 0 in `auto`.
        max_nodes: Nodes that the target checks in one pass, the root counted.
        max_depth: Levels: 8 in the paper's modes, 16 in `auto`.
        chain_length: Tokens of a chain.
        growth: By `level`, as in the paper, or `best-first`, as in `auto`.
        sibling_pruning: Whether a pruned child is dropped or kept as a leaf: the paper's text can be read both ways.
        verification: `keyed`: the tokens of plain decoding; `rejection`: classical, for comparison, in `chain` only.
        cost: The prices that mode `auto` decides by: `measured` on this machine, `flat`, or one's own.
        exact: True refuses a target whose logits were not found to have the same bits in every pass.

    Examples:
        >>> GraphConfig().mode, GraphConfig(mode="graph").k, GraphConfig(mode="graph").theta_prob
        ('auto', 4, 0.2)
    """

    mode: Mode = "auto"
    k: int = None  # type: ignore[assignment]
    tau: int = None  # type: ignore[assignment]
    theta_prob: float = None  # type: ignore[assignment]
    theta_sib: float = None  # type: ignore[assignment]
    max_nodes: int = 64
    max_depth: int = None  # type: ignore[assignment]
    chain_length: int = 5
    growth: Literal["level", "best-first"] = None  # type: ignore[assignment]
    sibling_pruning: Literal["drop", "leaf"] = "drop"
    verification: Literal["keyed", "rejection"] = "keyed"
    cost: Literal["measured", "flat"] | CostModel = "measured"
    exact: bool = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode)
        for name, value in MODE_DEFAULTS[self.mode].items():
            if getattr(self, name) is None or self.mode == "chain":  # a chain has no use for them
                object.__setattr__(self, name, value)
        for name in CHOICES:
            check_choice(name, getattr(self, name))
        for name in RANGES:
            check_range(name, getattr(self, name))
        if self.verification == "rejection" and self.mode != "chain":
            raise UsageError(f'verification="rejection" exists only in mode="chain", not in mode="{self.mode}"')
        if self.cost not in PRICES and not isinstance(self.cost, CostModel):
            raise UsageError(f"cost must be {', '.join(PRICES)} or a CostModel, not {self.cost!r}")

    @property
    def merges(self) -> bool:
        return self.mode in ("graph", "auto")

    @property
    def copies(self) -> bool:
        return self.mode == "auto"

    @property
    def drafts(self) -> bool:
        return self.mode != "off"

    @property
    def nodes(self) -> int:
        """The bound on verified nodes in this mode, the root counted."""
        return {"off": 1, "chain": self.chain_length + 1}.get(self.mode, self.max_nodes)

    @property
    def levels(self) -> int:
        """The bound on depth in this mode."""
        return {"off": 0, "chain": self.chain_length}.get(self.mode, self.max_depth)


def check_choice(name: str, value: object) -> None:
    if value not in CHOICES[name]:
        raise UsageError(f"{name} must be one of {', '.join(CHOICES[name])}, not {value!r}")


def check_range(name: str, value: Any) -> None:
    low, high = RANGES[name]
    whole = high is None
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if fits and low <= value and (high is None or value <= high):
        return
    allowed = f"a whole number of at least {low}" if whole else f"between {low} and {high}"
    raise UsageError(f"{name} must be {allowed}, not {value!r}")
