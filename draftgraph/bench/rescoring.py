"""Scores a text again with the same weights in float32: what is rounding, and what is wrong?"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftgraph import private
from draftgraph.bench.sameness import STEPS_OF_A_TIE, Gaps
from draftgraph.choose import Prefix, process
from draftgraph.decoder import Decoding
from draftgraph.engine.borrowing import Loan, unwrapped
from draftgraph.models.draft import is_plain

HALF = (torch.float16, torch.bfloat16)


def can_rescore(model: Any) -> bool:
    """Weights in half precision, and all of them there: not quantised, not waiting on another device."""
    return model.dtype in HALF and all(is_plain(weight) and not weight.is_meta for weight in model.parameters())


def rescored(decoding: Decoding, tokens: Sequence[int] | None = None) -> Gaps:
    """The gaps of tokens behind the prompt of a decoding: its own, or those of another mode.

    The score of a token is what its choice looks at: the processed logit, with the keyed noise where it is sampled.
    Top-p and the like remove tokens by a limit that rounding moves, so a token at the limit has no gap of its own: a
    chosen one that is removed in float32 is not the best, and counts with its logit over the temperature; a better one
    that would be removed if its logit were lower by what makes a tie (see `sameness`) is passed over.
    """
    tokens = decoding.new_tokens if tokens is None else tokens
    length = decoding.prefix.padding + decoding.prompt_length
    prompt = decoding.prefix.ids[:, :length]
    logits = float32_logits(decoding.engines.target.model, prompt[:, decoding.prefix.padding :], tokens)
    prefix = Prefix.of(prompt, length + len(tokens), decoding.prefix.padding)
    gaps = []
    for row, token in zip(logits, tokens, strict=True):
        gaps.append(gap_of(decoding, row, token, prefix))
        prefix.append(token)
    return Gaps.of_all(gaps)


def gap_of(decoding: Decoding, logits: Tensor, token: int, prefix: Prefix) -> Gaps:
    raw, processed = process(decoding.request.processors, logits, prefix)
    noise = torch.zeros_like(raw[0], dtype=torch.float64)
    if decoding.noise is not None:
        noise = decoding.noise.gumbel(prefix.position, len(noise), noise.device)
        decoding.noise.forget_before(prefix.position)
    temperature = decoding.request.temperature
    step = torch.finfo(decoding.engines.target.model.dtype).eps * abs(float(raw.max()))
    scores = processed[0].double() + noise
    chosen = float(scores[token])
    if chosen == float(scores.max()):
        return Gaps(1, step=step / temperature)
    if chosen == -torch.inf:
        chosen = float(raw[0, token] / temperature + noise[token])
    tie = STEPS_OF_A_TIE * step
    order = scores.argsort(descending=True).tolist()  # the last one is the chosen token or one that is removed
    best = next(one for one in order if float(scores[one]) <= chosen or stays(decoding, raw, one, tie, prefix))
    gap = max(0.0, float(scores[best]) - chosen)
    return Gaps(1, 1, gap, gap, step / temperature)


def stays(decoding: Decoding, raw: Tensor, token: int, amount: float, prefix: Prefix) -> bool:
    """Whether the processors would keep a token even if its logit were lower by so much."""
    lowered = raw[0].clone()
    lowered[token] -= amount
    return bool(process(decoding.request.processors, lowered, prefix)[1][0, token] > -torch.inf)


def float32_logits(model: Any, prompt: Tensor, tokens: Sequence[int]) -> Tensor:
    """What the weights say in float32 at the places of tokens behind a prompt [1, length]. # [tokens, vocabulary]"""
    device = model.get_input_embeddings().weight.device
    new = torch.tensor([tokens[:-1]], dtype=torch.long, device=device)
    ids = torch.cat([prompt.to(device), new], dim=1)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
    parameters = inspect.signature(unwrapped(model).forward).parameters
    if "position_ids" in parameters:  # some models have a default of their own
        arguments["position_ids"] = torch.arange(ids.shape[1], device=device)[None]
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = len(tokens)
    with Loan(model), exact_products(), InFloat32():
        logits: Tensor = model(**arguments).logits[0, -len(tokens) :]
    return logits


class InFloat32(TorchFunctionMode):
    """While entered, tensors in half precision are read as float32. Each operation is given its weights in float32 as
    it needs them, so that there is never a second copy of a model, and nothing of the model is changed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) == "__get__":  # a weight is not converted to be asked for its shape
            return raised_type(func(*args))
        args, kwargs = private.tree_map(raised, (args, kwargs or {}))
        return func(*args, **kwargs)


def raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else raised_type(value)


def raised_type(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 as it is: not rounded to TF32 or less, whatever the user allows elsewhere."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
