"""What all heads share: the model class that our engines run, its output, its masks, and what its target lends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import ModelOutput

from draftgraph import private
from draftgraph.errors import UsageError
from draftgraph.models.draft import lend_output_rows, lent_embedding, spread, text_config

FEW_LAYERS = 8  # of a target: below, the states that heads read elsewhere are the same ones twice, or do not exist
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


@dataclass
class HeadOutput(ModelOutput):
    logits: Tensor | None = None  # [1, nodes, columns]
    states: Tensor | None = None  # [1, nodes, hidden]: in place of the target's, one level deeper
    past_key_values: Any = None


class Head(PreTrainedModel):
    """A draft that reads hidden states of its target: kinds of heads say what `compute` does."""

    config_class = None
    base_model_prefix = ""
    kind: str
    width: int  # columns of a row of `states`
    embed_tokens: nn.Module
    lm_head: nn.Module

    @property
    def reads(self) -> tuple[int, ...]:
        """The i of the target's hidden states h[i] that are concatenated for `project`."""
        return tuple(self.config.reads)

    def project(self, states: Tensor) -> Tensor:
        """Rows that `forward` takes, of the target's states.

        # [nodes, len(reads) * target's hidden] -> [nodes, width]
        """
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        states: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> HeadOutput:
        """`states` [1, nodes, width]: rows of `project` for the text, `states` of a level before, or zeros for nodes of
        a block; None: all zeros."""
        embeds = self.get_input_embeddings()(input_ids)
        given = embeds.new_zeros((*embeds.shape[:-1], self.width)) if states is None else states.to(embeds.dtype)
        kwargs.pop("return_dict", None)
        told = position_ids, past_key_values, attention_mask, use_cache
        normed, handed_on, cache = self.compute(embeds, given, *told, **kwargs)
        return HeadOutput(self.lm_head(normed[:, kept_rows(logits_to_keep)]), handed_on, cache)

    def compute(
        self,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor | None,
        cache: Any,
        mask: Any,
        use_cache: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        """What the output matrix reads, what the next level does, and the cache."""
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


private.allow_any_attention(Head)


def kinds_of(config: Any) -> list[str]:
    """The kind of attention of each layer."""
    count: int = config.num_hidden_layers
    return list(getattr(config, "layer_types", None) or ["full_attention"] * count)[:count]


def masks_of(config: Any, embeds: Tensor, mask: Any, cache: Any, positions: Tensor) -> list[Any]:
    """The mask of each layer: the one given, by kinds of layers or for all, or a causal one."""
    kinds, masks = kinds_of(config), mask
    if not isinstance(mask, dict):
        made = {"config": config, "inputs_embeds": embeds, "attention_mask": mask}
        made |= {"past_key_values": cache, "position_ids": positions}
        masks = {kind: MASKS[kind](**made) for kind in set(kinds)}
    return [masks[kind] for kind in kinds]


def in_place(
    config: Any, embeds: Tensor, positions: Tensor | None, cache: Any, mask: Any, use_cache: bool
) -> tuple[Any, Tensor, list[Any]]:
    """The cache, the positions and the mask of each layer: those given, or for nodes behind all that is cached."""
    if use_cache and cache is None:
        cache = DynamicCache(config=config)
    if positions is None:
        known = 0 if cache is None else cache.get_seq_length()
        positions = (torch.arange(embeds.shape[1], device=embeds.device) + known)[None]
    return cache, positions, masks_of(config, embeds, mask, cache, positions)


def kept_rows(logits_to_keep: Any) -> Any:
    """Of which nodes logits are asked for, as transformers understands it."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def layers_like(of: Any, layers: int) -> dict[str, Any]:
    """The configuration of so many decoder layers as wide as those of a target, and with its rotary embedding, if that
    is a plain one."""
    found = {
        "vocab_size": of.vocab_size,
        "hidden_size": of.hidden_size,
        "intermediate_size": of.intermediate_size,
        "num_attention_heads": of.num_attention_heads,
        "num_key_value_heads": getattr(of, "num_key_value_heads", None) or of.num_attention_heads,
        "head_dim": getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads,
        "max_position_embeddings": of.max_position_embeddings,
        "rms_norm_eps": getattr(of, "rms_norm_eps", 1e-6),
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
        "target_hidden_size": of.hidden_size,
    }
    rope = getattr(of, "rope_parameters", None)
    plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default" and "rope_theta" in rope
    if isinstance(rope, dict) and plain and rope.get("partial_rotary_factor", 1) == 1:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return found


def few_reads(count: int, layers: int) -> list[int]:
    """States of a target with few layers, from the first layer's to the last but one's.

    >>> few_reads(3, 4)
    [1, 2, 3]
    """
    return [1 + place for place in spread(count, max(1, layers - 1))]


def bare_head(kind: type[Any], config: Any, target: Any, token_map: Tensor | None = None) -> Any:
    """A head in the target's dtype and place, around its embedding and its output rows for the tokens of the map; its
    own weights are random."""
    attention = private.attention_of(text_config(target.config)) or "sdpa"
    head = private.new_model(kind, config, target.dtype, attention)
    head.set_input_embeddings(lent_embedding(target))
    lend_output_rows(head, target, token_map)
    return head.to(target.get_input_embeddings().weight.device)


def fill(where: str, head: Any, tensors: dict[str, Tensor], lent: set[str], named: Callable[[str], str] = str) -> None:
    """Copies tensors into a head, its lent parts apart, and refuses what does not fit, by name. `where`: what holds the
    tensors; `named`: what they are called there."""
    given = {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    own = {name: value for name, value in head.state_dict().items() if name.partition(".")[0] not in lent}
    missing, extra = [name for name in own if name not in given], [name for name in given if name not in own]
    resized = [name for name in own if name in given and own[name].shape != given[name].shape]
    refuse_misfits(where, map(named, missing), map(named, extra), map(named, resized))
    for name, value in own.items():
        value.copy_(given[name])


def refuse_misfits(where: str, missing: Iterable[str], extra: Iterable[str], resized: Iterable[str]) -> None:
    """Tensors that are not there, left over or of another shape."""
    for what, found in (("lacks", missing), ("has unknown tensors:", extra), ("has another size of", resized)):
        if names := list(found):
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise UsageError(f"{where} {what} {', '.join(names[:4])}{more}: copy or convert it again")
