"""What a wrong attention mask does: nodes see others that are not their ancestors, at the target or at the draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.bench.structures import mode_named
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.proposals import Wanted
from draftgraph.engine.runner import Engine
from draftgraph.graph import Bools, Ints, TokenTree

if TYPE_CHECKING:
    from draftgraph.decoding import Decoding
    from draftgraph.pair import Pair

# Where masks are wrong, and for which share of nodes: each of these sees one node too many. Right ones come first.
SETTINGS = ("target 0.0", "target 0.02", "target 0.1", "target 0.5", "draft 0.5")
MODE = "graph"
PLAIN = mode_named("off")


@contextmanager
def wrong_masks(engine: Engine, share: float, seed: int = 0) -> Iterator[None]:
    """While entered, this share of the nodes of a pass also see a node that is no ancestor of theirs."""
    random, forward = np.random.default_rng(seed), engine.forward

    def wrong_forward(tokens: Ints, depths: Ints, visible: Bools, wanted: Wanted | None = None) -> Tensor:
        return forward(tokens, depths, with_strangers(visible, share, random), wanted)

    def wrong_check(tree: TokenTree) -> Tensor:
        return wrong_forward(tree.tokens, tree.depths, tree.mask)

    engine.forward, engine.check = wrong_forward, wrong_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.forward, engine.check


def with_strangers(visible: Bools, share: float, random: np.random.Generator) -> Bools:
    """Rows [nodes, slots] in which some see one earlier slot more."""
    changed, before = visible.copy(), visible.shape[1] - visible.shape[0]
    for row in np.flatnonzero(random.random(len(visible)) < share):
        strangers = np.flatnonzero(~visible[row, : before + row])
        if len(strangers):
            changed[row, random.choice(strangers)] = True
    return changed


def answer(pair: Pair, prompt: str, arguments: dict[str, Any], target: float = 0.0, draft: float = 0.0) -> Decoding:
    """With these shares of wrong rows at the target and at the draft."""
    decoder = pair.decoder
    assert decoder.draft_engine is not None
    with wrong_masks(decoder.target_engine, target), wrong_masks(decoder.draft_engine, draft):
        decoding = pair.start(prompt, config=mode_named(MODE), **arguments)
        for _ in decoding:
            pass
    return decoding


@torch.no_grad()
def surprise(pair: Pair, prompt: list[int], tokens: list[int]) -> float:
    """The target's own mean surprise at an answer, in nats per token: the logarithm of its perplexity."""
    device = pair.target.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    with Loan(pair.target):
        logits = pair.target(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return float(-logprobs.gather(1, ids[0, len(prompt) :, None]).mean())
