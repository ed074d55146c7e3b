"""What is drafted: the token graph, and the token tree that it is unrolled into. Knows nothing of models.

Three of the method's six steps are here: prune (`TokenGraph.prune`), merge (`merge.py`) and flatten (`unroll.py`).
"""

from draftgraph.graph.nodes import NO_TOKEN, ROOT, SOURCES, Bools, Floats, Ints, Source, State
from draftgraph.graph.token_graph import TokenGraph
from draftgraph.graph.unroll import WORD, TokenTree, ancestor_bits

__all__ = [
    "NO_TOKEN",
    "ROOT",
    "SOURCES",
    "WORD",
    "Bools",
    "Floats",
    "Ints",
    "Source",
    "State",
    "TokenGraph",
    "TokenTree",
    "ancestor_bits",
]
