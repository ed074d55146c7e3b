"""A draft cut from its target: its layers, its folder, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, VOCAB, target_of
from tiny_models import one_line_of

import draftgraph
from draftgraph import DraftGraphError, GraphConfig, GraphDecoder, UsageError
from draftgraph.models.draft import (
    cut_student,
    is_draft_folder,
    layer_stack,
    lend_output_rows,
    load_draft,
    own_weights,
    picked_layers,
    save_draft,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_of_all_layers_is_its_target_and_any_student_is_stored_whole(family: str, tmp_path: Path) -> None:
    target = target_of(family)
    layers = len(layer_stack(target)[1])
    prompt = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(cut_student(target, list(range(layers)))(prompt).logits, target(prompt).logits)
    student = cut_student(target, [layers - 1, 0])
    kept = torch.tensor([0, *range(3, VOCAB, 2)])
    lend_output_rows(student, target, kept)
    for bits, tolerance in ((32, 0.0), (16, 2**-8), (8, 2**-7)):
        save_draft(student, target, tmp_path / f"{bits}", bits)
        draft = load_draft(tmp_path / f"{bits}", target)
        for name, weight in own_weights(draft).items():
            original = own_weights(student)[name].detach()
            assert (weight - original).abs().max() <= tolerance * original.abs().max(), name
        assert draft.token_map.tolist() == kept.tolist() and draft.get_output_embeddings().weight.shape[0] == len(kept)
        ours, theirs = draft.get_input_embeddings().weight, target.get_input_embeddings().weight
        assert ours.data_ptr() == theirs.data_ptr() and theirs.requires_grad
    sizes = [(tmp_path / bits / "model.safetensors").stat().st_size for bits in ("32", "16", "8")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_draft_that_writes_all_tokens_copies_no_output_matrix(tmp_path: Path) -> None:
    target = target_of("llama")
    save_draft(cut_student(target, [0]), target, tmp_path)
    draft = load_draft(tmp_path, target)
    assert draft.get_output_embeddings().weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    assert getattr(draft, "token_map", None) is None and is_draft_folder(tmp_path)


def test_positions_are_as_exact_as_the_targets_in_half_precision(tmp_path: Path) -> None:
    target_of("llama").save_pretrained(tmp_path / "target")
    target = draftgraph.load(tmp_path / "target", dtype="bfloat16").target
    student = cut_student(target, [0])
    assert torch.equal(student.model.rotary_emb.inv_freq, target.model.rotary_emb.inv_freq)
    assert student.dtype == torch.bfloat16


def test_another_target_is_refused(tmp_path: Path) -> None:
    target = target_of("llama")
    save_draft(cut_student(target, [0]), target, tmp_path / "draft")
    for other in (target_of("llama", seed=1), target_of("gpt2")):
        with pytest.raises(UsageError, match="was trained for LlamaForCausalLM") as error:
            draftgraph.load(other, draft=tmp_path / "draft")
        one_line_of(error)
    target.to(torch.bfloat16)
    assert draftgraph.load(target, draft=tmp_path / "draft").draft.dtype == torch.bfloat16


@pytest.mark.parametrize("damage", ["cut", "missing", "shape", "map", "format", "json"])
def test_a_damaged_draft_is_refused(damage: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    target = target_of("llama")
    student = cut_student(target, [0])
    lend_output_rows(student, target, torch.arange(8))
    save_draft(student, target, tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, text = load_file(weights), config.read_text()
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif damage == "missing":
        tensors.pop("model.norm.weight")
        save_file(tensors, weights)
    elif damage == "shape":
        save_file(tensors | {"model.norm.weight": torch.ones(5)}, weights)
    elif damage == "map":
        save_file(tensors | {"token_map": torch.arange(99)}, weights)
    else:
        config.write_text(text.replace('"format": 1', '"format": 7') if damage == "format" else text[:-20])
    with pytest.raises(DraftGraphError) as error:
        draftgraph.load(target, draft=tmp_path)
    assert str(tmp_path) in one_line_of(error)


def test_layers_are_picked_within_the_target() -> None:
    assert picked_layers("spread", 4, 30) == [0, 10, 19, 29] and picked_layers("spread", 1, 30) == [0]
    assert picked_layers("first", 2, 5) == [0, 1] and picked_layers("last", 2, 5) == [3, 4]
    assert picked_layers("4, 0", 2, 5) == [4, 0]
    for choice, layers in (("0,99", 2), ("-1", 1), ("0,1", 3), ("middle", 1), ("first", 6)):
        with pytest.raises(UsageError):
            picked_layers(choice, layers, 5)


def test_adapters_and_quantised_targets_take_a_draft_but_are_not_cut(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    target = target_of("llama")
    save_draft(cut_student(target, [0, 2]), target, tmp_path)
    adapted = get_peft_model(target_of("llama"), LoraConfig(r=2, target_modules=["q_proj"])).eval()
    packed = target_of("llama")
    quantize_(packed, Int8WeightOnlyConfig(), lambda module, name: "layers" in name and hasattr(module, "in_features"))
    for model, word in ((adapted, "merge_and_unload"), (packed, "quantised")):
        with pytest.raises(UsageError, match=word) as error:
            cut_student(model, [0])
        one_line_of(error)
        prompt = torch.tensor([[1, 2, 3]])
        plain = GraphDecoder(model, config=GraphConfig(mode="off")).generate(prompt, max_new_tokens=12)
        drafted = GraphDecoder(model, load_draft(tmp_path, model), config=GraphConfig(mode="graph"))
        assert drafted.generate(prompt, max_new_tokens=12).sequences.tolist() == plain.sequences.tolist()
