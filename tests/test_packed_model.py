"""Weights as their file has them: formats of GGUF, folders of packed weights, `quantize`, what is the default."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import SMALL, perturbed
from tiny_models import logits, write_gguf
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.engine import selfcheck
from draftgraph.errors import UsageError
from draftgraph.kernels.packed import PackedTensor
from draftgraph.models import load_model
from draftgraph.models.draft import cut_student, load_draft, save_draft
from draftgraph.models.gguf_formats import FORMATS, packed_tensor
from draftgraph.models.packed_model import compress, is_packed_folder, load_packed, save_packed

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,)}
ROOMY = SMALL | {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**ROOMY | changes)).eval()


def random_tensor(name: str, outputs: int = 48, inputs: int = 512) -> Any:
    """Random bytes of a format, with scales that are numbers."""
    kind = getattr(gguf.GGMLQuantizationType, name)
    size, block = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(0)
    held = draw.integers(0, 256, (outputs * inputs // size, block)).astype(np.uint8)
    for start in HALVES.get(name, (0,)):
        held[:, start : start + 2] = (0.1 * draw.random(len(held))).astype(np.float16)[:, None].view(np.uint8)
    return SimpleNamespace(tensor_type=kind, shape=[inputs, outputs], data=held.reshape(outputs, -1))


@pytest.mark.parametrize("name", [*FORMATS, "Q6_K", "Q3_K"])
def test_a_gguf_weight_keeps_its_numbers(name: str) -> None:
    tensor = random_tensor(name)
    expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(48, 512)
    found = packed_tensor(tensor)
    assert found is not None and found.bits == (4 if name.startswith("Q4") else 8)
    allowed = (
        0.0 if name[-1] in "01" else 5e-4 if name in FORMATS else 5e-3
    )  # of the largest: scales, or all, are rounded
    assert np.abs(found.numbers().numpy() - expected).max() <= allowed * np.abs(expected).max()
    order = np.random.default_rng(1).permutation(48)
    assert torch.equal(packed_tensor(tensor, order).numbers(), found.numbers()[order])  # type: ignore[union-attr]


def test_a_file_of_few_bits_is_loaded_as_it_is(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    plain, _ = load_model(tmp_path / "tiny.gguf", device="cpu", dtype="float32")
    model, tokenizer = load_model(tmp_path / "tiny.gguf", device="cpu")
    held = [weight for weight in model.parameters() if isinstance(weight, PackedTensor)]
    assert held and tokenizer is not None
    weights = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight + 0, weights[name].float(), rtol=1e-3, atol=1e-4)
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id
    assert torch.nn.functional.cosine_similarity(logits(model), logits(plain), dim=-1).min() > 0.99
    capsys.readouterr()
    again, _ = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert torch.equal(logits(again), logits(model)) and not capsys.readouterr().err  # converted once
    assert len(list((cache / "packed").glob("tiny-*"))) == 1


def test_a_folder_of_packed_weights_gives_the_model_back(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    compress(model, 4)
    save_packed(model, tmp_path)
    assert is_packed_folder(tmp_path)
    back = load_packed(tmp_path, AutoConfig.from_pretrained(tmp_path))
    ids = torch.tensor([[1, 2, 23]])
    assert torch.equal(back(ids).logits, model(ids).logits)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert all(one.data_ptr() % 64 == 0 for one in back.parameters() if isinstance(one, PackedTensor))


def test_a_checked_model_of_a_folder_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    compress(model, 8)
    save_packed(model, tmp_path)
    read = [load_packed(tmp_path, AutoConfig.from_pretrained(tmp_path)) for _ in range(3)]
    assert selfcheck.engine_for(read[0]).compiled
    monkeypatch.setattr(selfcheck, "_abilities", None)
    assert selfcheck.engine_for(read[1]).compiled
    read[2].model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError):  # hooked, it is another model
        selfcheck.engine_for(read[2])


@pytest.mark.parametrize(("form", "most"), [("int8", 0.01), ("int4", 0.12)])
def test_quantize_makes_a_model_smaller_and_says_what_is_lost(
    form: str, most: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama().save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, device="cpu", quantize=form)
    said = capsys.readouterr().err
    assert f"in {form}" in said and 0 < float(said.split("off by ")[1].split("%")[0]) / 100 < most
    assert all(isinstance(weight, PackedTensor) for weight in model.parameters() if weight.dim() == 2)
    with pytest.raises(UsageError, match="quantize must be int8 or int4"):
        load_model(tmp_path, device="cpu", quantize="int3")


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float32),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_weights_keep_the_format_of_their_file_where_rows_keep_their_bits(
    dtype: torch.dtype, asked: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    llama().to(dtype).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu", dtype=asked)[0].dtype == expected


def test_a_family_without_a_compiled_pass_is_computed_in_float32(tmp_path: Path) -> None:
    from families import target_of

    target_of("cohere", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu")[0].dtype == torch.float32


def test_a_draft_stands_on_a_packed_target(tmp_path: Path) -> None:
    target = llama()
    student = cut_student(target, [0, 2])
    save_draft(student, target, tmp_path, bits=8)
    compress(target, 4)
    draft = load_draft(tmp_path, target)
    own = draft.model.layers[0].mlp.down_proj.weight
    assert isinstance(own, PackedTensor) and own.bits == 8
    assert draft.model.embed_tokens.weight.blocks.data_ptr() == target.model.embed_tokens.weight.blocks.data_ptr()
    expected = GraphDecoder(target, config=GraphConfig(mode="off")).generate([[1, 2, 3]], max_new_tokens=24)
    found = GraphDecoder(target, draft).generate([[1, 2, 3]], max_new_tokens=24)
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_other_libraries_can_use_a_packed_model() -> None:
    model = llama()
    compress(model, 8)
    ids = torch.tensor([[1, 2, 3]])
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    expected = GraphDecoder(model, perturbed(llama())).generate(ids, max_new_tokens=8, do_sample=False)
    assert found.shape == expected.sequences.shape
    with pytest.raises(IndexError, match="no row 24"):
        model(torch.tensor([[24]]))
