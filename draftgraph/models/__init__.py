"""Models: found, fetched, converted and loaded."""

from draftgraph.files import cache_dir
from draftgraph.models.load import load_model, other_tokens

__all__ = ["cache_dir", "load_model", "other_tokens"]
