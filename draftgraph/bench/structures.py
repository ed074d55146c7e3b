"""What is compared, under the names that reports use: structures, modes, other libraries' methods, suites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftgraph.config import CHOICES, RANGES, GraphConfig
from draftgraph.errors import UsageError

BEST_FIRST: dict[str, Any] = {"growth": "best-first", "k": 8, "theta_prob": 0.0, "theta_sib": 0.0, "max_depth": 8}
STRUCTURES: dict[str, GraphConfig] = {
    "chain-4": GraphConfig(mode="chain", chain_length=4),
    "chain-8": GraphConfig(mode="chain", chain_length=8),
    "paper-tree": GraphConfig(mode="tree"),
    "paper-graph": GraphConfig(mode="graph"),
    **{f"tree-{nodes}": GraphConfig(mode="tree", max_nodes=nodes, **BEST_FIRST) for nodes in (16, 32, 64)},
    **{f"graph-{nodes}": GraphConfig(mode="graph", max_nodes=nodes, **BEST_FIRST) for nodes in (16, 32, 64)},
}
HF_METHODS = ("hf", "hf-assisted", "hf-assisted-constant", "hf-lookup", "hf-static")
VLLM_METHODS = ("vllm", "vllm-ngram", "vllm-draft", "vllm-draft-3")
LLAMA_METHODS = ("llama", *(f"llama-ngram-{kind}" for kind in ("simple", "map-k", "map-k4v", "mod", "cache")))
PEERS = (*HF_METHODS, *VLLM_METHODS, *LLAMA_METHODS)  # of other libraries, timed in the same turns
MODES = ("off", "chain-4", "chain-8", "tree", "graph", "auto")  # that are timed if none are named


def chosen(names: Sequence[str]) -> dict[str, GraphConfig]:
    """The structures with these names; all if none is named."""
    for name in names:
        if name not in STRUCTURES:
            raise UsageError(f"there is no structure {name}: choose of {', '.join(STRUCTURES)}")
    return {name: STRUCTURES[name] for name in names or STRUCTURES}


def mode_named(word: str) -> GraphConfig:
    """A mode with its own settings, with a size (levels of a chain, or verified nodes), or with settings by name.

    >>> mode_named("graph").theta_prob, mode_named("chain-6").chain_length, mode_named("tree-32").max_nodes
    (0.2, 6, 32)
    >>> mode_named("graph:k=2:tau=1").k
    2
    """
    word, *named = word.split(":")
    mode, dash, size = word.partition("-")
    if mode not in CHOICES["mode"] or (dash and not size.isdecimal()) or word.startswith("off-"):
        raise UsageError(
            f"there is no mode {word}: name auto, graph, tree, chain or off, or as in chain-6 and tree-64; "
            f"of other libraries: {', '.join(PEERS)}"
        )
    settings: dict[str, Any] = {"mode": mode}
    if dash:
        settings["chain_length" if mode == "chain" else "max_nodes"] = int(size)
    if dash and mode in ("tree", "graph"):
        settings |= BEST_FIRST
    return GraphConfig(**settings | dict(map(setting_named, named)))


def setting_named(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(CHOICES, str) | {
        known: int if most is None else float for known, (_, most) in RANGES.items()
    }
    if name == "mode" or name not in kinds:
        known = ", ".join(sorted(set(kinds) - {"mode"}))
        raise UsageError(f"a mode has no setting {name}: name one of {known}, as in graph:k=2")
    try:
        return name, kinds[name](value)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error


@dataclass(frozen=True)
class Suite:
    """How much is measured; prompts are the first ones of each task."""

    prompts: int
    new_tokens: int
    repeats: int
    modes: Sequence[str]

    def changed(self, **given: Any) -> Suite:
        """Replaces the values that are not None."""
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
    if name is not None and name not in SUITES:
        raise UsageError(f"there is no suite {name}: choose of {', '.join(SUITES)}")
    return DEFAULT if name is None else SUITES[name]
