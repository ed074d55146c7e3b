"""What a measurement holds for: these models, on this device, with these libraries."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import transformers

from draftgraph import __version__, private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.runner import Engine
from draftgraph.hardware import available_cores, device_name, digest

FORMAT = 1
NAMES = ("_name_or_path", "transformers_version", "draftgraph_token_map")  # tell weights apart, not what they cost

Key = dict[str, Any]
_sizes: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()  # looked at once


def key_of(target: tuple[Any, Engine], draft: tuple[Any, Engine] | None) -> Key:
    """Two measurements with one key may stand for each other."""
    return {
        "format": FORMAT,
        "draftgraph": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(target[1].device),
        "threads": torch.get_num_threads(),
        "cores": available_cores(),
        "float32": torch.get_float32_matmul_precision(),
        "target": identity(*target),
        "draft": None if draft is None else identity(*draft),
    }


def identity(model: Any, engine: Engine) -> dict[str, str]:
    """A model by its architecture, sizes and number formats; retrained, it is the same one."""
    inner = unwrapped(model)
    if model not in _sizes:
        settings = {name: value for name, value in inner.config.to_dict().items() if name not in NAMES}
        weights = [*model.named_parameters(), *model.named_buffers()]
        formats = [(name, type(one.data).__name__, list(one.shape), one.dtype, one.device) for name, one in weights]
        _sizes[model] = {"settings": digest(settings), "weights": digest(formats)}
    return {
        "class": type(inner).__name__,
        "engine": f"{type(engine).__name__}{'' if engine.branching else ', chains'}",
        "attention": str(private.attention_of(inner.config)),
        "dtype": str(inner.dtype),
    } | _sizes[model]
