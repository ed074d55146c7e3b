"""Makes a draft for a target: prompts, the target's own answers to them, a student cut from it, distillation."""

from typing import TYPE_CHECKING, Any

from draftgraph.distillation.distilling import distill
from draftgraph.distillation.recipe import Recipe

if TYPE_CHECKING:
    from draftgraph.distillation.making import Distilled

__all__ = ["Distilled", "Recipe", "distill"]


def __getattr__(name: str) -> Any:
    """Imports on first use: what is wrong with a command is said without torch."""
    if name == "Distilled":
        from draftgraph.distillation.making import Distilled

        return Distilled
    raise AttributeError(f"module 'draftgraph.distillation' has no attribute {name!r}")
