"""The prices that `auto` decides by: measured when first needed, kept on disk, measured again if they drift."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from draftgraph.config import GraphConfig
from draftgraph.cost import CostModel
from draftgraph.drafting.device import DeviceDraft
from draftgraph.engine.borrowing import Loan
from draftgraph.generation import context_window
from draftgraph.models.cache import notice
from draftgraph.stats import Stats
from draftgraph.tuning import store
from draftgraph.tuning.latency import Latencies, MeasuredCost
from draftgraph.tuning.machine import Key, key_of
from draftgraph.tuning.measure import SECONDS, Levels, Passes, measure
from draftgraph.tuning.watch import Watch

if TYPE_CHECKING:
    from draftgraph.decoder import GraphDecoder

SMALLEST = 1 << 22  # weights that a pass reads: the overhead of a smaller model is all that could be measured


class Pricing(Protocol):
    """Gives the prices of a step."""

    name: str

    def at(self, context: int, stats: Stats) -> CostModel: ...


@dataclass
class FixedPricing:
    """Prices that somebody chose."""

    cost: CostModel
    name: str

    def at(self, context: int, stats: Stats) -> CostModel:
        return self.cost.at(context) if isinstance(self.cost, MeasuredCost) else self.cost


@dataclass
class MeasuredPricing:
    """Prices of one pair on this machine, for every decoder of this process."""

    key: Key
    cost: MeasuredCost | None = None
    watch: Watch = field(default_factory=Watch)
    failed: bool = False
    name: str = "measured"

    def at(self, context: int, stats: Stats) -> CostModel:
        assert self.cost is not None
        cost = self.cost.at(context)
        self.watch.follow(stats, cost)
        return cost

    def prepare(self, decoder: GraphDecoder, config: GraphConfig) -> bool:
        """Reads or measures what is missing; False if that cannot be done."""
        if self.cost is None and (known := store.read(self.key)) is not None:
            self.cost = MeasuredCost(known)
        missing = self.cost is None or self.cost.latencies.bound < config.nodes
        if (missing or self.watch.due) and not self.failed:
            what = "measuring what passes cost on this machine, once"
            if not missing:
                what = f"steps take {self.watch.ratio:.1f} times what was measured: measuring again"
            notice(f"{what} ({SECONDS:.0f} to {2 * SECONDS:.0f} seconds)")
            try:
                self.renew(decoder, config)
            except Exception as error:  # whatever it is, decoding does without
                self.failed = True
                notice(f"passes cannot be measured ({type(error).__name__}: {error}): going on without")
        return self.cost is not None

    def renew(self, decoder: GraphDecoder, config: GraphConfig) -> Latencies:
        """Measures now, and keeps the result."""
        latencies = measure_pair(decoder, config)
        store.write(self.key, latencies)
        self.cost = MeasuredCost(latencies)
        self.watch.measured()
        return latencies


_shared: dict[Path, MeasuredPricing] = {}  # by the file that keeps them


def pricing_of(decoder: GraphDecoder, config: GraphConfig) -> Pricing:
    """What a request with this configuration is to decide by."""
    if isinstance(config.cost, CostModel):
        name = "measured" if isinstance(config.cost, MeasuredCost) else type(config.cost).__name__
        return FixedPricing(config.cost, name)
    if config.mode == "auto" and config.cost == "measured" and decoder.target_weights >= SMALLEST:
        measured = measured_pricing(decoder)
        if measured.prepare(decoder, config):
            return measured
    return FixedPricing(decoder.flat_cost, "flat")


def measured_pricing(decoder: GraphDecoder) -> MeasuredPricing:
    draft = None if decoder.draft_engine is None else (decoder.draft_model, decoder.draft_engine)
    key = key_of((decoder.target_model, decoder.target_engine), draft)
    return _shared.setdefault(store.file_of(key), MeasuredPricing(key))


def measure_pair(decoder: GraphDecoder, config: GraphConfig, seconds: float = SECONDS) -> Latencies:
    windows = [window for model in decoder.models if (window := context_window(model)) is not None]
    subjects = [Passes(decoder.target_engine, len(decoder.target_model.get_input_embeddings().weight))]
    if decoder.draft_engine is not None:
        vocabulary = decoder.draft_vocabulary
        draft = decoder.draft_proposer(config, frozenset())
        if isinstance(draft, DeviceDraft):
            draft.levels, draft.perturb = config.levels, None
            subjects.append(Levels(decoder.draft_engine, vocabulary.readable, draft=draft))
        else:
            subjects.append(Passes(decoder.draft_engine, vocabulary.readable, vocabulary, config.k))
    with Loan(*decoder.models):
        return measure(subjects, min(windows, default=None), config.nodes, seconds)
