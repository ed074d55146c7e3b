"""Products of few rows: every way gives the same numbers, and modules are left as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftgraph.engine.borrowing import NarrowLinears
from draftgraph.engine.capture import Captured
from draftgraph.kernels import linear
from draftgraph.kernels.linear import Choices, direct, doubled, packed, quickest, turned


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(linear, "CHOSEN", {})
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(linear, "CHOICES", Choices())


@pytest.fixture
def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    large, biased = nn.Linear(256, 512, bias=False), nn.Linear(512, 256)
    return nn.ModuleDict({"large": large, "biased": biased, "small": nn.Linear(16, 16), "table": nn.Embedding(512, 8)})


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("way", [direct, turned, doubled, packed])
def test_every_way_gives_the_same(way: linear.Way, rows: int) -> None:
    torch.manual_seed(rows)
    given, weight = torch.randn(rows, 96), torch.randn(160, 96)
    product = way(given, weight)
    assert product.is_contiguous() and product.shape == (rows, 160)
    torch.testing.assert_close(product, given @ weight.T)


@pytest.mark.parametrize("way", [direct, turned, doubled, packed])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 2), (2, 40)])
@torch.no_grad()
def test_borrowed_layers_say_what_they_said(
    layers: nn.ModuleDict, shape: tuple[int, int], way: linear.Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "quickest", lambda rows, weights, record: way)
    given = torch.randn(*shape, 256)

    def says() -> Any:
        return layers["biased"](layers["large"](given))

    before = says()
    with NarrowLinears(layers).borrowed(shape[1]):
        during = says()
    assert during.shape == before.shape
    torch.testing.assert_close(during, before)


def test_only_large_float32_layers_are_borrowed_and_all_are_given_back(layers: nn.ModuleDict) -> None:
    half = nn.Linear(256, 512).to(torch.bfloat16)
    layers["sixteen"] = half

    def changed() -> set[str]:
        return {name for name, module in layers.items() if "forward" in vars(module)}

    narrow = NarrowLinears(layers)
    with pytest.raises(KeyError), narrow.borrowed(4):
        assert changed() == {"large", "biased"}
        raise KeyError
    assert not changed()
    with narrow.borrowed(33):
        assert not changed()


class Clock:
    """Tells that some ways are quicker."""

    def __init__(self, costs: dict[Any, float]) -> None:
        self.costs, self.now = costs, 0.0

    def perf_counter(self) -> float:
        return self.now

    def timed(self, way: linear.Way) -> Any:
        def run(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            self.now += self.costs[way]
            return way(given, weight)

        return run


@pytest.mark.parametrize(
    ("costs", "rows", "best"),
    [
        ({direct: 3.0, turned: 2.0, doubled: 1.0, packed: 2.0}, 1, "doubled"),
        ({direct: 3.0, turned: 2.0, doubled: 1.0, packed: 2.5}, 2, "turned"),
        ({direct: 3.0, turned: 2.0, doubled: 1.0, packed: 1.5}, 2, "packed"),
        ({direct: 1.05, turned: 1.0, doubled: 1.0, packed: 1.0}, 1, "direct"),
    ],
)
def test_the_quickest_way_is_taken(
    costs: dict[Any, float], rows: int, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(costs)
    ways = {way.__name__: clock.timed(way) for way in (direct, turned, doubled, packed)}
    for name, way in ways.items():
        monkeypatch.setattr(linear, name, way)
    monkeypatch.setattr(linear, "time", clock)
    assert quickest(rows, [torch.ones(64, 32)] * 3, Captured) is ways[best]


def test_each_shape_is_measured_once(layers: nn.ModuleDict, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def noted(rows: int, weights: list[torch.Tensor], record: Any) -> linear.Way:
        asked.append((rows, *weights[0].shape))
        return turned

    monkeypatch.setattr(linear, "quickest", noted)
    narrow = NarrowLinears(layers)
    for rows in (3, 4, 3, 1):
        with torch.no_grad(), narrow.borrowed(rows):
            layers["large"](torch.ones(rows, 256))
    assert asked == [(4, 512, 256), (1, 512, 256)]


def test_the_choice_is_kept_between_starts(layers: nn.ModuleDict, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def noted(rows: int, weights: list[torch.Tensor], record: Any) -> linear.Way:
        measured.append(rows)
        return packed

    monkeypatch.setattr(linear, "quickest", noted)
    for _ in range(2):
        monkeypatch.setattr(linear, "CHOSEN", {})
        monkeypatch.setattr(linear, "CHOICES", Choices())
        assert linear.way_for(7, [layers["large"]], Captured) is packed
    assert measured == [8]
    linear.choose_again(torch.device("cpu"))
    linear.way_for(7, [layers["large"]], Captured)
    assert measured == [8, 8]


def test_two_processes_keep_each_others_choices() -> None:
    here, mine, yours = torch.device("cpu"), Choices(), Choices()
    assert mine.get(here, "4 rows") is None and yours.get(here, "4 rows") is None
    mine.put(here, "4 rows", "turned")
    yours.put(here, "8 rows", "packed")
    assert [Choices().get(here, what) for what in ("4 rows", "8 rows")] == ["turned", "packed"]
    assert yours.get(here, "4 rows") == "turned"


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "behind its back", "as a whole"])
def test_packed_copies_follow_their_weights(
    layers: nn.ModuleDict, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "quickest", lambda rows, weights, record: packed)
    layer, given = layers["large"], torch.randn(3, 256)
    narrow = NarrowLinears(layers)
    with narrow.borrowed(3):
        before = layer(given)
    if change == "in place":
        layer.weight.mul_(2)
    elif change == "behind its back":
        layer.weight.data *= 2
    else:
        layer.weight = nn.Parameter(layer.weight * 2)
    narrow.begin()
    with narrow.borrowed(3):
        torch.testing.assert_close(layer(given), 2 * before)
    torch.testing.assert_close(layer(given), 2 * before)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(512, 256), (256, 512)], ids=str)
@pytest.mark.parametrize("change", ["in place", "behind its back"])
@pytest.mark.parametrize("part", ["rows", "columns"])
def test_a_change_that_leaves_the_sum_is_found(part: str, change: str, shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.arange(shape[0] * shape[1]).reshape(shape) % 251 - 125.0)
    given = torch.randn(3, shape[1])
    packed(given, weight)
    exchanged = weight if change == "in place" else weight.data
    for first in (0, 7, min(shape) - 3):
        here = exchanged if part == "rows" else exchanged.t()
        here[[first, first + 1]] = here[[first + 1, first]]
        linear.forget_changed([weight])
        torch.testing.assert_close(packed(given, weight), given @ weight.T, rtol=1e-4, atol=1e-2)


@torch.no_grad()
def test_a_weight_in_place_is_found_by_its_version_alone() -> None:
    weight = nn.Parameter(torch.randn(300, 260))
    given = torch.randn(3, 260)
    packed(given, weight)
    weight[3, 7] += 1000.0  # one number, which no sample has
    linear.forget_changed([weight])
    torch.testing.assert_close(packed(given, weight), given @ weight.T, rtol=1e-4, atol=1e-2)


@torch.no_grad()
def test_a_packed_weight_that_stays_is_kept_and_few_of_its_numbers_are_read() -> None:
    with torch.inference_mode():
        odd = nn.Parameter(torch.full((300, 260), torch.nan), requires_grad=False)
    for weight in (nn.Parameter(torch.randn(300, 260)), odd):  # the second has no version, and nothing equals it
        packed(torch.randn(3, 260), weight)
        copy = linear._copies[weight]
        linear.forget_changed([weight])
        assert linear._copies[weight] is copy
        assert linear.sampled(weight).numel() == 300


def test_nothing_is_packed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.ones(256, 256)]
    assert packed in linear.ways_for(4, weights)
    monkeypatch.setattr(linear, "free_memory", lambda: 4.0 * 256 * 256 * 3)
    assert packed not in linear.ways_for(4, weights)
