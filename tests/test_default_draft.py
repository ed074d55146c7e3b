"""The draft that comes with the default model, on prompts written for this test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import draftgraph
from draftgraph import GraphConfig, Pair
from draftgraph.models.fetch import DEFAULT_DRAFT

PROMPTS = [
    "Why do cats purr?",
    "Anna has 3 bags with 12 marbles each and gives 7 marbles away. How many are left? Think step by step.",
    "Write a Python function that returns the largest number of a list.",
]


@pytest.fixture(scope="module")
def pair(default_model_file: Path) -> Pair:
    return draftgraph.load(device="cpu", dtype="float32")


def test_is_small_and_says_how_it_was_made() -> None:
    assert sum(file.stat().st_size for file in DEFAULT_DRAFT.iterdir()) < 16 << 20
    assert {"README.md", "config.json", "model.safetensors", "training.json"} <= {
        f.name for f in DEFAULT_DRAFT.iterdir()
    }


def test_is_used_unless_told_otherwise(pair: Pair) -> None:
    assert pair.draft is not None
    assert pair.draft.config.num_hidden_layers < pair.target.config.num_hidden_layers / 4
    assert draftgraph.load(draft="none", device="cpu").draft is None


@pytest.mark.parametrize("prompt", PROMPTS)
def test_is_accepted(pair: Pair, prompt: str) -> None:
    """Chains of eight: a draft that was stored or read wrongly would be worth nothing."""
    plain, chain = (
        pair.generate(prompt, max_new_tokens=48, config=config)
        for config in (GraphConfig(mode="off"), GraphConfig(mode="chain", chain_length=8))
    )
    assert plain.token_ids == chain.token_ids
    assert chain.stats.mean_accepted_length > 1.8, chain.stats


def test_is_worth_asking_for_sampled_text_too(pair: Pair) -> None:
    sampling: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_new_tokens": 48}
    plain, graph = (pair.generate(PROMPTS[0], config=GraphConfig(mode=mode), **sampling) for mode in ("off", "graph"))
    assert plain.token_ids == graph.token_ids
    assert graph.stats.mean_accepted_length > 1.5, graph.stats
