"""Engines under test: their contexts, trees, and one story that all of them must tell alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB
from torch import Tensor

from draftgraph.engine import paged
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedContext, PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Context, Segment
from draftgraph.kernels import attention, rows

PAGED = ("llama", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "mixtral")
PARENTS = np.array([-1, 0, 0, 1, 2, 1, 3, 0])
ALONE = np.array([0]), np.ones((1, 1), dtype=bool)  # depth and visible slots of one node behind the text


def let_libraries_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are those of a model's modules, whose sums change their order with the rows of a pass."""
    monkeypatch.setattr(paged, "program_of", lambda *_: None)
    monkeypatch.setattr(rows, "REPLACED", {})
    monkeypatch.setattr(attention, "is_plain", lambda *_: False)


def ancestry(parents: Any) -> tuple[Any, Any]:
    """Depths and ancestor mask of a tree; parents come first."""
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        visible[node] |= visible[parent]
    return visible.sum(axis=1) - 1, visible


def tokens_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def score(context: Any, tokens: Any, depths: Any, visible: Any) -> Tensor:
    """Logits of nodes behind the text, in one pass of their own; they are scratch after it."""
    return context.engine.run([Segment(context, np.asarray(tokens), depths, visible)])[0].logits.clone()


def scattered_context(model: Any, slots: int | None = 4096, captured: bool | None = None) -> PagedContext:
    """In an engine where another sequence holds every other page of the first few."""
    engine = PagedEngine(model, slots, captured)
    other, context = engine.open(), engine.open()
    for length in range(PAGE, 4 * PAGE + 1, PAGE):
        other.reserve(length)
        context.reserve(length)
    return context


def story(context: Context, model: Any) -> list[Tensor]:
    """Text in chunks, a tree in two passes, a commit that moves slots, more text behind it, a way back."""
    tokens, (depths, visible) = tokens_of(len(PARENTS), 1), ancestry(PARENTS)
    with Loan(model):
        context.begin(0, False)
        context.prefill(tokens_of(21).tolist(), chunk=8)
        scored = [score(context, tokens[:3], depths[:3], visible[:3, :3])]
        scored.append(score(context, tokens[3:], depths[3:], visible[3:]))
        path = [0, 1, 3, 6]
        context.commit(path, tokens[path].tolist())
        scored.append(score(context, tokens_of(1, 2), *ALONE))
        context.commit([0], tokens_of(1, 2).tolist())
        context.rewind(12)
        context.prefill([5, 6])
        scored.append(score(context, tokens_of(1, 3), *ALONE))
    return scored


def plain_story(model: Any) -> list[Tensor]:
    return story(EagerEngine(model).open(), model)


@torch.no_grad()
def plain(model: Any, text: list[int]) -> Tensor:
    """Logits of one plain pass over a text. # [tokens, vocabulary]"""
    return model(torch.tensor([text], device=model.device)).logits[0]  # type: ignore[no-any-return]
