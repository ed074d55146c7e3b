"""How long passes take on this machine, measured: what `auto` decides by, and what `draftgraph tune` shows."""

from draftgraph.tuning.latency import Curve, Latencies, MeasuredCost
from draftgraph.tuning.prices import Pricing, measure_pair, measured_pricing, pricing_of

__all__ = ["Curve", "Latencies", "MeasuredCost", "Pricing", "measure_pair", "measured_pricing", "pricing_of"]
