"""Many sequences at once: every step checks the graphs of all of them in one pass, and each gets the tokens that it
would get alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftgraph.batching.job import Job, Progress

if TYPE_CHECKING:
    from draftgraph.batching.batch import Batch
    from draftgraph.batching.scheduler import Limits, Scheduler

__all__ = ["Batch", "Job", "Limits", "Progress", "Scheduler"]


def __getattr__(name: str) -> Any:
    """Imports on first use what needs torch, which whoever only sends jobs does without."""
    if name not in __all__:
        raise AttributeError(f"module 'draftgraph.batching' has no attribute {name!r}")
    return getattr(import_module("draftgraph.batching.scheduler"), name)
