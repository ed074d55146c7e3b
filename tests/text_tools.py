"""Two tiny models with tokenizers of their own, which both know one text."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

KNOWN = (
    "The quick brown fox jumps over the lazy dog 😀 while seven wizards in Zürich bake naïve croissants.\n"
    "  Nobody knows why the moon 🌕 sings, but the children listen every night.  And smile."
)
ENDS = {"bytes": "<|end|>", "pieces": "</s>", "lower": "[END]", "legacy": "</s>", "phrases": "</s>"}


def tokenizer(kind: str, size: int = 400, texts: tuple[str, ...] = (KNOWN,)) -> PreTrainedTokenizerFast:
    """`bytes` writes every text; `pieces` marks spaces and begins with <s>; `lower` knows no capitals and no accents;
    `legacy` puts a space before every text; `phrases` does too, and has tokens of several words."""
    special = [ENDS[kind], "<s>", "<unk>", "<|user|>"]
    if kind == "lower":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    else:
        made = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
        alphabet = []
        if kind == "bytes":
            made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        elif kind == "pieces":
            made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        else:
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            made.decoder = decoders.Sequence(parts)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    made.train_from_iterator([word for text in texts for word in text.split()] if kind == "legacy" else texts, trainer)
    begins = {"bos_token": "<s>"} if kind == "pieces" else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=ENDS[kind], unk_token="<unk>", **begins)


def model_of(words: PreTrainedTokenizerFast, seed: int = 0, window: int = 2048) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    no_ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(words), **shape, **no_ends, max_position_embeddings=window, tie_word_embeddings=True)
    ).eval()


def taught(words: PreTrainedTokenizerFast, seed: int, text: str = KNOWN, steps: int = 70) -> LlamaForCausalLM:
    """A model that knows a text by heart, its end token included."""
    model = model_of(words, seed)
    ids = torch.tensor([[*words(text)["input_ids"], words.eos_token_id]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()
