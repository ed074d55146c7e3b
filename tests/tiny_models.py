"""Tiny models with random weights, and what tests of loading ask of them."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parent.parent
SHAPE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


WORDS = ["<unk>", *(f"word{index}" for index in range(299))]


def tiny_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS))


def tokenizer_over(tokens):
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=tokens[0])


def byte_level_tokens():
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĊĊ", "ĠĠ"]


def write_gguf(path, seed=0, kind=gguf.GGMLQuantizationType.Q8_0):
    """A llama of a few thousand weights, quantised, with a byte-level tokenizer and a chat template."""
    tokens = byte_level_tokens()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(seed)

    def add(name, *shape):
        weights = (draw.standard_normal(shape) * 0.2).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), 64)
    add("output.weight", len(tokens), 64)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    for layer in range(2):
        for name, out, into in (
            ("attn_q", 64, 64),
            ("attn_k", 32, 64),
            ("attn_v", 32, 64),
            ("attn_output", 64, 64),
            ("ffn_gate", 96, 64),
            ("ffn_up", 96, 64),
            ("ffn_down", 64, 96),
        ):
            add(f"blk.{layer}.{name}.weight", out, into)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(64, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def one_line_of(error):
    message = str(error.value)
    assert "\n" not in message and ":" in message and len(message) < 500
    return message


def start_python(code, *arguments, stderr=subprocess.PIPE, **environment):
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | environment
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
