"""EAGLE-3: a head that drafts level by level from the target's states, then from its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from draftgraph.models.draft import text_config
from draftgraph.models.heads.head import FEW_LAYERS, Head, bare_head, few_reads, in_place, layers_like

LAYERS: dict[str, type[Any]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
CHOICES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of a configuration, all False at first


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the token's embedding beside the state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        layer = LAYERS[config.model_type](config, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = bool(config.norm_before_residual)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=config.attention_bias))

    def forward(self, embeds: Tensor, states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        read = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        states = residual + self.self_attn(hidden_states=read, **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))  # type: ignore[no-any-return]


class StatesHead(Head):
    """An EAGLE-3 head. Its configuration is that of its layers with `reads`, `draft_vocab_size`, `target_hidden_size`
    and CHOICES."""

    kind = "states"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, eps, count = config.hidden_size, config.rms_norm_eps, len(config.reads)
        for name in CHOICES:
            setattr(config, name, bool(getattr(config, name, False)))
        read = getattr(config, "target_hidden_size", None) or hidden
        self.width = hidden
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.input_norm = LlamaRMSNorm(count * read, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(read, eps) for _ in config.reads) if config.fc_norm else None
        self.fc = nn.Linear(count * read, hidden, bias=False)
        later = (LAYERS[config.model_type](config, index) for index in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *later])
        self.norm = LlamaRMSNorm(hidden, eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def project(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)  # type: ignore[no-any-return]

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
        kwargs |= {"position_embeddings": self.rotary_emb(embeds, positions), "position_ids": positions}
        kwargs |= {"past_key_values": cache, "use_cache": use_cache}
        found = self.layers[0](embeds, states, attention_mask=masks[0], **kwargs)
        for layer, layer_mask in zip(self.layers[1:], masks[1:], strict=True):
            found = layer(found, attention_mask=layer_mask, **kwargs)
        normed = self.norm(found)
        return normed, normed if self.config.norm_output else found, cache


def default_reads(layers: int) -> list[int]:
    """A low, a middle and a high state of a target with so many layers, as EAGLE-3 reads them.

    >>> default_reads(32)
    [2, 16, 29]
    """
    return [2, layers // 2, layers - 3]


def new_states_head(target: Any, token_map: Tensor | None = None, layers: int = 1, **fields: Any) -> StatesHead:
    """A head to be trained: random layers as wide as the target's, and its output rows for the tokens of the map (for
    all, without one). `fields` go into the configuration: `reads`, `norm_before_residual`, `intermediate_size`, ..."""
    of = text_config(target.config)
    columns = of.vocab_size if token_map is None else len(token_map)
    count = of.num_hidden_layers
    reads = default_reads(count) if count >= FEW_LAYERS else few_reads(3, count)
    own = {"reads": reads, "draft_vocab_size": columns}
    config = LlamaConfig(**(layers_like(of, layers) | own | fields))
    head: StatesHead = bare_head(StatesHead, config, target, token_map)
    return head
