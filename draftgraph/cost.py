"""What a pass costs, and so how much of a graph is worth checking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


NODE_PRICES = {"cpu": 0.25, "cuda": 0.0}  # in target passes


@runtime_checkable
class CostModel(Protocol):
    """Decides how much to draft from the price of a verified node."""

    def floor(self) -> float:
        """The least acceptance estimate with which a node is worth a place in the target's pass."""


class FlatCost:
    """Every verified node costs the same share of a target pass, up to the budget of the configuration.

    A node pays when its chance of being accepted is above that share. A GPU checks 64 nodes for the price of
    about one; a CPU is bound by arithmetic and pays for every node.
    """

    def __init__(self, price: float) -> None:
        self.price = price

    @classmethod
    def for_device(cls, device: torch.device) -> FlatCost:
        return cls(NODE_PRICES.get(device.type, 0.0))

    def floor(self) -> float:
        return self.price
