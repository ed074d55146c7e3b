"""What the tests of `transformers` conventions share: one small pair of models, and tokenizers made on the spot."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from families import VOCAB, perturbed, target_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftgraph import GraphConfig, GraphDecoder, GraphOutput

PROMPT = torch.tensor([[3, 7, 1, 9, 4]])
LENGTH = 24
MODES = ("off", "chain", "tree", "graph", "auto")


@cache
def pair() -> tuple[Any, Any]:
    """A target whose greedy text is varied, and a draft that often agrees."""
    target = target_of("gpt2", seed=3)
    return target, perturbed(target, amount=0.05)


@cache
def decoder(mode: str) -> GraphDecoder:
    return GraphDecoder(*pair(), config=GraphConfig(mode=mode))


def decode(mode: str, input_ids: Any = PROMPT, **arguments: Any) -> GraphOutput:
    return decoder(mode).generate(input_ids, **{"max_new_tokens": LENGTH, "do_sample": False} | arguments)


def generate(input_ids: torch.Tensor = PROMPT, **arguments: Any) -> Any:
    """Plain decoding, by `transformers` itself."""
    arguments = {"max_new_tokens": LENGTH, "do_sample": False} | arguments
    arguments.setdefault("attention_mask", torch.ones_like(input_ids))
    return pair()[0].generate(input_ids, **arguments)


@cache
def plain_text() -> list[int]:
    """The new tokens of plain greedy decoding."""
    return generate()[0, PROMPT.shape[1] :].tolist()


def first_after(text: list[int], start: int) -> int:
    """An index, at `start` or later, whose token has not been in the text before."""
    return next(index for index in range(start, len(text)) if text[index] not in text[:index])


@cache
def words() -> PreTrainedTokenizerFast:
    """A word per token of the models: w0 w1 w2 ... Upstream's stop strings need "abcdef" to be a text as well."""
    vocabulary = {f"w{index}": index for index in range(VOCAB)} | {"abcdef": VOCAB}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def letters() -> PreTrainedTokenizerFast:
    """A letter per token of the models, from token 1 on."""
    return pieces_of("abcdefghijklmnopqrstuvw")


@cache
def pieces_of(text: str) -> PreTrainedTokenizerFast:
    """Tokens that are single bytes of this text, so that its longer characters are split; token 0 is special."""
    tokenizer = Tokenizer(models.BPE(vocab={"|": 0} | byte_vocabulary(text), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="|")


def byte_vocabulary(text: str) -> dict[str, int]:
    """ByteLevel's letter for every byte of the text, numbered from 1."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    distinct = dict.fromkeys(letter for piece, _ in letters for letter in piece)
    return {letter: index for index, letter in enumerate(distinct, start=1)}
