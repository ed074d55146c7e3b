"""Large batches: every row is continued as if it were alone."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCAB, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.distillation.sampler import Sampler
from draftgraph.noise import KeyedNoise

PROMPTS = [[1 + (7 * row + 3 * place) % (VOCAB - 1) for place in range(2 + row // 2 * 3)] for row in range(6)]
STOPS = frozenset({5, 11, 17})


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_are_continued_as_if_alone(family: str) -> None:
    target = target_of(family)
    answers = Sampler(target, STOPS, batch_size=4).continue_texts(PROMPTS, 20)
    decoder = GraphDecoder(target, config=GraphConfig(mode="off"))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        alone = decoder.generate(torch.tensor([prompt]), max_new_tokens=20, eos_token_id=list(STOPS), do_sample=False)
        assert answer == alone.sequences[0, len(prompt) :].tolist()


def test_keyed_noise_gives_the_text_of_keyed_decoding() -> None:
    target = target_of("llama")
    noises = [KeyedNoise(seed) for seed in range(len(PROMPTS))]
    answers = Sampler(target, STOPS).continue_texts(
        PROMPTS, 40, 0.9, noise=lambda row, position: noises[row].gumbel(position, VOCAB, torch.device("cpu"))
    )
    decoder = GraphDecoder(target, config=GraphConfig(mode="off"))
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        arguments = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.9, "top_k": 0, "seed": seed}
        alone = decoder.generate(torch.tensor([prompt]), eos_token_id=list(STOPS), **arguments)
        assert answer == alone.sequences[0, len(prompt) :].tolist()


def test_greedy_and_sampled_rows_share_a_batch_and_a_seed_repeats_them() -> None:
    sampler = Sampler(target_of("llama"), STOPS)
    heat = [0.0, 1.0] * 3
    first, again = (sampler.continue_texts(PROMPTS, 30, heat, seed=3) for _ in range(2))
    other = sampler.continue_texts(PROMPTS, 30, heat, seed=4)
    greedy = sampler.continue_texts(PROMPTS, 30)
    assert first == again != other
    assert first[::2] == greedy[::2] == other[::2]
    assert len({len(answer) for answer in first}) > 1, "some row should have stopped early"


def test_the_model_is_left_as_it_was() -> None:
    target = target_of("llama").train()
    before = target.config._attn_implementation
    Sampler(target, STOPS).continue_texts(PROMPTS, 4)
    assert target.training and target.config._attn_implementation == before
