"""Sampled tokens of many rows at once: against transformers' processors, and the kernels against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from kernel_tools import interpreter
from scipy import stats
from tiny_models import tiny_llama
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftgraph.choose import KeyedChooser, Outputs, Prefix
from draftgraph.engine.protocol import Warping
from draftgraph.kernels.noise import perturbed, perturbed_reference
from draftgraph.kernels.sampling import lowest_kept, removed_by_top_p, sample, sample_one, sample_reference
from draftgraph.noise import CHOICE, KeyedNoise, gumbel_rows, signed

UNLIKELY = 1e-3  # seeds are fixed, so a test that passes once passes always
NOISE = KeyedNoise(7, 1)
WARPINGS = [
    Warping(*numbers) for numbers in product((0.4, 1.0, 1.7), (0, 1, 5, 3000), (1.0, 0.9, 0.35, 0.0), (0.0, 0.02, 0.5))
]
FEW = [
    Warping(),
    Warping(temperature=0.7),
    Warping(top_p=0.9),
    Warping(1.5, 50, 0.8),
    Warping(1.3, 0, 0.2),
    Warping(0.8, 7, 1.0, 0.1),
    Warping(2.0, 0, 0.97, 0.05),
    Warping(1.0, 0, 0.0, 1.0),
]
Run = Callable[..., Tensor]


def run(module: str, name: str, *arguments: Any) -> Tensor:
    found: Tensor = getattr(import_module(f"draftgraph.kernels.{module}"), name)(*arguments)
    return found


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as call:
        yield lambda *given: call(run, *given)


def logits_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    """From flat rows to peaked ones."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-1, 1.5, rows)[torch.randperm(rows, generator=generator)]
    return torch.randn(rows, columns, generator=generator) * spread[:, None]


def positions_of(rows: int) -> Tensor:
    return torch.arange(rows) * 3 + 2


def numbers(warping: Warping) -> list[Tensor]:
    return [torch.tensor([n], dtype=torch.float64) for n in (warping.temperature, warping.top_p, warping.min_p)]


def key_of(noise: KeyedNoise) -> Tensor:
    return torch.tensor([signed(noise.stream_key(CHOICE))])


def chosen(logits: Tensor, warping: Warping, positions: Tensor | None = None) -> Tensor:
    """By the reference."""
    positions = positions_of(len(logits)) if positions is None else positions
    return sample_reference(logits, key_of(NOISE), positions, *numbers(warping), warping.top_k)


def chosen_by_kernel(kernel: Run, logits: Tensor, warping: Warping) -> Tensor:
    lowest = lowest_kept(logits, warping.top_k)
    return kernel(
        "sampling", "sample_triton", logits, key_of(NOISE), positions_of(len(logits)), lowest, *numbers(warping)
    )


def processors_of(warping: Warping) -> LogitsProcessorList:
    """Only those that `generate` would make."""
    made = [
        TemperatureLogitsWarper(warping.temperature) if warping.temperature != 1 else None,
        TopKLogitsWarper(warping.top_k) if warping.top_k else None,
        TopPLogitsWarper(warping.top_p) if warping.top_p < 1 else None,
        MinPLogitsWarper(warping.min_p) if warping.min_p else None,
    ]
    return LogitsProcessorList([processor for processor in made if processor is not None])


def chosen_by_processors(logits: Tensor, warping: Warping) -> Tensor:
    chooser = KeyedChooser(processors_of(warping), NOISE, Outputs(keep_logprobs=True))  # so that processors are asked
    prefixes = [Prefix.of(torch.zeros(1, at, dtype=torch.long), at) for at in positions_of(len(logits)).tolist()]
    return torch.tensor([chooser.choose(row, prefix) for row, prefix in zip(logits, prefixes, strict=True)])


@pytest.mark.parametrize("columns", [5, 16, 23, 1000])
def test_compiled_code_chooses_as_the_reference(columns: int) -> None:
    logits = logits_of(12, columns, columns)
    logits[3] = logits[3].round()  # many tokens are as good as others
    logits[4, 1:4] = -torch.inf
    for warping in WARPINGS:
        found = [
            sample_one(row, NOISE.stream_key(CHOICE), at, **vars(warping))
            for row, at in zip(logits, positions_of(12).tolist(), strict=True)
        ]
        assert found == chosen(logits, warping).tolist(), warping


@pytest.mark.parametrize("columns", [1, 15, 16, 1000])
def test_compiled_noise_is_that_of_the_reference(columns: int) -> None:
    logits, tokens = logits_of(6, columns + 3), torch.randperm(columns) * 7
    keys = torch.tensor([signed(NOISE.stream_key(CHOICE)), 5, -8])
    for temperature in (0.0, 0.7, 3.0):
        given = logits, keys, positions_of(6), tokens, torch.tensor([temperature, 1.0, 0.0], dtype=torch.float64)
        assert torch.equal(perturbed(*given), perturbed_reference(given[0][:, :columns], *given[1:]))


@pytest.mark.parametrize("columns", [41, 2048, 3001])
def test_the_reference_is_the_rule_of_choice(columns: int) -> None:
    logits = logits_of(12, columns)
    plain, differ = chosen(logits, Warping()), 0
    for warping in WARPINGS:
        found = chosen(logits, warping)
        assert torch.equal(found, chosen_by_processors(logits, warping)), warping
        differ += int((found != plain).sum())
    assert differ > 100, "the processors changed nothing"


def test_each_processor_sees_what_the_one_before_it_left() -> None:
    """So top-p is of the tokens that top-k keeps, and min-p does not change what top-p sees."""
    logits = torch.tensor([[0.40, 0.16, 0.14, 0.1, 0.1, 0.1]]).log().repeat(400, 1)
    assert set(chosen(logits, Warping(top_k=3, top_p=0.7)).tolist()) == {0, 1}
    assert set(chosen(logits, Warping(top_p=0.7)).tolist()) >= {0, 1, 2}
    assert set(chosen(logits, Warping(top_p=0.5, min_p=0.36)).tolist()) == {0, 1}
    hot = (logits / 2).softmax(dim=-1)  # top-p sees the temperature
    assert float(hot[0, :3].sum()) < 0.7 and set(chosen(logits, Warping(2.0, top_p=0.7)).tolist()) > {0, 1, 2}


def test_of_equal_scores_top_p_removes_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does where `sort` is stable, which it does not ask for."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    logits = (logits_of(30, 500) * 2).round() / 2
    for warping in (Warping(top_p=0.93), Warping(1.5, 100, 0.4), Warping(1.0, 0, 0.0)):
        assert torch.equal(chosen(logits, warping), chosen_by_processors(logits, warping)), warping


def test_top_p_of_one_removes_nothing() -> None:
    scores = torch.tensor([[-1000.0, -40.0, 0.0, -torch.inf, -1e-7]])  # the first two change no sum
    chances = scores.exp()
    assert not removed_by_top_p(scores, chances, torch.ones(1, dtype=torch.float64)).any()
    almost = torch.full((1,), 1 - 1e-9, dtype=torch.float64)
    assert removed_by_top_p(scores, chances, almost).tolist() == [[True, True, False, True, False]]


@pytest.mark.parametrize("warping", FEW, ids=str)
@pytest.mark.parametrize("columns", [97, 4999])
def test_the_kernel_chooses_the_same(interpreted: Run, columns: int, warping: Warping) -> None:
    logits = logits_of(6, columns)
    logits[0] = logits[0].round()  # with equals
    assert torch.equal(chosen_by_kernel(interpreted, logits, warping), chosen(logits, warping))


OWN = [*FEW, Warping(0.6, 64, 0.95), Warping(1.1, 1)]  # one for each row


def own_case(columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Rows of as many requests, each with its noise and its numbers."""
    keys = torch.cat([key_of(KeyedNoise(seed)) for seed in range(len(OWN))])
    told = [torch.cat(column) for column in zip(*map(numbers, OWN), strict=True)]
    logits = logits_of(len(OWN), columns).to(dtype)
    return logits, keys, positions_of(len(OWN)), *told, torch.tensor([warping.top_k for warping in OWN])


def each_alone(case: tuple[Tensor, ...]) -> list[int]:
    logits, keys, positions, *_ = case
    found = []
    for row, warping in enumerate(OWN):
        mine = slice(row, row + 1)
        told = [number.to(logits.device) for number in numbers(warping)]
        found.append(sample_reference(logits[mine], keys[mine], positions[mine], *told, warping.top_k).item())
    return found


@pytest.mark.parametrize("columns", [41, 2500])
def test_rows_of_many_requests_are_chosen_together(interpreted: Run, columns: int) -> None:
    case = own_case(columns)
    expected = each_alone(case)
    assert len(set(expected)) > 2 and sample_reference(*case).tolist() == expected
    *given, top_k = case
    found = interpreted("sampling", "sample_triton", *given[:3], lowest_kept(given[0], top_k), *given[3:])
    assert found.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [97, 49_152, 151_936])
def test_rows_of_many_requests_are_chosen_together_on_a_gpu(columns: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = tuple(part.cuda() for part in own_case(columns, dtype))
        assert sample(*case).tolist() == each_alone(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_kernel_reads_any_rows(interpreted: Run, dtype: torch.dtype) -> None:
    logits = logits_of(10, 2500).to(dtype)[::2, :2200]
    for warping in (Warping(1.5, 50, 0.8), Warping(top_p=0.9)):
        found = chosen_by_kernel(interpreted, logits, warping)
        assert torch.equal(found, chosen(logits, warping))
        assert torch.equal(found, chosen(logits.float(), warping))


def test_a_row_does_not_depend_on_its_neighbours(interpreted: Run) -> None:
    warping, logits = Warping(1.2, 900, 0.7, 0.001), logits_of(4, 2100)
    together = chosen(logits, warping)
    alone = [chosen(logits[row : row + 1], warping, positions_of(4)[row : row + 1]).item() for row in range(4)]
    assert together.tolist() == alone
    logits[1:] = torch.nan
    assert chosen_by_kernel(interpreted, logits, warping)[0] == together[0]
    assert chosen_by_kernel(interpreted, logits[:1], warping).tolist() == together[:1].tolist()


@pytest.mark.parametrize("warping", [Warping(), Warping(0.5, 20, 0.6, 0.3), Warping(1.0, 0, 0.0, 1.0)], ids=str)
def test_hopeless_rows_end(interpreted: Run, warping: Warping) -> None:
    logits = logits_of(6, 2100)
    logits[0], logits[1], logits[2] = -torch.inf, torch.nan, torch.inf
    logits[3, ::3], logits[4, 5:9], logits[5, 7] = torch.nan, torch.inf, -torch.inf
    by_kernel, by_reference = chosen_by_kernel(interpreted, logits, warping), chosen(logits, warping)
    assert torch.equal(by_kernel, by_reference)
    assert by_kernel[:2].tolist() == [0, 0] and ((by_kernel >= 0) & (by_kernel < 2100)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_perturbed_logits(interpreted: Run, dtype: torch.dtype) -> None:
    logits = logits_of(5, 1500).to(dtype)[:, :1301]
    tokens = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))[:1301]
    positions, temperature = torch.tensor([0, 1, 77, 2**31, 5]), torch.tensor([0.7], dtype=torch.float64)
    found = interpreted("noise", "perturbed_triton", logits, key_of(NOISE), positions, tokens, temperature)
    expected = logits.double() + temperature * gumbel_rows(key_of(NOISE), positions, tokens)
    torch.testing.assert_close(found, expected.float(), rtol=1e-7, atol=0)
    nothing = torch.zeros(1, 1301)
    noise = interpreted("noise", "perturbed_triton", nothing, key_of(NOISE), positions[3:4], tokens, temperature / 0.7)
    rows = NOISE.gumbel(2**31, 60_000, torch.device("cpu"), CHOICE)
    torch.testing.assert_close(noise[0], rows[tokens].float(), rtol=1e-7, atol=0)


def test_logits_of_many_texts_are_perturbed_by_their_own_noise(interpreted: Run) -> None:
    """As many rows of each; a temperature of 0 leaves them as they are."""
    logits, tokens, positions = logits_of(6, 700), torch.arange(700), torch.tensor([4, 9, 9, 4, 7, 2**31])
    keys = torch.cat([key_of(KeyedNoise(seed)) for seed in (1, 2, 3)])
    temperatures = torch.tensor([0.7, 0.0, 1.3], dtype=torch.float64)
    given = logits, keys, positions, tokens, temperatures
    found = [perturbed(*given), interpreted("noise", "perturbed_triton", *given)]
    for text in range(3):
        here = slice(2 * text, 2 * text + 2)
        alone = perturbed(logits[here], keys[text, None], positions[here], tokens, temperatures[text, None])
        assert torch.equal(found[0][here], alone)
        torch.testing.assert_close(found[1][here], alone, rtol=1e-7, atol=0)
    assert torch.equal(found[0][2:4], logits[2:4].float())


POINTERS = {
    **dict.fromkeys(("key", "positions", "tokens", "chosen"), "*i64"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "values"), "*fp64"),
    **dict.fromkeys(("lowest", "highs", "perturbed"), "*fp32"),
    **dict.fromkeys(("row_stride", "columns", "parts", "own", "sharing"), "i32"),
    "places": "*i32",
}


@pytest.mark.parametrize(("logits", "ones"), [("*bf16", False), ("*fp32", True)])  # numbers that are 1 are compiled in
@pytest.mark.parametrize(
    ("module", "name", "fixed"),
    [
        ("noise", "_perturb", {"block": 1024}),
        ("sampling", "_search", {"part": 2048}),
        ("sampling", "_choose", {"part": 2048, "pieces": 32}),
    ],
)
def test_kernels_compile_for_a_gpu(module: str, name: str, fixed: dict[str, int], logits: str, ones: bool) -> None:
    """The interpreter runs what the compiler refuses."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftgraph.kernels.triton_or_stub import ROUNDING

    kernel = getattr(import_module(f"draftgraph.kernels.{module}"), name)
    constants = fixed | ({"parts": 1} if ones and "parts" in kernel.arg_names else {})
    kinds = POINTERS | {"logits": logits} | dict.fromkeys(constants, "constexpr")
    signature = {argument: kinds[argument] for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=ROUNDING).asm["cubin"]


@pytest.mark.parametrize(
    "warping", [Warping(), Warping(0.7), Warping(1.4, 8, 0.85), Warping(0.9, 0, 0.95, 0.1)], ids=str
)
def test_frequencies_are_those_of_the_processed_scores(warping: Warping) -> None:
    logits, count = logits_of(1, 12, seed=4) * 15, 8000
    found = chosen(logits.expand(count, -1), warping, torch.arange(count))
    counts = np.bincount(found, minlength=12)

    def fit(processed: Tensor) -> float:
        chances = torch.softmax(processed[0].double(), dim=-1).numpy()
        possible = chances > 0
        if counts[~possible].any():
            return 0.0
        return float(stats.chisquare(counts[possible], count * chances[possible] / chances.sum()).pvalue)

    processed = processors_of(warping)(torch.zeros(1, 1, dtype=torch.long), logits.clone())
    assert fit(processed) > UNLIKELY
    assert fit(logits / (0.85 * warping.temperature)) < UNLIKELY, "the test could not tell"


def test_the_processors_of_generate_are_understood() -> None:
    model = tiny_llama()
    for warping in WARPINGS:
        settings = {"temperature": warping.temperature, "top_k": warping.top_k, "top_p": warping.top_p}
        config = GenerationConfig(do_sample=True, min_p=warping.min_p or None, **settings)
        assert Warping.of(model._get_logits_processor(config)) == warping


HOT, FIFTY, MOST, LIKELY = (
    TemperatureLogitsWarper(1.5),
    TopKLogitsWarper(50),
    TopPLogitsWarper(0.9),
    MinPLogitsWarper(0.1),
)


class Another(TopKLogitsWarper):
    pass


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        ([], Warping()),
        ([HOT, FIFTY, MOST, LIKELY], Warping(1.5, 50, 0.9, 0.1)),
        ([FIFTY, LIKELY], Warping(top_k=50, min_p=0.1)),
        ([FIFTY, HOT], None),
        ([MOST, FIFTY], None),
        ([LIKELY, MOST], None),
        ([HOT, HOT], None),
        ([HOT, Another(50)], None),
        ([RepetitionPenaltyLogitsProcessor(1.1), HOT], None),
        ([HOT, lambda ids, scores: scores], None),
        ([TopKLogitsWarper(50, min_tokens_to_keep=2)], None),
        ([TopPLogitsWarper(0.9, min_tokens_to_keep=2)], None),
        ([MinPLogitsWarper(0.1, min_tokens_to_keep=2)], None),
        ([TopKLogitsWarper(50, filter_value=-1e9)], None),
        ([TopPLogitsWarper(0.9, filter_value=-1e9)], None),
        ([MinPLogitsWarper(0.1, filter_value=0.0)], None),
    ],
)
def test_only_known_processors_in_their_order_are_taken(processors: list[Any], expected: Warping | None) -> None:
    assert Warping.of(LogitsProcessorList(processors)) == expected


def on_gpu(logits: Tensor, warping: Warping) -> list[Tensor]:
    given = [logits, key_of(NOISE), positions_of(len(logits)), *numbers(warping)]
    return [one.cuda() for one in given]


@pytest.mark.gpu
@pytest.mark.parametrize("warping", FEW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 97), (3, 2049), (64, 49_152), (8, 151_936)], ids=str)
def test_the_kernel_chooses_the_same_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype, warping: Warping) -> None:
    given = on_gpu(logits_of(*shape).to(dtype), warping)
    found = sample(*given, warping.top_k)
    assert torch.equal(found, sample_reference(*given, warping.top_k))
    assert torch.equal(found[-1:], sample(given[0][-1:], given[1], given[2][-1:], *given[3:], warping.top_k))


@pytest.mark.gpu
def test_hopeless_rows_end_on_a_gpu() -> None:
    logits, warping = logits_of(4, 49_152), Warping(0.5, 0, 0.6, 0.3)
    logits[0], logits[1], logits[2, ::2], logits[3] = -torch.inf, torch.nan, torch.nan, torch.inf
    given = on_gpu(logits, warping)
    assert torch.equal(sample(*given), sample_reference(*given))


@pytest.mark.gpu
def test_logits_are_perturbed_on_a_gpu() -> None:
    logits, key, positions, temperature, *_ = on_gpu(logits_of(8, 12_288).bfloat16(), Warping(0.7))
    tokens = torch.arange(12_288, device="cuda") * 4
    expected = (logits.double() + temperature * gumbel_rows(key, positions, tokens)).float()
    torch.testing.assert_close(perturbed(logits, key, positions, tokens, temperature), expected, rtol=2e-7, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_recorded_choice_is_replayed_with_other_data(top_k: int) -> None:
    from draftgraph.engine.capture import Captured

    given = on_gpu(logits_of(16, 49_152), Warping())
    recorded = Captured(lambda: sample(*given, top_k), torch.device("cuda"))
    seen = set()
    for seed, warping in enumerate(FEW):
        others = on_gpu(logits_of(16, 49_152, seed), warping)
        others[1] = key_of(KeyedNoise(seed)).cuda()
        for one, other in zip(given, others, strict=True):
            one.copy_(other)
        assert torch.equal(recorded(), sample(*others, top_k))
        seen.add(tuple(recorded().tolist()))
    assert len(seen) == len(FEW)
