"""Whether a target is exact to the bit is found by looking, told everywhere, and can be insisted on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engine_tools import let_libraries_sum
from families import FAMILIES, MORE_FAMILIES, VOCAB, perturbed, target_of
from kernel_tools import in_one_order
from transformers import LlamaConfig, LlamaForCausalLM

import draftgraph.engine.selfcheck as selfcheck
from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Limits, Scheduler
from draftgraph.cost import FlatCost
from draftgraph.engine import attention, borrowing, paged
from draftgraph.engine.selfcheck import bit_difference, inexactness
from draftgraph.errors import UnsupportedModelError
from draftgraph.kernels.attention import attend_triton
from draftgraph.pair import Pair
from draftgraph.stats import Stats

PROMPT = torch.arange(1, 9)[None] % VOCAB
OWN_ATTENTION = {"bloom", "gptj", "llama4"}  # computed by code of their own
GRAPH = GraphConfig(mode="graph", k=8, tau=1, theta_prob=0.02, theta_sib=0.05)
EAGER_AUTO = GraphConfig(cost=FlatCost(0.0), tau=1)


def of_modules(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Any:
    """A model whose passes are those of its modules, where libraries choose the order of sums by the rows of a pass."""
    let_libraries_sum(monkeypatch)
    return target_of("llama").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_are_found_exact(dtype: torch.dtype, recwarn: pytest.WarningsRecorder) -> None:
    decoder = GraphDecoder(target_of("llama").to(dtype), config=GraphConfig(exact=True))
    assert decoder.generate(PROMPT, max_new_tokens=4).stats.exact
    assert not recwarn.list


def test_a_fault_in_one_width_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted sum whose order depends on the rows of its pass: one bit of one logit in passes over 33 nodes."""
    compute = paged.Program.__call__

    def faulty(program: Any, cache: Any, tokens: Any, *given: Any) -> Any:
        logits, states = compute(program, cache, tokens, *given)
        if len(tokens) == 66:  # another sequence is in the pass as well
            logits[33, 0] = torch.nextafter(logits[33, 0], torch.tensor(torch.inf))
        return logits, states

    assert inexactness(target_of("llama")) is None
    monkeypatch.setattr(paged.Program, "__call__", faulty)
    assert "a pass over 33 nodes" in (inexactness(target_of("llama")) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE_FAMILIES} - OWN_ATTENTION))
@pytest.mark.filterwarnings("ignore:.*cannot take a token tree")
def test_on_a_cpu_rows_of_every_family_are_summed_by_themselves(family: str, dtype: torch.dtype) -> None:
    assert inexactness(target_of(family, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "falcon", "mixtral", "deepseek_v3"])
def test_half_precision_keeps_the_promise(family: str, dtype: torch.dtype) -> None:
    target = target_of(family, dtype=dtype)
    draft = perturbed(target, 0.2)
    sampled = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0, "seed": 5}
    for style in ({}, sampled):
        plain, *others = (
            GraphDecoder(target, draft, config=config).generate(PROMPT, max_new_tokens=32, **style)
            for config in (GraphConfig(mode="off"), GraphConfig(mode="chain"), GRAPH, EAGER_AUTO)
        )
        for other in others:
            assert other.stats.exact and torch.equal(other.sequences, plain.sequences)
            assert other.stats.mean_accepted_length > 1.2


def test_half_precision_of_modules_is_told_once_and_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_modules(monkeypatch, torch.bfloat16)
    with pytest.warns(UserWarning, match="LlamaForCausalLM may part from those of plain decoding at ties") as told:
        decoder = GraphDecoder(model)
    assert len(told) == 1
    assert not decoder.generate(PROMPT, max_new_tokens=4).stats.exact
    with pytest.raises(UnsupportedModelError, match="exact=True asks for it"):
        decoder.generate(PROMPT, max_new_tokens=4, config=GraphConfig(exact=True))
    with pytest.raises(UnsupportedModelError, match="exact=True asks for it"):
        GraphDecoder(model, config=GraphConfig(exact=True))


def test_in_float32_nobody_is_warned_of_last_bits(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    decoder = GraphDecoder(of_modules(monkeypatch, torch.float32))
    assert not recwarn.list
    assert not decoder.generate(PROMPT, max_new_tokens=4).stats.exact


def test_a_server_that_insists_does_not_start_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GraphConfig(exact=True)
    scheduler = Scheduler(Pair(of_modules(monkeypatch, torch.float32), None, None), Limits(texts=1, slots=256), config)
    with pytest.raises(UnsupportedModelError, match="exact=True asks for it"):
        scheduler.batch.prepare(config)


def test_it_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = target_of("llama"), []
    look = selfcheck.bit_difference
    monkeypatch.setattr(selfcheck, "bit_difference", lambda *given: looks.append(given) or look(*given))
    for _ in range(3):
        GraphDecoder(model)
    assert len(looks) == 1


def test_figures_of_two_texts_are_exact_if_both_are() -> None:
    assert (Stats() + Stats()).exact is True
    assert (Stats() + Stats(exact=False)).exact is False


def check_in_order() -> str | None:
    """What the check says of a target in half precision whose products and attention are those of a GPU."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).to(torch.bfloat16).eval()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(selfcheck, "WIDTHS", (2, 9))
        patch.setattr(attention, "paged_attention", partial(attend_triton, splits=2))
        patch.setattr(borrowing, "compiles_for", lambda device: True)
        return bit_difference(model, {"paged": True, "compiled": False})


def test_half_precision_in_order_has_the_bits_of_passes_over_one_node() -> None:
    with in_one_order() as call:
        assert call(check_in_order) is None
