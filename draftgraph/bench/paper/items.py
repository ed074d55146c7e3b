"""What the study measures, and how much of it: settings, prompts and temperature of every item that is timed, each in a
folder of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from draftgraph.config import PAPER
from draftgraph.errors import UsageError

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
DRAFTS = "drafts"  # the folder of drafts of several sizes
OWN_DRAFTS = NO_DRAFT, PAIRS_DRAFT, TARGET_ITSELF = "none", "pair", "self"  # those that every study has
GRID = {"theta_prob": (0.0, 0.1, 0.2, 0.4), "theta_sib": (0.0, 0.3, 0.6), "tau": (1, 2, 3)}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    prompts: int  # of a task
    new_tokens: int
    repeats: int
    long_answers: int  # with wrong masks
    long_tokens: int = 1000
    scored_answers: int = 8  # with wrong masks: whether they are right
    scored_tokens: int = 256  # at most
    trials: int = 40  # of the search for the best setting
    searched_prompts: int = 2  # of a task


SIZES = {
    "small": Size(prompts=1, new_tokens=32, repeats=1, long_answers=1, scored_answers=2, trials=8, searched_prompts=1),
    "medium": Size(prompts=3, new_tokens=96, repeats=1, long_answers=2, trials=16, searched_prompts=1),
    "full": Size(prompts=8, new_tokens=128, repeats=3, long_answers=4),
}


@dataclass(frozen=True)
class Item:
    """Modes to time beside each other on the same prompts."""

    name: str
    tasks: Sequence[str]
    modes: Sequence[str]
    temperature: float | None = None
    share: float = 1.0  # of the prompts: items with many modes take fewer

    def prompts_of(self, tasks: Mapping[str, Sequence[str]], most: int) -> dict[str, list[str]]:
        """At least one prompt of every task that is present."""
        return first_prompts(tasks, self.tasks, max(1, round(self.share * most)))


def first_prompts(tasks: Mapping[str, Sequence[str]], names: Sequence[str], most: int) -> dict[str, list[str]]:
    """The first prompts of those tasks that are present."""
    return {name: list(tasks[name][:most]) for name in names if name in tasks}


def grid_modes() -> dict[tuple[float, float, int], str]:
    """Mode by theta_prob, theta_sib and tau."""
    return {
        (prob, sib, tau): f"graph:theta_prob={prob}:theta_sib={sib}:tau={tau}"
        for prob in GRID["theta_prob"]
        for sib in GRID["theta_sib"]
        for tau in map(int, GRID["tau"])
    }


def draft_item(name: str) -> Item:
    modes = ("auto",) if name == NO_DRAFT else (*CHAINS, "graph", "auto")
    return Item(f"{DRAFTS}/{name}", MAIN, modes, share=0.25)


def refuse_draft_names(names: Iterable[str]) -> None:
    """A draft's name becomes the name of a folder."""
    for name in names:
        if name in OWN_DRAFTS:
            raise UsageError(f"another draft cannot be named {name}: that one is measured anyway")
        if not name.strip(".") or set(name) & set("/\\"):
            raise UsageError(f"a draft cannot be named {name!r}: it names a folder")


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
