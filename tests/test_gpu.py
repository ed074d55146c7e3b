"""The same promises on a CUDA device. Run with: pytest -m gpu"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.distillation.answers import Text
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.sampler import Sampler, attend, reference
from draftgraph.distillation.training import Checkpoint, Training, score
from draftgraph.models.draft import cut_student
from draftgraph.noise import KeyedNoise

pytestmark = pytest.mark.gpu
PROMPT = torch.randint(0, VOCAB, (1, 14), generator=torch.Generator().manual_seed(2))
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.2},
    "sampled": {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "seed": 7},
}


@pytest.mark.filterwarnings("ignore:.*cannot take a token tree")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_gives_the_tokens_of_plain_decoding_on_cuda(family: str) -> None:
    target = target_of(family).to("cuda")
    draft = perturbed(target.cpu(), 0.2).to("cuda")
    target.to("cuda")
    for style, arguments in STYLES.items():
        plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(PROMPT, max_new_tokens=24, **arguments)
        for mode in ("chain", "tree", "graph", "auto"):
            config = GraphConfig(mode=mode)
            result = GraphDecoder(target, draft, config=config).generate(PROMPT, max_new_tokens=24, **arguments)
            assert result.sequences.tolist() == plain.sequences.tolist(), (mode, style)
            assert result.stats.mean_accepted_length > 1.0


def test_noise_is_the_same_on_every_device() -> None:
    on_cpu = KeyedNoise(3).gumbel(17, 50_000, torch.device("cpu"))
    on_gpu = KeyedNoise(3).gumbel(17, 50_000, torch.device("cuda"))
    assert torch.allclose(on_cpu, on_gpu.cpu(), rtol=0, atol=1e-12)


def test_sampled_text_is_the_same_on_both_devices() -> None:
    target = target_of("llama", dtype=torch.float64)
    arguments: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "seed": 1}
    on_cpu = GraphDecoder(target).generate(PROMPT, **arguments).sequences
    on_gpu = GraphDecoder(target.to("cuda")).generate(PROMPT.to("cuda"), **arguments).sequences
    assert on_gpu.device.type == "cuda"
    assert on_cpu.tolist() == on_gpu.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_check(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma3", "mixtral", "opt"):
        assert GraphDecoder(target_of(family).to("cuda", dtype)).engines.can_branch


@pytest.mark.filterwarnings("ignore:.*cannot take a token tree")
@pytest.mark.parametrize("family", FAMILIES)
def test_large_batches_continue_texts_as_plain_decoding_does(family: str) -> None:
    target = target_of(family).to("cuda")
    prompts = [[1 + (5 * row + 3 * place) % (VOCAB - 1) for place in range(2 + row)] for row in range(9)]
    answers = Sampler(target, frozenset({5, 11})).continue_texts(prompts, 40)
    decoder = GraphDecoder(target, config=GraphConfig(mode="off"))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = decoder.generate(ids, max_new_tokens=40, eos_token_id=[5, 11], do_sample=False)
        assert answer == alone.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("rows", "groups", "heads", "size"), [(3, 2, 3, 64), (5, 1, 1, 128), (2, 4, 7, 32)])
def test_the_kernel_for_rows_gives_what_its_reference_gives(rows: int, groups: int, heads: int, size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(rows, groups, heads, size, **shape)
    key, value = (torch.randn(rows, groups, 192, size, **shape) for _ in range(2))
    places = torch.randint(0, 192, (rows,), generator=generator, device="cuda")
    seen = torch.arange(192, device="cuda") <= places[:, None]
    expected = reference(query, key, value, seen[:, None, None], size**-0.5)
    torch.testing.assert_close(attend(query, key, value, places, size**-0.5), expected, rtol=2e-2, atol=2e-2)


def test_a_student_learns_in_half_precision(tmp_path: Path) -> None:
    target = target_of("llama").to("cuda", torch.bfloat16)
    rows = Sampler(target, frozenset()).continue_texts([[token] for token in range(1, VOCAB)], 30)
    texts = [Text(np.array([token, *row], dtype=np.int32), 1) for token, row in enumerate(rows, start=1)]
    student = cut_student(target, [0, 2])
    before = score(student, texts).agreement
    recipe = Recipe(layers=2, steps=150, batch_tokens=512)
    Training(target, student, texts, texts, recipe, Checkpoint(tmp_path / "checkpoint.safetensors", {})).run()
    assert score(student, texts).agreement > max(0.5, before)
