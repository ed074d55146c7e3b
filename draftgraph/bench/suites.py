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


WITH_SHORT_CHAINS = ("off", "chain-2", *MODES[1:])
DEFAULT = Suite(prompts=8, new_tokens=128, repeats=3, modes=MODES)
SUITES = {
    "quick": Suite(prompts=2, new_tokens=40, repeats=1, modes=WITH_SHORT_CHAINS),  # minutes on two cores
    "full": Suite(prompts=8, new_tokens=128, repeats=3, modes=WITH_SHORT_CHAINS),
}


def suite_named(name: str | None) -> Suite:
    """
    >>> suite_named("quick").changed(repeats=2, prompts=None)
    Suite(prompts=2, new_tokens=40, repeats=2, modes=('off', 'chain-2', 'chain-4', 'chain-8', 'tree', 'graph', 'auto'))
    """
    if name is None:
        return DEFAULT
    if name not in SUITES:
        raise UsageError(f"there is no suite {name}: choose of {', '.join(SUITES)}")
    return SUITES[name]
