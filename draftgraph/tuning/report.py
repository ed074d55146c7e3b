"""What `draftgraph tune` found, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.config import GraphConfig
from draftgraph.tuning.choice import Choice, choice
from draftgraph.tuning.latency import Curve, Latencies, MeasuredCost

if TYPE_CHECKING:
    from draftgraph.decoder import GraphDecoder

HITS = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class TuneReport:
    """Latencies of a pair, and what `auto` makes of them."""

    target: str
    draft: str | None
    settings: dict[str, Any]  # device, number format, threads
    latencies: Latencies
    choices: list[Choice]  # behind the shortest text, with nothing to copy
    file: str | None  # where later starts find them; None: nowhere
    used: bool  # False: the model is too small for `auto` to go by them

    @property
    def curves(self) -> dict[str, Curve]:
        named = {"target": self.latencies.target, "draft": self.latencies.draft}
        return {name: curve for name, curve in named.items() if curve is not None}

    def in_passes(self, curve: Curve, context: int, nodes: int) -> float:
        """A pass in passes of the target over one token, behind the same text."""
        return curve.measured(context, nodes) / self.latencies.target.measured(context, 1)

    def to_dict(self) -> dict[str, Any]:
        passes = [
            {
                "model": name,
                "context": context,
                "nodes": nodes,
                "ms": 1000 * curve.measured(context, nodes),
                "one_token_passes": self.in_passes(curve, context, nodes),
            }
            for name, curve in self.curves.items()
            for context in curve.contexts
            for nodes in curve.nodes
        ]
        head = {"target": self.target, "draft": self.draft} | self.settings | {"seconds": self.latencies.took}
        chosen = [asdict(one) for one in self.choices]
        return head | {"file": self.file, "used": self.used, "passes": passes, "choices": chosen}

    def save(self, folder: Path) -> None:
        """Writes latency.json, latency.svg and latency.png."""
        from draftgraph.tuning.plot import plot

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "latency.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        figure = plot(self)
        for kind in ("svg", "png"):
            figure.savefig(folder / f"latency.{kind}", dpi=150)


def tune(decoder: GraphDecoder, config: GraphConfig, target: str, draft: str | None) -> TuneReport:
    """Measures now, whatever is known, and keeps the result for later starts. Only here products are chosen again, too:
    in half precision other ways of computing them may answer otherwise where two tokens tie."""
    from draftgraph.kernels.linear import choose_again
    from draftgraph.tuning import store
    from draftgraph.tuning.prices import SMALLEST, measured_pricing

    pricing = measured_pricing(decoder)
    choose_again(decoder.target_engine.device)
    latencies = pricing.renew(decoder, config)
    cost, file = MeasuredCost(latencies), store.file_of(pricing.key)
    choices = [choice(cost, hit, config) for hit in HITS] if latencies.draft is not None else []
    settings = {
        "device": pricing.key["device"],
        "dtype": pricing.key["target"]["dtype"].removeprefix("torch."),
        "threads": pricing.key["threads"],
        "engine": pricing.key["target"]["engine"],
    }
    kept, used = str(file) if file.exists() else None, decoder.target_weights >= SMALLEST
    return TuneReport(target, draft, settings, latencies, choices, kept, used)
