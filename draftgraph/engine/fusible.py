"""What a kernel may stand for: found by what it is made of, proved on random numbers. No family is known by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from draftgraph.kernels import fused
from draftgraph.kernels.fused import ACTIVATIONS, NORM_STYLES, NormStyle

EPSILONS = ("variance_epsilon", "eps")
PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
ROTARY = "apply_rotary_pos_emb"
SCALES = (1e-3, 1e-2, 1.0, 30.0)  # of rows; under the smallest an epsilon counts

Way = TypeVar("Way")


def is_untouched(module: nn.Module) -> bool:
    """Whether it does what its class says, with one tensor."""
    forward, hooked = plain_forward(module), module._forward_hooks or module._forward_pre_hooks
    takes_one = forward is not None and len(inspect.signature(forward).parameters) == len(("self", "states"))
    return takes_one and not hooked and "forward" not in vars(module)


def plain_forward(module: nn.Module) -> Any:
    forward = inspect.unwrap(type(module).forward)
    return forward if inspect.isfunction(forward) else None


def epsilon(module: nn.Module) -> float | None:
    return next((vars(module)[name] for name in EPSILONS if isinstance(vars(module).get(name), float)), None)


def norm_style(module: nn.Module) -> NormStyle | None:
    """What kind of RMSNorm this is, if it is one."""
    weight, eps = getattr(module, "weight", None), epsilon(module)
    if "RMSNorm" not in type(module).__name__ or type(weight) is not nn.Parameter or weight.dim() != 1 or eps is None:
        return None
    states = numbers(weight, len(SCALES), *weight.shape) * torch.tensor(SCALES).to(weight)[:, None]
    other = numbers(weight, *weight.shape, seed=1)  # a new module's weights are alike, and hide what is done with them

    def own() -> Tensor:
        trial: Any = deepcopy(module)
        trial.weight.copy_(other)
        return trial.forward(states)  # type: ignore[no-any-return]

    return nearest(own, NORM_STYLES, lambda style: fused.rms_norm(states, other, eps, style))


def gate_activation(module: nn.Module, like: Tensor) -> str | None:
    """The activation of a gated MLP, if this is one. Its linear layers may be of any kind: they are called as ever."""
    children = dict(module.named_children())
    names = next((names for names in PROJECTIONS if names <= children.keys()), set())
    others = [child for name, child in children.items() if name not in names]
    if not names or len(others) != 1 or not is_untouched(others[0]) or list(others[0].parameters()):
        return None
    gate, up = 4 * numbers(like, 4, 512), numbers(like, 4, 512, seed=1)
    said = {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat([gate, up], dim=-1), "down_proj": None}

    def own() -> Tensor:
        trial = deepcopy(module, {id(children[name]): StandIn(said[name]) for name in names})
        return trial.forward(gate)  # type: ignore[no-any-return]

    return nearest(own, tuple(ACTIVATIONS), lambda activation: fused.gated(gate, up, activation))


class StandIn(nn.Module):
    """Says always the same, or what it hears."""

    def __init__(self, said: Tensor | None) -> None:
        super().__init__()
        self.said = said

    def forward(self, heard: Tensor) -> Tensor:
        return heard if self.said is None else self.said


def rotary_namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Of the modeling files whose `apply_rotary_pos_emb` a pass calls."""
    codes = [(forward.__globals__, forward.__code__) for forward in map(plain_forward, model.modules()) if forward]
    return list({id(names): names for names, code in codes if ROTARY in code.co_names and ROTARY in names}.values())


def is_plain_rotary(own: Callable[..., Any], like: Tensor) -> bool:
    """Whether it turns halves of whole heads."""
    query, key = (numbers(like, 1, 5, heads, 16).transpose(1, 2) for heads in (3, 2))
    cos, sin = numbers(like, 1, 5, 16, seed=1), numbers(like, 1, 5, 16, seed=2)

    def turned(rotate: Callable[..., Any]) -> Tensor:
        return torch.cat(rotate(query, key, cos, sin), dim=1)

    return nearest(lambda: turned(own), (fused.rotate,), turned) is not None


def nearest(own: Callable[[], Tensor], ways: tuple[Way, ...], compute: Callable[[Way], Tensor]) -> Way | None:
    """The way that gives the model's own numbers, but for rounding."""
    try:
        expected = own()
        found = [compute(way) for way in ways]
    except Exception:  # it wants something else, so it is something else
        return None
    if not isinstance(expected, Tensor) or expected.dtype != found[0].dtype or expected.shape != found[0].shape:
        return None
    exact = expected.double()
    rounding = 2 * torch.finfo(expected.dtype).eps * exact.abs()
    rounding += 4 * torch.finfo(torch.float32).eps * exact.abs().amax(-1, keepdim=True)  # where large numbers cancel
    errors = [(one.double() - exact).abs() for one in found]
    best = min(range(len(ways)), key=lambda place: float(errors[place].sum()))
    return ways[best] if bool((errors[best] <= rounding).all()) else None


def numbers(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Random ones that leave the user's random state alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)
