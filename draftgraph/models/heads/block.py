"""DFlash and JetSpec: a head that drafts a block in one pass, behind keys and values of the target's states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from draftgraph import private
from draftgraph.models.draft import text_config
from draftgraph.models.heads.head import FEW_LAYERS, Head, bare_head, few_reads, in_place, layers_like


class BlockAttention(Qwen3Attention):
    """Queries are those of `hidden_states`, keys and values those of `read`."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        read: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(read).view(shape)).transpose(1, 2)
        value = self.v_proj(read).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            private.attention_of(self.config) or "eager", eager_attention_forward
        )
        kwargs |= {"dropout": 0.0, "scaling": self.scaling, "sliding_window": self.sliding_window}
        found, _ = attend(self, query, key, value, attention_mask, **kwargs)
        return self.o_proj(found.reshape(*hidden_states.shape[:-1], -1))  # type: ignore[no-any-return]


class BlockLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = BlockAttention(config, layer), Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, is_text: Tensor, states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, torch.where(is_text, states, normed), **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class BlockHead(Head):
    """A DFlash or JetSpec head. Its configuration is that of its layers with `reads`, `block_size`, `mask_token_id`,
    `causal`, `draft_vocab_size` and `target_hidden_size`."""

    kind = "block"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        read = getattr(config, "target_hidden_size", None) or hidden
        self.width = hidden + 1  # the last column is 1 for rows of the text, 0 for those of the block
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(len(config.reads) * read, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def block_size(self) -> int:
        return int(self.config.block_size)

    @property
    def mask_token_id(self) -> int:
        return int(self.config.mask_token_id)

    @property
    def causal(self) -> bool:
        """Whether a place of the block sees only those before it and itself (JetSpec), or all (DFlash)."""
        return bool(self.config.causal)

    def project(self, states: Tensor) -> Tensor:
        projected = self.hidden_norm(self.fc(states))
        return torch.cat([projected, torch.ones_like(projected[..., :1])], dim=-1)

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
        cache, positions, masks = in_place(self.config, embeds, positions, cache, mask, use_cache)
        text, is_text, hidden = states[..., :-1], states[..., -1:] > 0, embeds
        kwargs |= {"position_embeddings": self.rotary_emb(embeds, positions), "past_key_values": cache}
        for layer, layer_mask in zip(self.layers, masks, strict=True):
            hidden = layer(hidden, is_text, text, attention_mask=layer_mask, **kwargs)
        normed = self.norm(hidden)
        return normed, normed, cache


def spread_reads(layers: int) -> list[int]:
    """Five states evenly from a low one to a high one of a target with so many layers, as DFlash chooses them.

    >>> spread_reads(36)
    [2, 10, 18, 26, 34]
    """
    first, last = 1, layers - 3
    return [round(first + index * (last - first) / 4) + 1 for index in range(5)]


def new_block_head(
    target: Any, block_size: int, mask_token_id: int, layers: int = 1, causal: bool = False, **fields: Any
) -> BlockHead:
    """A head to be trained: random layers as wide as the target's, which lends its embedding and output matrix.
    `fields` go into the configuration: `reads`, `intermediate_size`, ..."""
    of = text_config(target.config)
    count = of.num_hidden_layers
    reads = spread_reads(count) if count >= FEW_LAYERS else few_reads(min(5, max(1, count - 1)), count)
    own = {"reads": reads, "draft_vocab_size": of.vocab_size, "block_size": block_size, "causal": causal}
    config = Qwen3Config(**(layers_like(of, layers) | own | {"mask_token_id": mask_token_id} | fields))
    head: BlockHead = bare_head(BlockHead, config, target)
    return head
