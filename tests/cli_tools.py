"""For tests of the command line: a tiny model in a folder, and commands run in this process."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftgraph.cli import main

TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT = "the cat sat on the mat and the cat sat on"


class Done(NamedTuple):
    status: int
    out: str
    err: str


class Runner:
    """Runs `draftgraph ARGUMENTS` in this process, with none of the user's settings."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch
        for name in os.environ:
            if name.startswith("DRAFTGRAPH_") and name not in ("DRAFTGRAPH_CACHE", "DRAFTGRAPH_OFFLINE"):
                monkeypatch.delenv(name)

    def __call__(self, *arguments: object, stdin: bytes = b"") -> Done:
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self.capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Done(status, *self.capsys.readouterr())


def refused(done: Done, *words: str, status: int = 2) -> None:
    """One line on stderr, nothing on stdout."""
    assert (done.status, done.out) == (status, ""), done
    assert done.err.startswith("draftgraph: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err


def save_tiny_model(folder: Path, alphabet: list[str] | None = None) -> Path:
    """A random Llama that never ends an answer by itself, with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = alphabet or pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([PROMPT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=TEMPLATE)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), **shape, max_position_embeddings=65536, eos_token_id=None)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0 if weight.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_window(folder: Path, copy: Path, window: int) -> Path:
    """A copy of a model with another context window."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": window}
    (copy / "config.json").write_text(json.dumps(config))
    return copy
