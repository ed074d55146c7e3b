"""Many texts at once: every step checks the graphs of all of them in one pass, and each gets the tokens that it would
get alone."""

from draftgraph.batching.batch import Batch
from draftgraph.batching.job import Job, Progress
from draftgraph.batching.scheduler import Limits, Overloaded, Scheduler
from draftgraph.batching.text import Text

__all__ = ["Batch", "Job", "Limits", "Overloaded", "Progress", "Scheduler", "Text"]
