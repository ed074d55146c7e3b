"""What passes cost, measured, and so how much of a graph is worth drafting and checking."""

from draftgraph.config import CostModel
from draftgraph.cost.budget import FlatCost
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost

__all__ = ["CostModel", "Curve", "FlatCost", "Latencies", "MeasuredCost"]
