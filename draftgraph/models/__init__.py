"""Models: found, fetched, converted and loaded."""

from draftgraph.files import cache_dir
from draftgraph.models.load import load_model
from draftgraph.models.tokens import check_same_tokens

__all__ = ["cache_dir", "check_same_tokens", "load_model"]
