"""How much `bench run` measures where it is not said: named suites, small and large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftgraph.bench.structures import MODES
from draftgraph.errors import UsageError


@dataclass(frozen=True)
class Suite:
    """Prompts are those of each task, the first ones."""

    prompts: int
    new_tokens: int
    repeats: int
    modes: Sequence[str]

    def changed(self, **given: Any) -> Suite:
        """With what was given; None: not given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


OF_TRANSFORMERS = ("hf", "hf-lookup", "hf-assisted")
DEFAULT = Suite(prompts=8, new_tokens=128, repeats=3, modes=MODES)
SUITES = {
    "quick": Suite(2, 40, 1, ("off", "chain-4", "tree", "graph", "auto", *OF_TRANSFORMERS)),  # minutes on two cores
    "full": Suite(8, 128, 3, ("off", "chain-2", *MODES[1:], *OF_TRANSFORMERS)),
}


def suite_named(name: str | None) -> Suite:
    """
    >>> suite_named("quick").changed(repeats=3, prompts=None).repeats
    3
    """
    if name is None:
        return DEFAULT
    if name not in SUITES:
        raise UsageError(f"there is no suite {name}: choose of {', '.join(SUITES)}")
    return SUITES[name]
