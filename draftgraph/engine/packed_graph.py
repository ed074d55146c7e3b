"""What a pass over the nodes of many texts is told, all of it data on the device and none of it a shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedData:
    """Texts that are not there have no nodes."""

    starts: Tensor  # int32 [texts + 1]: text t has the nodes starts[t] to starts[t + 1]
    lengths: Tensor  # int32 [texts]: slots of committed text
    pages: Tensor  # int32 [texts, most pages]: place p of text t is slot pages[t, p // PAGE] * PAGE + p % PAGE
    ancestors: Tensor  # int64 [nodes, words]: bit j says that the node sees place lengths[t] + j of its own text
    positions: Tensor  # int64 [1, nodes]
    scratch_positions: Tensor  # int [texts, words * 64]
    most_nodes: int  # a shape: no text has more nodes than this in a pass of this kind
