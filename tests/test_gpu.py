"""The same promises on a CUDA device. Run with: pytest -m gpu"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
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
        assert GraphDecoder(target_of(family).to("cuda", dtype)).can_branch
