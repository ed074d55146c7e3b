"""The user's modules are only borrowed: whatever a pass needs changed is put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

MASKABLE = ("sdpa", "eager")  # attention implementations that take any mask


def unwrapped(model: Any) -> Any:
    """The `transformers` module inside an adapter's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters(model: Any) -> list[tuple[tuple[str, ...], bool]]:
    """Which adapters take part in a pass, and whether they are switched off: a PEFT layer knows both."""
    layers = (module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool))
    return sorted({(tuple(layer.active_adapters), layer.disable_adapters) for layer in layers})


def fingerprint(model: Any) -> list[Any]:
    """Where its weights lie: a recorded pass reads them there."""
    return [adapters(model), *(weight.data_ptr() for weight in model.parameters())]


class Loan:
    """While entered: no gradients, evaluation mode, attention that takes masks. May be entered again and again."""

    def __init__(self, *models: Any) -> None:
        modules = [module for model in models for module in model.modules()]
        self._training = [module for module in modules if module.training]
        self._attention = [
            (config, config._attn_implementation, replacement)
            for model in models
            for config, replacement in _configs_to_switch(model)
        ]
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._no_grad.__enter__()
        for module in self._training:
            module.training = False
        for config, _, replacement in self._attention:
            config._attn_implementation_internal = replacement

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for config, original, _ in self._attention:
            config._attn_implementation_internal = original
        for module in self._training:
            module.training = True
        self._no_grad.__exit__(kind, error, trace)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, and the training flags of every module as they were after it."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _configs_to_switch(model: Any) -> list[tuple[Any, str]]:
    """Configurations whose attention cannot take a graph's mask, and the implementation to use instead."""
    replacement = "sdpa" if getattr(unwrapped(model), "_supports_sdpa", False) else "eager"
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    implementations = ((config, getattr(config, "_attn_implementation", None)) for config in configs.values())
    return [(config, replacement) for config, name in implementations if name is not None and name not in MASKABLE]
