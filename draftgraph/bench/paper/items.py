"""What the study times: settings, prompts and temperature of every item, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftgraph.config import PAPER

# Tasks by what they are good for: whichever of them are there. Names as in the paper, and those of the own prompts.
MAIN = ("gsm8k", "xsum", "alpaca", "wmt14_deen", "math", "summary", "instruct", "to_en")
UNLIKE = ("poetry", "writing_prompts", "creative_alpaca", "story")  # low in repetition
FOREIGN = ("wmt14_ende", "from_en")
CHAINS = ("chain-3", "chain-4", "chain-6", "chain-8")  # standard speculative decoding: the best of them counts
STRUCTURES = (*CHAINS, "tree", "graph")
OUT_DEGREES = tuple(range(1, 9))
TAUS = (1, 2, 3, 4)
TEMPERATURES = (0.3, 0.7, 1.0)
PRUNING = {
    "none": "graph:theta_prob=0:theta_sib=0",
    "probability alone": "graph:theta_sib=0",
    "siblings alone": "graph:theta_prob=0",
    "both": "graph",
    "both, siblings kept as leaves": "graph:sibling_pruning=leaf",
}
GRID = {"theta_prob": (0.0, 0.1, 0.2, 0.4), "theta_sib": (0.0, 0.3, 0.6), "tau": (1, 2, 3)}


@dataclass(frozen=True)
class Item:
    """Modes to time beside each other on the same prompts."""

    name: str
    tasks: Sequence[str]
    modes: Sequence[str]
    temperature: float | None = None
    share: float = 1.0  # of the prompts: items with many modes take fewer

    def prompts_of(self, tasks: Mapping[str, Sequence[str]], most: int) -> dict[str, list[str]]:
        """Of the tasks that are there: at least one of each."""
        count = max(1, round(self.share * most))
        return {name: list(tasks[name][:count]) for name in self.tasks if name in tasks}


def grid_modes() -> dict[tuple[float, float, int], str]:
    """Mode by theta_prob, theta_sib and tau."""
    return {
        (prob, sib, tau): f"graph:theta_prob={prob}:theta_sib={sib}:tau={tau}"
        for prob in GRID["theta_prob"]
        for sib in GRID["theta_sib"]
        for tau in map(int, GRID["tau"])
    }


PAPER_POINT = (PAPER["theta_prob"], PAPER["theta_sib"], PAPER["tau"])
ITEMS = (
    Item("main", MAIN, (*STRUCTURES, "auto")),
    Item("k", MAIN, ("graph:k=2:tau=1", *(f"graph:k={k}" for k in OUT_DEGREES)), share=0.5),
    Item("tau", MAIN, tuple(f"graph:tau={tau}" for tau in TAUS), share=0.5),
    Item("pruning", MAIN, tuple(PRUNING.values()), share=0.5),
    Item("unlike", UNLIKE, (*STRUCTURES, "auto")),
    Item("foreign", FOREIGN, (*STRUCTURES, "auto")),
    *(Item(f"temperature-{heat}", MAIN, (*STRUCTURES, "auto"), heat, share=0.5) for heat in TEMPERATURES),
    Item("grid", MAIN, (*grid_modes().values(), "auto"), share=0.25),
)
