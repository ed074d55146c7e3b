"""Looking at the graphs of an answer: data, terminal, pictures, page."""

from draftgraph.inspect.report import GraphReport
from draftgraph.inspect.svg import Panel, side_by_side_svg

__all__ = ["GraphReport", "Panel", "side_by_side_svg"]
