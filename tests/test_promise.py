"""The promise: every mode, any budget, greedy and sampled, gives the tokens of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from families import FAMILIES, MORE_FAMILIES, VOCAB, perturbed, target_of
from transformers import LogitsProcessor, LogitsProcessorList

from draftgraph import GraphConfig, GraphDecoder, Stats
from draftgraph.cost import FlatCost

NEW_TOKENS = 24
EXPERTS = ("mixtral", "deepseek_v3", "gpt_oss")  # torch has no float64 experts
CONFIGS = {
    "chain": [GraphConfig(mode="chain"), GraphConfig(mode="chain", chain_length=2)],
    "tree": [
        GraphConfig(mode="tree"),
        GraphConfig(mode="tree", k=8, theta_prob=0.0, theta_sib=0.0, max_nodes=24),
        GraphConfig(mode="tree", k=3, growth="best-first", sibling_pruning="leaf", max_depth=3),
    ],
    "graph": [
        GraphConfig(mode="graph"),
        GraphConfig(mode="graph", k=8, tau=1, theta_prob=0.02, theta_sib=0.05),
        GraphConfig(mode="graph", k=3, tau=3, theta_prob=0.0, theta_sib=0.1, growth="best-first", max_nodes=17),
        GraphConfig(mode="graph", tau=1, max_nodes=9, max_depth=5, sibling_pruning="leaf"),
    ],
    "auto": [
        GraphConfig(),
        GraphConfig(cost=FlatCost(0.0), tau=1),
        GraphConfig(cost=FlatCost(0.02), max_nodes=16, k=3, max_depth=12),
    ],
}


class NeverThrice(LogitsProcessor):
    """Stateful: remembers what it was shown, and forbids the last token on every third call."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) % 3 == 0:
            scores = scores.index_fill(1, input_ids[0, -1:], -torch.inf)  # type: ignore[assignment]
        return scores


def styles() -> dict[str, dict[str, Any]]:
    return {
        "greedy": {},
        "greedy, penalised": {"repetition_penalty": 1.3, "logits_processor": LogitsProcessorList([NeverThrice()])},
        "sampled": {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0, "seed": 11},
        "sampled, hot": {
            "do_sample": True,
            "temperature": 1.4,
            "repetition_penalty": 1.1,
            "seed": 12,
            "logits_processor": LogitsProcessorList([NeverThrice()]),
        },
    }


@cache
def models(family: str) -> tuple[Any, Any]:
    in_double = len(family) % 2 and family not in EXPERTS
    dtype = torch.float64 if in_double else torch.float32
    target = target_of(family, dtype=dtype)
    return target, perturbed(target, 0.2)


@cache
def prompt(family: str) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, 14), generator=torch.Generator().manual_seed(len(family)))


def decoded(family: str, config: GraphConfig, style: str) -> tuple[list[int], Stats]:
    target, draft = models(family)
    decoder = GraphDecoder(target, draft, config=config)
    ids = prompt(family)
    mask = torch.ones_like(ids)
    result = decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **styles()[style])
    return result.new_token_ids[0], result.stats


@cache
def plainly_decoded(family: str, style: str) -> list[int]:
    return decoded(family, GraphConfig(mode="off"), style)[0]


@dataclass
class Tally:
    runs: int = 0
    different: list[str] = field(default_factory=list)
    lengths: dict[str, list[float]] = field(default_factory=dict)
    merged: int = 0


@pytest.mark.filterwarnings("ignore:.*cannot take a token tree")
@pytest.mark.parametrize("mode", CONFIGS)
def test_every_mode_gives_the_tokens_of_plain_decoding(mode: str, record_property: Any) -> None:
    tally = Tally()
    for family in FAMILIES:
        for config in CONFIGS[mode]:
            for style in styles():
                tokens, stats = decoded(family, config, style)
                tally.runs += 1
                tally.merged += stats.accepted_by_source["merged"]
                tally.lengths.setdefault(repr(config), []).append(stats.mean_accepted_length)
                if tokens != plainly_decoded(family, style):
                    tally.different.append(f"{family}, {style}, {config}")
    assert not tally.different
    for config in CONFIGS[mode]:
        lengths = tally.lengths[repr(config)]
        assert 1.2 < sum(lengths) / len(lengths) <= config.levels + 1, config
        assert max(lengths) <= config.levels + 1
    if mode == "graph":
        assert tally.merged > 100
    mean = [sum(lengths) / len(lengths) for lengths in tally.lengths.values()]
    record_property("runs", tally.runs)
    record_property("accepted_length", round(sum(mean) / len(mean), 2))
    record_property("merged", tally.merged)
    print(f"{mode}: {tally.runs} runs, accepted length {sum(mean) / len(mean):.2f}, {tally.merged} merged tokens")


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@pytest.mark.filterwarnings("ignore:.*cannot take a token tree")
def test_plain_decoding_is_what_generate_does(family: str) -> None:
    target, _ = models(family)
    ids = prompt(family)
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert ids[0].tolist() + plainly_decoded(family, "greedy") == expected[0].tolist()
    assert len(set(plainly_decoded(family, "sampled, hot"))) > 2


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_families_of_other_kinds_keep_the_promise_too(family: str) -> None:
    target, draft = models(family)
    assert GraphDecoder(target, draft).engines.can_branch
    for style in ("greedy", "sampled"):
        for config in (CONFIGS["graph"][1], CONFIGS["auto"][1], GraphConfig(mode="chain")):
            assert decoded(family, config, style)[0] == plainly_decoded(family, style), config


def test_two_thousand_tokens_with_many_merges_stay_the_same() -> None:
    target = target_of("llama", dtype=torch.float64)
    draft = perturbed(target, 0.2)
    arguments: dict[str, Any] = {"max_new_tokens": 2048, "do_sample": True, "top_k": 0, "seed": 3}
    plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(prompt("llama"), **arguments)
    config = GraphConfig(mode="graph", tau=1, k=8, theta_prob=0.02, theta_sib=0.05)
    graph = GraphDecoder(target, draft, config=config).generate(prompt("llama"), **arguments)
    assert torch.equal(plain.sequences, graph.sequences)
    assert graph.stats.accepted_by_source["merged"] > 100
    assert graph.stats.mean_accepted_length > 1.2
