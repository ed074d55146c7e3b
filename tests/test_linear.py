"""Products of few rows: the quickest way is taken and kept, and modules are left as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftgraph.engine.borrowing import NarrowLinears
from draftgraph.engine.capture import Captured
from draftgraph.kernels import linear
from draftgraph.kernels.linear import Choices, direct, quickest


def turned(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Another way."""
    return torch.mm(weight, rows.t()).t().contiguous()


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a CPU in the place of a GPU."""
    monkeypatch.setattr(linear, "CHOSEN", {})
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(linear, "CHOICES", Choices())
    monkeypatch.setattr(linear, "KINDS", ("cpu",))
    monkeypatch.setattr(linear, "DTYPES", (torch.float32,))
    monkeypatch.setattr(linear, "ways_for", lambda device: [direct, turned])


@pytest.fixture
def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    large, biased = nn.Linear(256, 512, bias=False), nn.Linear(512, 256)
    return nn.ModuleDict({"large": large, "biased": biased, "small": nn.Linear(16, 16), "table": nn.Embedding(512, 8)})


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 2), (2, 40)])
@torch.no_grad()
def test_borrowed_layers_say_what_they_said(
    layers: nn.ModuleDict, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "quickest", lambda rows, weights, record: turned)
    given = torch.randn(*shape, 256)

    def says() -> Any:
        return layers["biased"](layers["large"](given))

    before = says()
    with NarrowLinears(layers).borrowed(shape[1]):
        during = says()
    assert during.shape == before.shape
    torch.testing.assert_close(during, before)


def test_only_large_layers_of_known_numbers_are_borrowed_and_all_are_given_back(layers: nn.ModuleDict) -> None:
    half = nn.Linear(256, 512).to(torch.bfloat16)
    layers["sixteen"] = half

    def changed() -> set[str]:
        return {name for name, module in layers.items() if "forward" in vars(module)}

    narrow = NarrowLinears(layers)
    with pytest.raises(KeyError), narrow.borrowed(4):
        assert changed() == {"large", "biased"}
        raise KeyError
    assert not changed()
    with narrow.borrowed(65):
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


@pytest.mark.parametrize(("cost", "best"), [(2.0, "turned"), (2.95, "direct"), (4.0, "direct")])
def test_the_quickest_way_is_taken(cost: float, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({direct: 3.0, turned: cost})
    ways = {way.__name__: clock.timed(way) for way in (direct, turned)}
    monkeypatch.setattr(linear, "direct", ways["direct"])
    monkeypatch.setattr(linear, "ways_for", lambda device: list(ways.values()))
    monkeypatch.setattr(linear, "time", clock)
    assert quickest(2, [torch.ones(64, 32)] * 3, Captured) is ways[best]


def test_each_shape_is_measured_once(layers: nn.ModuleDict, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def noted(rows: int, weights: list[torch.Tensor], record: Any) -> linear.Way:
        asked.append((rows, *weights[0].shape))
        return turned

    monkeypatch.setattr(linear, "quickest", noted)
    narrow = NarrowLinears(layers)
    for rows in (3, 16, 3, 17):
        with torch.no_grad(), narrow.borrowed(rows):
            layers["large"](torch.ones(rows, 256))
    assert asked == [(16, 512, 256), (64, 512, 256)]


def test_the_choice_is_kept_between_starts(layers: nn.ModuleDict, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def noted(rows: int, weights: list[torch.Tensor], record: Any) -> linear.Way:
        measured.append(rows)
        return turned

    monkeypatch.setattr(linear, "quickest", noted)
    for _ in range(2):
        monkeypatch.setattr(linear, "CHOSEN", {})
        monkeypatch.setattr(linear, "CHOICES", Choices())
        assert linear.way_for(7, [layers["large"]], Captured) is turned
    assert measured == [16]
    linear.choose_again(torch.device("cpu"))
    linear.way_for(7, [layers["large"]], Captured)
    assert measured == [16, 16]


def test_two_processes_keep_each_others_choices() -> None:
    here, mine, yours = torch.device("cpu"), Choices(), Choices()
    assert mine.get(here, "4 rows") is None and yours.get(here, "4 rows") is None
    mine.put(here, "4 rows", "turned")
    yours.put(here, "8 rows", "direct")
    assert [Choices().get(here, what) for what in ("4 rows", "8 rows")] == ["turned", "direct"]
    assert yours.get(here, "4 rows") == "turned"
