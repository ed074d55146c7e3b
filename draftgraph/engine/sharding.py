"""What this rank holds of a model that is split over ranks, and how its linear layers are computed there.

transformers splits weights by a plan (`tp_plan`) and gives every layer that has a part a forward of its own. In our
passes the products of these parts are those of `kernels.linear`, and sums over ranks are added up in the order of the
ranks: what is computed of a row depends neither on how many rows share its pass nor on how a library sums.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import linear

from draftgraph import private

ROWS_SUMMED = 64  # to see whether they are summed as one is
Product = Callable[[Tensor], Tensor]


def local_part(weight: Tensor) -> Tensor:
    """What lies here of a weight: all of it, where it is not split."""
    part: Tensor = weight.to_local() if is_split(weight) else weight  # type: ignore[attr-defined]
    return part


def is_split(weight: Tensor) -> bool:
    return hasattr(weight, "to_local")


def group_of(model: nn.Module) -> Any:
    """The process group of the ranks that hold a model's parts; None: it is all here."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    split = next((weight for weight in model.parameters() if is_split(weight)), None)
    group = None if split is None else split.device_mesh.get_group()  # type: ignore[attr-defined]
    return None if group is None or dist.get_world_size(group) == 1 else group


def whole(module: Any) -> Any:
    """The module, or a copy with all of its weights where this rank has a part of them. All ranks meet in it."""
    split = {name: weight for name, weight in module.named_parameters(recurse=False) if is_split(weight)}
    if not split:
        return module
    found = copy.copy(module)
    vars(found).pop("forward", None)
    kept = {name: weight for name, weight in module.named_parameters(recurse=False) if name not in split}
    gathered = {name: nn.Parameter(weight.detach().full_tensor(), False) for name, weight in split.items()}
    private.set_parameters(found, kept | gathered)
    return found


def summed(part: Tensor, group: Any) -> Tensor:
    """The sum of what the ranks have, in their order whatever its size; of two numbers there is only one sum."""
    if dist.get_world_size(group) == 2:
        dist.all_reduce(part, group=group)
        return part
    exact = part.dtype if part.dtype == torch.float64 else torch.float32
    total, *others = gathered(part, group)
    total = total.to(exact)
    for other in others:
        total = total + other
    return total.to(part.dtype)


def gathered(part: Tensor, group: Any) -> list[Tensor]:
    """What each rank has."""
    ranks, (first, *others) = dist.get_world_size(group), part.shape
    parts = part.new_empty((ranks * first, *others))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as older releases call it
    gather(parts, part, group=group)
    return list(parts.chunk(ranks))


class EmbeddingPart:
    """The rows of an embedding that lie here: of another token this rank knows nothing, and says zero."""

    def __init__(self, module: nn.Embedding, group: Any) -> None:
        self.module, self._group = module, group
        weight = local_part(module.weight)
        self._first = dist.get_rank(group) * -(-len(module.weight) // dist.get_world_size(group))
        self._rows = len(weight)
        self._part = copy.copy(module)
        vars(self._part).pop("forward", None)
        self._part.padding_idx = None  # it counts all rows, and is for training alone
        private.set_parameters(self._part, {"weight": nn.Parameter(weight.detach(), False)})

    def compute(self, tokens: Tensor) -> Tensor:
        places = tokens - self._first
        here = (places >= 0) & (places < self._rows)
        found = self._part(torch.where(here, places, 0))
        return summed(found.masked_fill(~here[..., None], 0.0), self._group)


class LinearPart:
    """The part of a linear layer that lies here, and how those of all ranks become what the layer gives."""

    def __init__(self, module: nn.Linear, kind: str, group: Any) -> None:
        self.module, self._kind, self._group = module, kind, group
        weight, bias = local_part(module.weight), module.bias
        self.part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.part.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._bias = None if bias is None else local_part(bias).detach()

    @property
    def sums(self) -> bool:
        """Whether its inputs are split: what it computes of them is a part of a sum."""
        return self._kind == "rowwise"

    @property
    def splits(self) -> bool:
        """Whether what it gives is a part of the layer's outputs."""
        return self._kind == "colwise"

    def own(self, whole: Tensor) -> Tensor:
        """Of something along the dimension that is split, last of all: what lies here."""
        size = -(-whole.shape[-1] // dist.get_world_size(self._group))
        first = dist.get_rank(self._group) * size
        return whole[..., first : first + size]

    def total(self, part: Tensor) -> Tensor:
        return summed(part, self._group)

    def plain(self, given: Tensor) -> Tensor:
        return linear(given, self.part.weight)

    def compute(self, product: Product, given: Tensor) -> Tensor:
        """With a way to compute the product with the part."""
        found = product(given).contiguous()
        if self.sums:
            found = self.total(found)
        if self._bias is not None:
            found = found + self._bias
        return found if self._kind != "gathered" else torch.cat(gathered(found, self._group), dim=-1)


def embedding_parts(model: Any) -> list[EmbeddingPart]:
    """Of the embeddings that are split by rows."""
    if (group := group_of(model)) is None:
        return []
    found = [module for module in model.modules() if isinstance(module, nn.Embedding) and is_split(module.weight)]
    by_rows = [module for module in found if module.weight.placements[0].is_shard(0) and module.max_norm is None]  # type: ignore[attr-defined]
    return [EmbeddingPart(module, group) for module in by_rows]


KINDS = {"colwise": "colwise", "rowwise": "rowwise", "colwise_gather_output": "gathered", "colwise_rep": "gathered"}


def linear_parts(model: Any) -> list[LinearPart]:
    """Of the layers whose place in the plan is understood here; others are computed as transformers does it."""
    if (group := group_of(model)) is None:
        return []
    found, plan, ranks = [], model.tp_plan, dist.get_world_size(group)
    for name, module in model.named_modules():
        kind = KINDS.get(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), ""))
        if kind is None or type(module) is not nn.Linear or not is_split(module.weight):
            continue
        if kind != "gathered" or module.out_features % ranks == 0:  # parts of one size
            found.append(LinearPart(module, kind, group))
    return found


def plan_for(text: Any, ranks: int) -> dict[str, str]:
    """The plan of a text model's configuration; without its attention where heads cannot be shared out evenly."""
    plan = getattr(text, "base_model_tp_plan", None) or {}
    whole = attention_is_whole(text, ranks)
    return {name: style for name, style in plan.items() if not (whole and ("attn" in name or "attention" in name))}


def attention_is_whole(text: Any, ranks: int) -> bool:
    """Whether every rank computes all of the attention."""
    heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return any(count % ranks for count in heads)


def leaves_sums_to_library(model: Any) -> bool:
    """Whether layers of other kinds than linear ones and embeddings, such as experts, are split as well."""
    parts: list[Any] = [*linear_parts(model), *embedding_parts(model)]
    ours = {id(one.module) for one in parts}
    split = [module for module in model.modules() if any(map(is_split, module.parameters(recurse=False)))]
    return any(id(module) not in ours for module in split)


def sums_change(group: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library's sum of a row over the ranks has other bits when more rows are summed with it."""
    draw = torch.Generator().manual_seed(dist.get_rank(group))
    rows = torch.randn((ROWS_SUMMED, 1024), generator=draw).to(device, dtype)
    together, alone = rows.clone(), rows.clone()
    dist.all_reduce(together, group=group)
    for row in alone:
        dist.all_reduce(row, group=group)
    return not torch.equal(together, alone)
