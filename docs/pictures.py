"""Makes the pictures of README.md and how-it-works.md: python docs/pictures.py

The draft is the default target with noise on its weights: it mostly agrees, as a small draft does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import draftgraph
from draftgraph import GraphConfig, Pair
from draftgraph.inspect import Panel, side_by_side_svg

IMAGES = Path(__file__).parent / "images"
PROMPT = "List the days of the week and say something nice about each."
NOISE = 0.04


def noisy(model: Any) -> Any:
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * weight.std(unbiased=False) * NOISE)
    return draft


def write(name: str, panels: list[Panel], **options: Any) -> None:
    IMAGES.mkdir(exist_ok=True)
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        (IMAGES / f"{name}{suffix}.svg").write_text(side_by_side_svg(panels, theme=theme, **options))


def main() -> None:
    loaded = draftgraph.load(dtype="float32", device="cpu")
    pair = Pair(loaded.target, noisy(loaded.target), loaded.tokenizer)
    graph, tree = (pair.inspect(PROMPT, max_new_tokens=40, config=GraphConfig(mode=mode)) for mode in ("graph", "tree"))
    merged = next(step for step in graph.steps if any(node.alias_of is not None for node in step.nodes))
    same_place = next(step for step in tree.steps if step.position == merged.position)
    last = max(node.index for node in merged.tree if node.source == "merged")

    write("readme", [Panel(merged, "graph")])
    write(
        "draft-verify",
        [
            Panel(merged, "graph", "Draft", "What may come next, and how likely the draft finds it.", outcome=False),
            Panel(
                merged, "graph", "Verify", "One pass of the target: the path it agrees with, and its own next token."
            ),
        ],
        stacked=True,
    )
    write(
        "tree-graph",
        [
            Panel(same_place, "graph", "Tree", "Every branch is drafted to its end."),
            Panel(merged, "graph", "Graph", "A branch that repeats two tokens goes on where they stood first."),
        ],
        stacked=True,
    )
    write(
        "mask", [Panel(merged, "mask", "Unrolled, with its mask", "Each row: the nodes that a node sees.", focus=last)]
    )


if __name__ == "__main__":
    main()
