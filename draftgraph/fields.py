"""What becomes of every field of `GenerationConfig`: honoured, without effect, or refused by name."""

from __future__ import annotations

from typing import Any

HONOURED = frozenset(
    (
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "guidance_scale",
        "watermarking_config",
        "num_return_sequences",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "pad_token_id",
        "eos_token_id",
        "prefill_chunk_size",
        "use_cache",
    )
)
# With a prompt, and without beams or an assistant, these change nothing, here as in `generate`.
WITHOUT_EFFECT = frozenset(
    (
        "bos_token_id",
        "decoder_start_token_id",
        "early_stopping",
        "length_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
        "compile_config",
        "disable_compile",
    )
)
REFUSED = {
    "num_beams": "draftgraph decodes one beam",
    "num_beam_groups": "draftgraph decodes one beam",
    "diversity_penalty": "draftgraph decodes one beam",
    "constraints": "draftgraph decodes one beam",
    "force_words_ids": "draftgraph decodes one beam",
    "penalty_alpha": "contrastive search is another method",
    "low_memory": "contrastive search is another method",
    "dola_layers": "DoLa is another method",
    "prompt_lookup_num_tokens": 'mode="auto" copies from the text by itself',
    "assistant_early_exit": "pass a draft model instead",
    "speculation_type": "draftgraph has its own drafting: see GraphConfig",
    "use_mtp": "draftgraph has its own drafting: see GraphConfig",
    "is_assistant": "draftgraph decodes a target, not an assistant",
    "token_healing": "heal the prompt with target.heal_tokens before generating",
    "cache_implementation": "draftgraph keeps its own cache",
    "cache_config": "draftgraph keeps its own cache",
    "max_cache_len": "draftgraph keeps its own cache",
    "continuous_batching_config": "draftgraph keeps its own cache",
    "output_attentions": "a token graph has no attention matrix of the text",
    "output_hidden_states": "only logits and scores are kept: output_logits, output_scores",
}
# Arguments of `generate` that are not fields, and that would silently be something else here.
OTHER_METHODS = frozenset(
    (
        "assistant_model",
        "assistant_tokenizer",
        "custom_generate",
        "inputs_embeds",
        "position_ids",
        "past_key_values",
    )
)
UNSET_BY_GENERATE = ("cache_implementation", "hybrid")  # stands in the files of older models


def setting(name: str, model: Any, arguments: dict[str, Any]) -> Any:
    """A field as `generate` finds it: a keyword, else the given configuration's, else the model's own."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)
