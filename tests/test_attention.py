"""Tree attention: a node's logits are those of its path, in every family, and a wrong mask is noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import PAGED, score
from families import FAMILIES, VOCAB, target_of

from draftgraph import GraphDecoder, UnsupportedModelError
from draftgraph.engine import selfcheck
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.eager import EagerContext, EagerEngine
from draftgraph.engine.paged import PagedEngine

BRANCHING = [family for family in FAMILIES if family != "bloom"]
EXACT = 1e-4


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, depths and ancestor mask of a random tree."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
    return rng.integers(0, VOCAB, nodes), mask.sum(axis=1) - 1, mask


def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def error_of(
    model: Any, text: list[int], tree: tuple[Any, Any, Any], told: tuple[Any, Any], engine: Any = EagerEngine
) -> float:
    """Largest difference between plain passes over the tree's paths and one pass told these depths and mask."""
    tokens, _, mask = tree
    context = engine(model).open()
    with Loan(model):
        context.prefill(text)
        logits = score(context, tokens, *told)
    expected = torch.stack([plain(model, text + tokens[row].tolist()) for row in mask])
    return float((logits - expected).abs().max())


@pytest.mark.parametrize("family", BRANCHING)
@pytest.mark.parametrize("attention", ["its own", "eager"])
def test_logits_of_every_node_are_those_of_its_path(family: str, attention: str) -> None:
    model = target_of(family)
    if attention == "eager":
        model.set_attn_implementation("eager")
    rng = np.random.default_rng(7)
    text = rng.integers(0, VOCAB, 23).tolist()  # longer than every window in the families
    tree = random_tree(rng, 12)
    assert error_of(model, text, tree, tree[1:]) < EXACT


BY_BOTH = [*((family, EagerEngine) for family in BRANCHING), *((family, PagedEngine) for family in PAGED)]


@pytest.mark.parametrize(("family", "engine"), BY_BOTH)
def test_a_wrong_mask_is_caught(family: str, engine: Any) -> None:
    model = target_of(family)
    text, tree = [3, 1, 4, 1, 5], (np.array([9, 2, 6, 5, 3]), np.array([0, 1, 1, 2, 2]), np.zeros((5, 5), dtype=bool))
    tree[2][:] = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    hidden, shown, shifted = tree[2].copy(), tree[2].copy(), tree[1].copy()
    hidden[3, 1] = False  # an ancestor
    shown[2, 1] = True  # a sibling
    shifted[4] += 1
    assert error_of(model, text, tree, tree[1:], engine) < EXACT
    assert error_of(model, text, tree, (tree[1], hidden), engine) > 100 * EXACT
    assert error_of(model, text, tree, (tree[1], shown), engine) > 100 * EXACT
    assert error_of(model, text, tree, (shifted, tree[2]), engine) > 100 * EXACT


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_the_self_check_refuses_a_model_whose_trees_are_wrong(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of(family)
    honest = EagerContext._run

    def shifted(self: EagerContext, tokens: Any, depths: Any, *given: Any, **named: Any) -> Any:
        return honest(self, tokens, [depth + (depth > 1) for depth in depths], *given, **named)

    monkeypatch.setattr(EagerContext, "_run", shifted)
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "eager")
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*off those of plain passes"):
        GraphDecoder(model)


def test_a_model_that_takes_no_tree_is_decoded_in_chains() -> None:
    with pytest.warns(UserWarning, match="BloomForCausalLM cannot take a token tree"):
        decoder = GraphDecoder(target_of("bloom"))
    assert not decoder.engines.can_branch


@pytest.mark.parametrize("engine", [EagerEngine, PagedEngine])
def test_texts_longer_than_the_window_are_forgotten_by_position_not_by_slot(engine: Any) -> None:
    model = target_of("mistral")
    rng = np.random.default_rng(1)
    text = rng.integers(0, VOCAB, 60).tolist()
    wide = (rng.integers(0, VOCAB, 30), np.array([0] + [1] * 29), np.eye(30, dtype=bool))
    wide[2][:, 0] = True
    assert error_of(model, text, wide, wide[1:], engine) < EXACT


@pytest.mark.parametrize("kind", ["MambaConfig", "RwkvConfig", "JambaConfig"])
def test_recurrent_states_are_refused_by_name(kind: str) -> None:
    import transformers

    small = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    if kind == "JambaConfig":
        small |= {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "use_mamba_kernels": False,
        }
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**small))
    with pytest.raises(
        UnsupportedModelError, match=rf"{type(model).__name__} keeps a recurrent state.*cannot be rewound"
    ):
        GraphDecoder(model)


def test_encoder_decoders_are_refused_by_name() -> None:
    import transformers

    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        GraphDecoder(transformers.T5ForConditionalGeneration(config))


def test_a_checked_model_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("llama")
    GraphDecoder(model)
    monkeypatch.setattr(selfcheck, "_abilities", lambda *given: pytest.fail("checked twice"))
    GraphDecoder(model)


@pytest.mark.parametrize("engine", ["eager", None])
def test_caches_are_allocated_once_for_the_whole_text(engine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine is not None:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
    decoder = GraphDecoder(target_of("llama"))
    decoder.generate([[1, 2, 3] * 4], max_new_tokens=2)
    decoding: Any = decoder.engines.target
    context = decoder._alone.contexts[0]
    context.reserve(900)

    def places() -> list[int]:
        if engine == "eager":
            return [layer.keys.data_ptr() for layer in context._cache.slot_layers]
        return [block.data_ptr() for block in decoding.cache.blocks.values()]

    kept = places()
    decoder.generate([[1, 2, 3] * 4], max_new_tokens=600)
    assert places() == kept
