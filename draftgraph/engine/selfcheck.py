"""Before a model is trusted with a graph: one small tree against plain forward passes."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.loan import Loan, evaluating, unwrapped
from draftgraph.engine.runner import EagerEngine
from draftgraph.errors import UnsupportedModelError

TEXT_LENGTH = 5
LONGEST_WINDOW = 512  # a smaller window is crossed by the check's text
PARENTS = np.array([-1, 0, 0, 1, 2, 1])  # branches that part at the root and at a child
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 4e-2, torch.bfloat16: 2e-1}
RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "hybrid", "moe_mamba", "ssm")

_engines: weakref.WeakKeyDictionary[Any, tuple[str | None, bool]] = weakref.WeakKeyDictionary()


def checked_engine(model: Any) -> EagerEngine:
    """An engine for a model that passed the check; a model that cannot branch is given chains only."""
    key = (getattr(unwrapped(model).config, "_attn_implementation", None), _adapters(model))
    known = _engines.get(model)
    if known is None or known[0] != repr(key):
        refuse_unrewindable(model)
        _engines[model] = known = (repr(key), _branches(model))
    return EagerEngine(model, branching=known[1])


def refuse_unrewindable(model: Any) -> None:
    """Refuses what cannot work by its nature, with its class and the reason."""
    inner = unwrapped(model)
    name = type(inner).__name__
    if not hasattr(inner, "config") or not hasattr(inner, "generate"):
        raise UnsupportedModelError(
            f"{name} is not a transformers model that can generate: load one with a language head"
        )
    if inner.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder: draftgraph decodes decoder-only models")
    peft = getattr(model, "active_peft_config", None)
    if getattr(peft, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} puts learned prompts before the text: merge or remove them"
        )
    config = inner.config.get_text_config(decoder=True)
    kinds = {kind for kind in getattr(config, "layer_types", None) or [] if any(word in kind for word in RECURRENT)}
    if kinds or getattr(inner, "_is_stateful", False):
        layers = f" ({', '.join(sorted(kinds))} layers)" if kinds else ""
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state{layers} that cannot be rewound to an accepted path"
        )


def _branches(model: Any) -> bool:
    """True: trees are right. False: only chains are. Neither: refused."""
    name = type(unwrapped(model)).__name__
    problem = _tree_problem(model, PARENTS)
    if problem is None:
        return True
    chain_problem = _tree_problem(model, np.arange(-1, 3))
    if chain_problem is None:
        return False
    raise UnsupportedModelError(f"{name} cannot be decoded with a rewindable cache: {chain_problem}")


def _tree_problem(model: Any, parents: Any) -> str | None:
    """What goes wrong with a tree of these parents behind a short text, or None."""
    try:
        tokens, text = _sample_tokens(model, len(parents))
        with Loan(model):
            engine = EagerEngine(model)
            engine.prefill(text)
            depths, visible = _ancestry(parents)
            first = len(parents) // 2  # two passes, so that scratch nodes of an earlier one are seen as well
            scored = [
                engine.forward(tokens[:first], depths[:first], visible[:first, :first]),
                engine.forward(tokens[first:], depths[first:], visible[first:]),
            ]
        tree = torch.cat(scored).double()
        plain = _plain_logits(model, text, tokens, visible).double()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{type(error).__name__}: {reason}"
    return _difference(tree, plain, model.dtype)


def _difference(tree: Tensor, plain: Tensor, dtype: torch.dtype) -> str | None:
    if not torch.isfinite(plain).all():
        return "its logits are not finite"
    off = ((tree - plain).abs().max() / plain.abs().max().clamp_min(1e-6)).item()
    tolerance = TOLERANCE.get(dtype, 2e-1)
    return None if off <= tolerance else f"logits of a token tree are {off:.1e} off those of plain passes"


def _plain_logits(model: Any, text: list[int], tokens: Any, visible: Any) -> Tensor:
    """Of every node, from plain passes over the paths to the leaves."""
    rows: dict[int, Tensor] = {}
    leaves = [node for node in range(len(tokens)) if visible[:, node].sum() == 1]
    with evaluating(model), torch.no_grad():
        for leaf in leaves:
            path = np.flatnonzero(visible[leaf])
            ids = torch.tensor([text + tokens[path].tolist()], device=model.get_input_embeddings().weight.device)
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -len(path) :]
            rows.update(zip(path.tolist(), logits, strict=True))
    return torch.stack([rows[node] for node in range(len(tokens))])


def _sample_tokens(model: Any, nodes: int) -> tuple[Any, list[int]]:
    """Distinct-looking tokens for the tree and its text; the text outgrows any small window of the model."""
    config = unwrapped(model).config.get_text_config(decoder=True)
    rows = model.get_input_embeddings().weight.shape[0]
    windows = [
        value
        for key, value in config.to_dict().items()
        if isinstance(value, int) and ("window" in key or "chunk" in key) and 0 < value <= LONGEST_WINDOW
    ]
    length = max(windows, default=0) + TEXT_LENGTH
    room = getattr(config, "max_position_embeddings", None)
    if isinstance(room, int):
        length = max(1, min(length, room - nodes - 1))
    picks = np.random.default_rng(0).integers(0, rows, length + nodes)
    return picks[length:], picks[:length].tolist()


def _ancestry(parents: Any) -> tuple[Any, Any]:
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        visible[node] |= visible[parent]
    return visible.sum(axis=1) - 1, visible


def _adapters(model: Any) -> Any:
    return getattr(model, "active_adapters", None) if hasattr(model, "peft_config") else None
