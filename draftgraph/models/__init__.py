"""Models: found, fetched, converted and loaded."""

from draftgraph.files import cache_dir
from draftgraph.models.load import check_same_tokens, load_model

__all__ = ["cache_dir", "check_same_tokens", "load_model"]
