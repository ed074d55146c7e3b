"""How long passes take on this machine, measured: what `auto` decides by, and what `draftgraph tune` shows; and which
settings of mode `graph` are fastest.

>>> draftgraph.tuning.search(pair, {"sky": ["Why is the sky blue?"]}, "search").best.setting    # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from draftgraph.tuning.latency import Curve, Latencies, MeasuredCost
from draftgraph.tuning.prices import Pricing, measure_pair, measured_pricing, pricing_of

if TYPE_CHECKING:
    from draftgraph.tuning.searching import search

__all__ = ["Curve", "Latencies", "MeasuredCost", "Pricing", "measure_pair", "measured_pricing", "pricing_of", "search"]


def __getattr__(name: str) -> Any:
    """A search decodes, and decoders need the prices of this package: imported on first use."""
    if name == "search":
        from draftgraph.tuning.searching import search

        return search
    raise AttributeError(f"module 'draftgraph.tuning' has no attribute {name!r}")
