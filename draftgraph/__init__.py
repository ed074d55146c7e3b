"""Graph-structured speculative decoding: the answer of a large language model, faster and unchanged.

Examples:
    >>> import draftgraph
    >>> pair = draftgraph.load()
    >>> answer = pair.generate("Why is the sky blue?", max_new_tokens=16).text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from draftgraph.config import CostModel, GraphConfig
    from draftgraph.decoder import GraphDecoder, GraphOutput
    from draftgraph.distillation import distill
    from draftgraph.errors import DraftGraphError, LoadError, UnsupportedModelError, UsageError
    from draftgraph.graph import TokenGraph, TokenTree
    from draftgraph.hook import custom_generate
    from draftgraph.pair import Output, Pair, load
    from draftgraph.stats import Stats

_HOME = {
    "config": ("CostModel", "GraphConfig"),
    "decoder": ("GraphDecoder", "GraphOutput"),
    "distillation": ("distill",),
    "errors": ("DraftGraphError", "LoadError", "UnsupportedModelError", "UsageError"),
    "graph": ("TokenGraph", "TokenTree"),
    "hook": ("custom_generate",),
    "pair": ("Output", "Pair", "load"),
    "stats": ("Stats",),
}

__all__ = [
    "CostModel",
    "DraftGraphError",
    "GraphConfig",
    "GraphDecoder",
    "GraphOutput",
    "LoadError",
    "Output",
    "Pair",
    "Stats",
    "TokenGraph",
    "TokenTree",
    "UnsupportedModelError",
    "UsageError",
    "custom_generate",
    "distill",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: `import draftgraph` alone loads neither torch nor transformers."""
    if name in ("bench", "profile"):
        return import_module(f"draftgraph.{name}")
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"draftgraph.{module}"), name)
    raise AttributeError(f"module 'draftgraph' has no attribute {name!r}")
