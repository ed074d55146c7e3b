"""Makes a draft for a target: prompts, the target's own answers to them, a student cut from it, distillation."""

from draftgraph.distillation.distilling import distill
from draftgraph.distillation.progress import Distilled
from draftgraph.distillation.recipe import Recipe

__all__ = ["Distilled", "Recipe", "distill"]
