"""Measures: how good a draft is for a target, how fast the modes are, and which settings of mode `graph` are fastest.

>>> pair = draftgraph.load(draft="my-draft")                                    # doctest: +SKIP
>>> draftgraph.bench.bench_draft(pair, {"sky": ["Why is the sky blue?"]})       # doctest: +SKIP
>>> draftgraph.bench.bench_run(pair, {"sky": ["Why is the sky blue?"]}, "out")  # doctest: +SKIP
>>> draftgraph.bench.bench_load(pair, {"sky": ["Why is the sky blue?"]}, "load")  # doctest: +SKIP
>>> draftgraph.bench.search(pair, {"sky": ["Why is the sky blue?"]}, "search").best.setting    # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftgraph.bench.draft import DraftReport, bench_draft
    from draftgraph.bench.inflation import Shape, inflate
    from draftgraph.bench.load import bench_load
    from draftgraph.bench.load_report import LoadReport
    from draftgraph.bench.searching import search
    from draftgraph.bench.speed import bench_run
    from draftgraph.bench.speed_report import SpeedReport

__all__ = [
    "DraftReport",
    "LoadReport",
    "Shape",
    "SpeedReport",
    "bench_draft",
    "bench_load",
    "bench_run",
    "inflate",
    "search",
]
_HOME = {
    "draft": ("DraftReport", "bench_draft"),
    "inflation": ("Shape", "inflate"),
    "load": ("bench_load",),
    "load_report": ("LoadReport",),
    "searching": ("search",),
    "speed": ("bench_run",),
    "speed_report": ("SpeedReport",),
}


def __getattr__(name: str) -> Any:
    """Imports on first use: tasks and reports are read without torch."""
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"draftgraph.bench.{module}"), name)
    raise AttributeError(f"module 'draftgraph.bench' has no attribute {name!r}")
