"""Tiny randomly initialised models of many families, and drafts that are perturbed copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCAB = 24
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MHA = SMALL | {"num_key_value_heads": 4}


def _phi3() -> Any:
    return tf.Phi3Config(**SMALL | {"original_max_position_embeddings": 4096}, sliding_window=None)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=9),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen2_window": lambda: tf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=8),
    "gemma2": lambda: tf.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, final_logit_softcapping=30.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, sliding_window_pattern=2
    ),
    "phi3": _phi3,
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=2400,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2400,
        word_embed_proj_dim=32,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "falcon": lambda: tf.FalconConfig(
        tie_word_embeddings=False,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "stablelm": lambda: tf.StableLmConfig(**SMALL),
    "cohere": lambda: tf.CohereConfig(**SMALL),
    "granite": lambda: tf.GraniteConfig(**SMALL),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "bloom": lambda: tf.BloomConfig(
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


# Tried lightly: other kinds of positions, caches and layers.
MORE_FAMILIES: dict[str, Callable[[], Any]] = {
    "llama4": lambda: tf.Llama4TextConfig(
        **SMALL, head_dim=8, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=48, floor_scale=16
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **MHA,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **SMALL, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN_ROPE
    ),
    "cohere2": lambda: tf.Cohere2Config(**SMALL, sliding_window=5),
    "gptj": lambda: tf.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        rotary_dim=4,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "bart": lambda: tf.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=512,
        is_decoder=True,
        is_encoder_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=0,
    ),
}


def target_of(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, sharpness: float = 3.0) -> Any:
    """A model with something to say: random weights, logits spread so that some tokens are likely and some are not."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config((FAMILIES | MORE_FAMILIES)[family]()).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
        probe = torch.randint(0, VOCAB, (1, 64), generator=torch.Generator().manual_seed(seed))
        model.get_output_embeddings().weight.mul_(sharpness / model(probe).logits.std())
    return model


def perturbed(model: Any, amount: float = 0.15, seed: int = 1) -> Any:
    """A draft that mostly agrees: the same model with noise on its weights."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight)
            weight.add_(noise * weight.std(unbiased=False) * amount)
    return draft
