"""Measures: how good a draft is for a target.

>>> pair = draftgraph.load(draft="my-draft")                                    # doctest: +SKIP
>>> draftgraph.bench.bench_draft(pair, {"sky": ["Why is the sky blue?"]})       # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftgraph.bench.draft import bench_draft
    from draftgraph.bench.inflation import Shape, inflate
    from draftgraph.bench.report import DraftReport

__all__ = ["DraftReport", "Shape", "bench_draft", "inflate"]


def __getattr__(name: str) -> Any:
    """Imports on first use: tasks and reports are read without torch."""
    if name == "bench_draft":
        from draftgraph.bench.draft import bench_draft

        return bench_draft
    if name == "DraftReport":
        from draftgraph.bench.report import DraftReport

        return DraftReport
    if name in ("Shape", "inflate"):
        from draftgraph.bench import inflation

        return getattr(inflation, name)
    raise AttributeError(f"module 'draftgraph.bench' has no attribute {name!r}")
