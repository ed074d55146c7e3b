"""The prices that `auto` decides by: measured when first needed, kept on disk, measured again if they drift."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from draftgraph import __version__, private
from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.latency import Latencies, MeasuredCost
from draftgraph.cost.measure import SECONDS
from draftgraph.cost.sharing import in_seconds
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.protocol import Engine
from draftgraph.files import cache_dir, replacing
from draftgraph.hardware import available_cores, device_name, digest
from draftgraph.notices import notice
from draftgraph.stats import Stats

FORMAT = 3
NAMES = ("_name_or_path", "transformers_version", "draftgraph_token_map")  # tell weights apart, not what they cost

Key = dict[str, Any]
_sizes: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()  # looked at once

STEPS = 50  # that are judged together
OFF = 0.25
PAUSE = 300.0  # seconds between two measurements, and before the first: a short session does not wait for one

SMALLEST = 1 << 22  # weights that a pass reads: the overhead of a smaller model is all that could be measured
Measure = Callable[[], Latencies]


class Watch:
    """Asks for another measurement when steps take longer, or less, than their prices say.

    Some of a step is not priced: processors, copies, what stands by. So if a new measurement leaves the ratio as it
    was, that ratio is the usual one from then on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.usual = 1.0
        self.ratio = 1.0  # observed to predicted, in the last steps that were judged
        self._clock = clock
        self._off = False
        self._before: float | None = None  # the ratio that the last measurement was to mend
        self._measured_at = clock()
        self._stats: Stats | None = None
        self._seen: tuple[float, ...] = ()
        self._begin()

    @property
    def due(self) -> bool:
        return self._off and self._clock() - self._measured_at >= PAUSE

    @property
    def off_by(self) -> float | None:
        """The ratio, where it is not the usual one."""
        return self.ratio if self._off else None

    def resume(self, usual: float, off_by: float | None, age: float) -> None:
        """Where an earlier process has left it, with prices that were measured so many seconds ago."""
        self.usual = usual
        if off_by is not None:
            self.ratio, self._off, self._measured_at = off_by, True, self._clock() - age

    def measured(self) -> None:
        self._before = self.ratio if self._off else None
        self._measured_at = self._clock()
        self._begin()

    def follow(self, stats: Stats, cost: Any) -> None:
        """Called when a step begins: looks at those before it."""
        seconds = sum(stats.seconds.values()) - stats.seconds["prefill"]
        now = (stats.steps, stats.draft_passes, stats.draft_tokens, stats.verified_tokens, seconds)
        if stats is self._stats and stats.steps == self._seen[0] + 1:
            _, passes, fed, checked, taken = (after - before for after, before in zip(now, self._seen, strict=True))
            self.add(cost.of_step(int(passes), int(fed), int(checked)), taken)
        self._stats, self._seen = stats, now

    def add(self, predicted: float, observed: float) -> None:
        self._steps += 1
        self._predicted += predicted
        self._observed += observed
        if self._steps == STEPS:
            self._judge()

    def _judge(self) -> None:
        self.ratio = self._observed / self._predicted
        self._begin()
        self._off = not near(self.ratio, self.usual)
        if self._off and self._before is not None and near(self.ratio, self._before):
            self.usual, self._off = self.ratio, False

    def _begin(self) -> None:
        self._steps, self._predicted, self._observed, self._off = 0, 0.0, 0.0, False


def near(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1.0) <= OFF


class Pricing(Protocol):
    """Gives the prices of a step."""

    name: str

    @property
    def in_seconds(self) -> bool:
        """Whether the time of steps can be compared with them."""

    def at(self, context: int) -> CostModel:
        """Behind a text of so many tokens."""

    def follow(self, stats: Stats, cost: CostModel) -> None:
        """Called when a step of a sequence alone begins: compares what those before it took with what they cost."""


@dataclass
class FixedPricing:
    """Prices that somebody chose."""

    cost: CostModel
    name: str

    @property
    def in_seconds(self) -> bool:
        return in_seconds(self.cost)

    def at(self, context: int) -> CostModel:
        return self.cost.at(context) if isinstance(self.cost, MeasuredCost) else self.cost

    def follow(self, stats: Stats, cost: CostModel) -> None: ...


@dataclass
class MeasuredPricing:
    """Prices of one pair on this machine, for every decoder of this process."""

    key: Key
    cost: MeasuredCost | None = None
    watch: Watch = field(default_factory=Watch)
    failed: bool = False
    name: str = "measured"
    in_seconds: bool = True
    _measured_at: float = 0.0

    def at(self, context: int) -> CostModel:
        assert self.cost is not None
        return self.cost.at(context)

    def follow(self, stats: Stats, cost: CostModel) -> None:
        before = self.watch.usual, self.watch.off_by is None
        self.watch.follow(stats, cost)
        if self.cost is not None and before != (self.watch.usual, self.watch.off_by is None):
            self._keep()

    def prepare(self, nodes: int, measure: Measure) -> bool:
        """Reads or measures what is missing for passes of so many nodes; False if that cannot be done."""
        if self.cost is None and (kept := read(self.key)) is not None:
            self.cost, self._measured_at = MeasuredCost(kept.latencies), kept.measured_at
            self.watch.resume(kept.usual, kept.off_by, time.time() - kept.measured_at)
        missing = self.cost is None or self.cost.latencies.bound < nodes
        if (missing or self.watch.due) and not self.failed:
            what = "measuring what passes cost on this machine, once"
            if not missing:
                what = f"steps take {self.watch.ratio:.1f} times what was measured: measuring again"
            notice(f"{what} ({SECONDS:.0f} to {2 * SECONDS:.0f} seconds)")
            try:
                self.renew(measure)
            except Exception as error:  # whatever it is, decoding does without
                self.failed = True
                notice(f"passes cannot be measured ({type(error).__name__}: {error}): going on without")
        return self.cost is not None

    def renew(self, measure: Measure) -> Latencies:
        """Measures now, and keeps the result."""
        latencies = measure()
        self.cost, self._measured_at = MeasuredCost(latencies), time.time()
        self.watch.measured()
        self._keep()
        return latencies

    def _keep(self) -> None:
        """With what the watch says: a process that ends before it may measure again leaves that to the next."""
        assert self.cost is not None
        write(self.key, Kept(self.cost.latencies, self._measured_at, self.watch.usual, self.watch.off_by))


_shared: dict[Path, MeasuredPricing] = {}  # by the file that keeps them


def pricing_for(
    config: GraphConfig, flat: CostModel, weights: int, key: Callable[[], Key], measure: Measure
) -> Pricing:
    """What a request with this configuration is to decide by, for a target that reads so many weights in a pass."""
    if isinstance(config.cost, CostModel):
        return FixedPricing(config.cost, "measured" if in_seconds(config.cost) else type(config.cost).__name__)
    if config.mode == "auto" and config.cost == "measured" and weights >= SMALLEST:
        measured = measured_pricing(key())
        if measured.prepare(config.nodes, measure):
            return measured
    return FixedPricing(flat, "flat")


def measured_pricing(key: Key) -> MeasuredPricing:
    return _shared.setdefault(file_of(key), MeasuredPricing(key))


def key_of(target: tuple[Any, Engine], draft: tuple[Any, Engine] | None) -> Key:
    """Two measurements with one key may stand for each other."""
    return {
        "format": FORMAT,
        "draftgraph": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(target[1].device),
        "threads": torch.get_num_threads(),
        "cores": available_cores(),
        "float32": torch.get_float32_matmul_precision(),
        "target": identity(*target),
        "draft": None if draft is None else identity(*draft),
    }


def identity(model: Any, engine: Engine) -> dict[str, str]:
    """A model by its architecture, sizes and number formats; retrained, it is the same one."""
    inner = unwrapped(model)
    if model not in _sizes:
        settings = {name: value for name, value in inner.config.to_dict().items() if name not in NAMES}
        weights = [*model.named_parameters(), *model.named_buffers()]
        formats = [(name, type(one.data).__name__, list(one.shape), one.dtype, one.device) for name, one in weights]
        _sizes[model] = {"settings": digest(settings), "weights": digest(formats)}
    kinds = f"{', captured' * engine.captured}{', compiled' * engine.compiled}{', chains' * (not engine.branching)}"
    ranks = f", {engine.ranks} ranks" if engine.ranks > 1 else ""
    return {
        "class": type(inner).__name__,
        "engine": f"{type(engine).__name__}{kinds}{ranks}",
        "attention": str(private.attention_of(inner.config)),
        "dtype": str(inner.dtype),
    } | _sizes[model]


def file_of(key: Key) -> Path:
    return cache_dir() / "costs" / f"{digest(key)}.json"


@dataclass(frozen=True)
class Kept:
    """What the file of a pair's prices has beside its key."""

    latencies: Latencies
    measured_at: float  # by the clock of the world
    usual: float  # see `Watch`
    off_by: float | None


def read(key: Key) -> Kept | None:
    """What was measured for this key; a file that is damaged, or not for it, counts for nothing."""
    file = file_of(key)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError("it is of another machine or model")
        latencies = Latencies.from_dict(content["latencies"])
        return Kept(latencies, content["measured_at"], content["usual"], content["off_by"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        notice(f"cannot use {file} ({type(error).__name__}: {error}): passes are measured again")
        return None


def write(key: Key, kept: Kept) -> None:
    file, content = file_of(key), {"key": key, **vars(kept), "latencies": kept.latencies.to_dict()}
    with suppress(OSError):  # only time is lost
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
