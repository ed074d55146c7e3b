"""Sampled text has exactly the target's distribution; its noise depends on seed, sample, position and token only."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from families import SMALL, perturbed
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from draftgraph import GraphConfig, GraphDecoder, UsageError
from draftgraph.choose import KeyedChooser, Outputs, Prefix, RejectionChooser
from draftgraph.noise import ACCEPTANCE, CHOICE, DRAFT, RESIDUAL, KeyedNoise

VOCAB = 6
START = torch.tensor([[2]])
CPU = torch.device("cpu")
UNLIKELY = 1e-3  # seeds are fixed, so a test that passes once passes always
PLAIN: dict[str, Any] = {"do_sample": True}
WARPED: dict[str, Any] = {"do_sample": True, "temperature": 1.6, "top_p": 0.8}


@cache
def tiny_pair() -> tuple[Any, Any]:
    """A target of six tokens, and a draft that disagrees with it noticeably."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
    target = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL | size | heads)).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.mul_(20.0)
    return target, perturbed(target, amount=0.5)


@cache
def exact_chances(length: int, warped: bool) -> dict[tuple[int, ...], float]:
    """The chance of every continuation of this length, by one plain forward pass over each."""
    texts = torch.tensor(list(product(range(VOCAB), repeat=length)))
    ids = torch.cat([START.expand(len(texts), 1), texts], dim=1)
    with torch.no_grad():
        logits = tiny_pair()[0](ids).logits[:, :-1].reshape(-1, VOCAB)
    if warped:
        warpers = [TemperatureLogitsWarper(WARPED["temperature"]), TopPLogitsWarper(WARPED["top_p"])]
        logits = LogitsProcessorList(warpers)(None, logits)
    chances = torch.softmax(logits.double(), dim=-1).reshape(len(texts), length, VOCAB)
    joint = chances.gather(2, texts[:, :, None])[:, :, 0].prod(dim=1)
    return {tuple(text): float(chance) for text, chance in zip(texts.tolist(), joint, strict=True)}


def fit(texts: list[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """The p-value of counts under exact chances; texts expected less than five times are counted together."""
    assert all(chances[text] > 0 for text in texts), "an impossible text was sampled"
    observed = {text: texts.count(text) for text in chances}
    rare = {text for text, chance in chances.items() if chance * len(texts) < 5}
    cells = [(observed[text], chance * len(texts)) for text, chance in chances.items() if text not in rare]
    cells.append((sum(observed[text] for text in rare), sum(chances[text] for text in rare) * len(texts)))
    counts, expected = zip(*(cell for cell in cells if cell[1] > 0), strict=True)
    return float(stats.chisquare(counts, expected).pvalue)


def sampled(decoder: GraphDecoder, length: int, rows: int, seeds: range, **arguments: Any) -> list[tuple[int, ...]]:
    outputs = [
        decoder.generate(START, max_new_tokens=length, num_return_sequences=rows, seed=seed, **arguments)
        for seed in seeds
    ]
    return [tuple(row) for output in outputs for row in output.new_token_ids]


@pytest.mark.parametrize("arguments", [PLAIN, WARPED], ids=["plain", "temperature and top-p"])
def test_plain_sampling_has_the_exact_distribution(arguments):
    decoder = GraphDecoder(*tiny_pair(), config=GraphConfig(mode="off"))
    texts = sampled(decoder, 2, 80, range(10), **arguments)
    chances = exact_chances(2, warped=arguments is WARPED)
    assert fit(texts, chances) > UNLIKELY
    other = exact_chances(2, warped=arguments is PLAIN)
    assert any(other[text] == 0 for text in texts) or fit(texts, other) < UNLIKELY, "the test could not tell"


def test_the_rule_of_choice_has_the_exact_distribution_over_three_tokens():
    with torch.no_grad():
        logits = {
            text: tiny_pair()[0](torch.tensor([[*START[0].tolist(), *text]])).logits[0, -1]
            for length in range(3)
            for text in product(range(VOCAB), repeat=length)
        }
    texts = []
    for sample in range(5000):
        chooser = KeyedChooser(LogitsProcessorList(), KeyedNoise(11, sample), Outputs())
        prefix, text = Prefix.of(START, 4), ()
        for _ in range(3):
            text = (*text, chooser.choose(logits[text], prefix))
            prefix.append(text[-1])
        texts.append(text)
    assert fit(texts, exact_chances(3, warped=False)) > UNLIKELY


def test_the_rule_of_rejection_has_the_exact_distribution():
    """Also that drafting, accepting and choosing again use noise that is independent."""
    p = torch.tensor([0.02, 0.45, 0.03, 0.25, 0.15, 0.10], dtype=torch.float64)
    logits, temperature, position = torch.tensor([[3.0, 0.5, 2.5, 1.0, -1.0, 2.0]]), 1.5, 9
    tokens, accepted = [], 0
    for sample in range(6000):
        chooser = RejectionChooser(LogitsProcessorList(), KeyedNoise(5, sample), temperature, {0: logits[0]})
        drafted = int(chooser.perturb(temperature)(logits, np.array([position])).argmax())
        tokens.append(chooser.choose(p, 0, drafted, position))
        accepted += tokens[-1] == drafted
    assert stats.chisquare(np.bincount(tokens, minlength=VOCAB), len(tokens) * p.numpy()).pvalue > UNLIKELY
    overlap = torch.minimum(p, torch.softmax(logits[0].double() / temperature, dim=-1)).sum().item()
    assert accepted / len(tokens) == pytest.approx(overlap, abs=0.02)


def rejecting(length: int, draft: Any) -> GraphDecoder:
    config = GraphConfig(mode="chain", verification="rejection", chain_length=length)
    return GraphDecoder(tiny_pair()[0], draft, config=config)


@pytest.mark.parametrize("arguments", [PLAIN, WARPED], ids=["plain", "temperature and top-p"])
def test_rejection_sampling_preserves_the_distribution(arguments):
    texts = [text[:2] for text in sampled(rejecting(2, tiny_pair()[1]), 3, 80, range(8), **arguments)]
    assert fit(texts, exact_chances(2, warped=arguments is WARPED)) > UNLIKELY


def test_rejection_sampling_accepts_drafted_tokens_and_rejects_some():
    output = rejecting(4, tiny_pair()[1]).generate(START, max_new_tokens=60, **PLAIN, seed=0)
    assert 1.2 < output.stats.mean_accepted_length < 4.5
    assert output.stats.accepted_by_source["draft"] > 10


def test_rejection_sampling_rejects_nothing_of_a_draft_that_is_the_target():
    output = rejecting(4, tiny_pair()[0]).generate(START, max_new_tokens=20, **PLAIN, temperature=1.3, seed=0)
    assert output.stats.steps == 4


def test_rejection_sampling_of_copied_tokens_preserves_the_distribution_too():
    decoder = rejecting(2, None)
    prompt = torch.tensor([[4, 0, 2]]).repeat(1, 3)
    output = decoder.generate(prompt, max_new_tokens=2, num_return_sequences=600, **PLAIN, seed=3)
    with torch.no_grad():
        chances = torch.softmax(tiny_pair()[0](prompt).logits[0, -1].double(), dim=-1)
    counts = np.bincount([row[0] for row in output.new_token_ids], minlength=VOCAB)
    assert stats.chisquare(counts, 600 * chances / chances.sum()).pvalue > UNLIKELY
    assert decoder.generate(prompt, max_new_tokens=30, **PLAIN, seed=3).stats.accepted_by_source["copied"] > 0


def test_rejection_sampling_decodes_greedily_like_every_mode():
    arguments = {"max_new_tokens": 30, "do_sample": False}
    plain = GraphDecoder(*tiny_pair(), config=GraphConfig(mode="off")).generate(START, **arguments)
    assert rejecting(4, tiny_pair()[1]).generate(START, **arguments).new_token_ids == plain.new_token_ids


@pytest.mark.parametrize("mode", ["off", "tree", "graph", "auto"])
def test_rejection_is_refused_outside_chains(mode):
    with pytest.raises(UsageError, match=rf'verification="rejection".*chain.*mode="{mode}"'):
        GraphConfig(mode=mode, verification="rejection")


@pytest.mark.parametrize("arguments", [PLAIN, WARPED], ids=["plain", "temperature and top-p"])
def test_a_draft_that_is_the_target_foresees_sampled_tokens(arguments):
    """It sees the noise of the choice; without top-p, which it does not see, nothing is left to miss."""
    config = GraphConfig(mode="chain", chain_length=4)
    decoder = GraphDecoder(tiny_pair()[0], tiny_pair()[0], config=config)
    steps = decoder.generate(START, max_new_tokens=20, **arguments, seed=7).stats.steps
    assert steps == 4 if arguments is PLAIN else 4 <= steps < 16


def choices(noise: KeyedNoise, positions: range, stream: int = CHOICE) -> np.ndarray:
    """Which of six equally likely tokens is chosen at each position."""
    return np.array([int(noise.gumbel(at, VOCAB, CPU, stream).argmax()) for at in positions])


def independence(first: np.ndarray, second: np.ndarray) -> float:
    table = np.zeros((VOCAB, VOCAB))
    np.add.at(table, (first, second), 1)
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (7, -7), (5, 5 + 2**32), (123, 123 ^ (1 << 62))])
def test_seeds_are_independent(one, other):
    positions = range(2000)
    assert independence(choices(KeyedNoise(one), positions), choices(KeyedNoise(other), positions)) > UNLIKELY


@pytest.mark.parametrize("distance", [1, 2, 6, 64])
def test_positions_are_independent(distance):
    chosen = choices(KeyedNoise(3), range(2500))
    assert independence(chosen[:-distance], chosen[distance:]) > UNLIKELY


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, 64)])
def test_samples_are_independent(one, other):
    positions = range(2000)
    assert independence(choices(KeyedNoise(9, one), positions), choices(KeyedNoise(9, other), positions)) > UNLIKELY


def test_samples_of_one_seed_are_not_samples_of_the_next():
    """A key that only adds seed and sample would repeat itself along the diagonal."""
    keys = {KeyedNoise(seed, sample).key for seed in range(60) for sample in range(60)}
    assert len(keys) == 3600


def test_streams_are_independent():
    noise, positions = KeyedNoise(4), range(2000)
    chosen = {stream: choices(noise, positions, stream) for stream in (CHOICE, DRAFT, RESIDUAL)}
    for one, other in ((CHOICE, DRAFT), (CHOICE, RESIDUAL), (DRAFT, RESIDUAL)):
        assert independence(chosen[one], chosen[other]) > UNLIKELY
    chances = np.array([float(noise.uniform(at, 1, CPU, ACCEPTANCE)) for at in positions])
    assert abs(np.corrcoef(chances, chosen[DRAFT])[0, 1]) < 4 / np.sqrt(len(chances))


def test_the_noise_of_different_rows_does_not_correlate():
    keys = [(seed, sample, position) for seed in range(3) for sample in range(3) for position in (0, 1, 2, 100)]
    rows = np.stack([KeyedNoise(seed, sample).uniform(position, 4000, CPU) for seed, sample, position in keys])
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / np.sqrt(rows.shape[1])
    shifted = [np.corrcoef(row[:-lag], row[lag:])[0, 1] for row in rows for lag in (1, 2, 3)]
    assert np.abs(shifted).max() < 5 / np.sqrt(rows.shape[1])


def test_the_noise_is_gumbel():
    values = np.concatenate([KeyedNoise(1, 2).gumbel(at, 1000, CPU).numpy() for at in range(20)])
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > UNLIKELY
    uniform = np.concatenate([KeyedNoise(1, 2).uniform(at, 1000, CPU).numpy() for at in range(20)])
    assert stats.kstest(uniform, stats.uniform.cdf).pvalue > UNLIKELY
    assert uniform.min() > 0 and uniform.max() < 1


def test_the_largest_and_smallest_numbers_are_inside_the_unit_interval(monkeypatch):
    monkeypatch.setattr("draftgraph.noise.shift_right", lambda bits, by: torch.full_like(bits, (1 << (64 - by)) - 1))
    assert float(KeyedNoise(0).uniform(0, 1, CPU)) < 1
    monkeypatch.setattr("draftgraph.noise.shift_right", lambda bits, by: torch.zeros_like(bits))
    assert float(KeyedNoise(0).uniform(0, 1, CPU)) > 0


@given(
    seed=st.integers(-(2**70), 2**70),
    sample=st.integers(0, 2**20),
    positions=st.lists(st.integers(0, 2**31), min_size=1, max_size=4),
    size=st.integers(1, 300),
)
def test_the_noise_is_the_same_whatever_was_read_before_and_how_much_of_it(seed, sample, positions, size):
    fresh = {at: KeyedNoise(seed, sample).gumbel(at, 300, CPU) for at in positions}
    noise = KeyedNoise(seed, sample)
    for at in [*positions, *reversed(positions)]:
        assert torch.equal(noise.gumbel(at, size, CPU), fresh[at][:size])
        noise.forget_before(at + 1)
    assert torch.isfinite(torch.stack(list(fresh.values()))).all()
