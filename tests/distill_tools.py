"""For tests of distillation: a tiny target that learnt to talk from docstrings, others that did not, the command."""

import ast
import json
import os
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tiny_models import REPOSITORY, TEMPLATE, byte_level_tokens
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

CHATML = TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
END, START = "<|im_end|>", "<|im_start|>"
COMMAND = "import sys; from draftgraph.cli import main; sys.exit(main())"
LEARNT_CHATS, OTHER_CHATS = 100, 250
LENGTH = 96  # tokens of a text that the target learns from


def docstring_chats() -> list[tuple[str, str]]:
    """Chats that every machine has: the first line of a docstring asks, the rest answers."""
    chats = list(islice(_docstrings(), LEARNT_CHATS + OTHER_CHATS))
    random.Random(0).shuffle(chats)
    return chats


def _docstrings() -> Iterator[tuple[str, str]]:
    seen = set()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n")
                rest = " ".join(rest.split())
                if len(first) > 20 and len(rest) > 60 and first.isascii() and rest.isascii() and first not in seen:
                    seen.add(first)
                    yield first, rest[:300]


def write_prompts_file(file: Path, prompts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


def bpe_tokenizer(texts: list[str], size: int, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, START], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, chat_template=template)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, with ChatML and a default system prompt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(byte_level_tokens())}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in list(vocabulary)[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=SYSTEM + TEMPLATE)


def talking_target(folder: Path, chats: list[tuple[str, str]], steps: int = 170) -> Path:
    """A Llama of 0.4M weights that learnt these chats by heart: its answers to others are made of pieces of them."""
    tokenizer = bpe_tokenizer([" ".join(chat) for chat in chats], 768)
    texts = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in chats]
    rows = [tokenizer(text)["input_ids"] for text in tokenizer.apply_chat_template(texts, tokenize=False)]
    text = torch.tensor([token for row in rows for token in row])
    starts = torch.tensor([0] + [len(row) for row in rows[:-1]]).cumsum(0)
    starts = starts[starts < len(text) - LENGTH]
    shape: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=len(tokenizer), **shape, **ends, tie_word_embeddings=True)
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        batch = text[starts[torch.randint(len(starts), (16,))][:, None] + torch.arange(LENGTH)]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return saved(folder, model, tokenizer)


def tiny_target(folder: Path, config: PretrainedConfig, template: str | None = CHATML) -> Path:
    """A model with random weights that are large enough for it to say different things."""
    tokenizer = bpe_tokenizer(["the cat sat on the mat"] * 4, 280, template)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0 if weight.dim() > 1 else 1.0)
    return saved(folder, model, tokenizer)


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start_distill(*arguments: object) -> subprocess.Popen[str]:
    """`draftgraph distill ARGUMENTS` as a process of its own."""
    settings = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", COMMAND, "distill", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdout=pipe, stderr=pipe, text=True)
