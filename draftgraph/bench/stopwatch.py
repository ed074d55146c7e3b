"""One answer in one mode, measured: seconds to the first token and from there to the end, memory and energy."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from draftgraph.bench.answers import loops
from draftgraph.bench.rescoring import rescored
from draftgraph.bench.runs import PLAIN, Record, digest
from draftgraph.bench.sameness import Difference, Gaps, difference
from draftgraph.config import GraphConfig
from draftgraph.cost.latency import MeasuredCost
from draftgraph.decoder import Decoding
from draftgraph.engine.protocol import Segment
from draftgraph.inspect import GraphReport
from draftgraph.pair import Pair
from draftgraph.stats import Step


class Meters:
    """Memory and energy of a target's device. Made before its engines, to tell weights from other memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        self._energy = energy_counter(device)
        self._millijoules = 0

    def begin(self) -> None:
        if self._weights is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.wait()
        if self._energy is not None:
            self._millijoules = self._energy()

    def wait(self) -> None:
        """Until the device is idle."""
        if self._weights is not None:
            torch.cuda.synchronize(self.device)

    def read(self) -> Record:
        """Since `begin`: what is held beside the weights at most, and joules of the whole device. On a CPU there is
        only the largest size that this process ever had."""
        found: Record = {}
        if self._weights is not None:
            found["extra_bytes"] = torch.cuda.max_memory_allocated(self.device) - self._weights
        elif (resident := peak_resident_bytes()) is not None:
            found["resident_bytes"] = resident
        if self._energy is not None:
            found["joules"] = (self._energy() - self._millijoules) / 1000
        return found


def peak_resident_bytes() -> int | None:
    """The peak size of this process; None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def energy_counter(device: torch.device) -> Any:
    """A function that gives millijoules since the driver was loaded; None: no NVML, or a GPU that does not count."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # NVML has an error class for each of its reasons
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


WARM_UP_STEPS = 24


@dataclass
class Stopwatch:
    """Decodes prompts with a pair, one at a time."""

    pair: Pair
    modes: dict[str, GraphConfig]
    arguments: Mapping[str, Any]  # of `Pair.start`: sampling, and how many new tokens

    def __post_init__(self) -> None:
        self._widest = 0  # nodes of a pass, so far
        self.meters = Meters(self.pair.target.get_input_embeddings().weight.device)
        start = time.perf_counter()
        _ = self.pair.decoder  # checks the models, and makes their engines
        self.engines_took = time.perf_counter() - start

    def warm_up(self, mode: str, prompt: str) -> Record:
        """Do all one-time work: prices are measured, kernels compiled, passes of every width captured."""
        self.meters.begin()
        start = time.perf_counter()
        decoding = self._start(mode, prompt)
        if decoding.prices is not None:  # not measured again between timed runs
            cost = decoding.pricing.at(0)
            self.modes[mode] = replace(self.modes[mode], cost=cost)
        steps = list(islice(decoding.steps(), WARM_UP_STEPS))
        if decoding.config.nodes > self._widest:  # the engine is that of all modes
            pass_of_every_width(decoding)
            self._widest = decoding.config.nodes
        self.meters.wait()
        seconds = time.perf_counter() - start
        about = {"mode": mode, "prices": decoding.prices, "seconds": seconds} | self.meters.read()
        prices = self.modes[mode].cost
        curves = {"latencies": prices.latencies.to_dict()} if isinstance(prices, MeasuredCost) else {}
        return about | curves | self._example(mode, steps)

    def run(self, mode: str, prompt: str, plain: Sequence[int] | None) -> Record:
        """An answer and its figures, compared with the tokens of plain decoding where they are known."""
        self.meters.begin()
        start = time.perf_counter()
        decoding = self._start(mode, prompt)
        self.meters.wait()
        has_read = time.perf_counter()
        decoding.step()
        has_begun = time.perf_counter()
        for _ in decoding:
            pass
        seconds = time.perf_counter() - has_read
        taken = self.meters.read()
        tokens, stats = decoding.new_tokens, decoding.stats
        return {
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": len(tokens),
            "seconds": seconds,
            "ms_per_token": 1000 * seconds / len(tokens),
            "first_token_seconds": has_begun - start,
            "tokens_per_pass": stats.mean_accepted_length,
            "steps": stats.steps,
            "draft_passes": stats.draft_passes,
            "draft_tokens": stats.draft_tokens,
            "nodes": stats.verified_tokens,
            "accepted_by_source": stats.accepted_by_source,
            "checked_by_source": stats.checked_by_source,
            "accepted_by_depth": [stats.accepted_by_depth[depth] for depth in sorted(stats.accepted_by_depth)],
            "missed": stats.rejected_by,
            "phases": stats.seconds,
            **told(tokens, difference(decoding, tokens if plain is None else plain)),
            **taken,
            "tokens": tokens,
        }

    def compare(self, prompt: str, tokens: list[int], plain: Sequence[int] | None) -> Record:
        """What `run` says of its answer, for one that another library gave. Where tokens are sampled nothing is
        claimed: it draws other random numbers."""
        if plain is None or self.arguments.get("temperature"):
            return told(tokens, None) | {"same": None}
        return told(tokens, difference(self._start(PLAIN, prompt), plain, tokens) if tokens != plain else None)

    def rescore(self, prompt: str, tokens: Sequence[int]) -> Gaps:
        return rescored(self._start(PLAIN, prompt), tokens)

    def _example(self, mode: str, steps: Sequence[Step]) -> Record:
        """The step that accepted the most, for the page."""
        fullest = max(steps, key=lambda step: len(step.path), default=None)
        if fullest is None or len(fullest.tree) == 1:
            return {}
        return {"example": GraphReport.of([fullest], self.pair.tokenizer.decode, "", self.modes[mode]).to_json()}

    def _start(self, mode: str, prompt: str) -> Decoding:
        return self.pair.start(prompt, config=self.modes[mode], **self.arguments)


def told(tokens: list[int], other: Difference | None) -> Record:
    """An answer, and where it parts from that of plain decoding."""
    return {
        "same": other is None,
        "first_difference": None if other is None else other.place,
        "rounding_steps": None if other is None else other.rounding_steps,
        "tie": other is not None and other.is_tie,
        "loops": loops(tokens),
        "tokens_digest": digest(tokens),
    }


def pass_of_every_width(decoding: Decoding) -> None:
    """An engine may prepare for a width when it first meets it, and the answers to come may have other widths."""
    engine, context, width = decoding.engines.target, decoding.context, 1
    with decoding.loan:
        while width <= decoding.config.nodes:
            tokens, seen = np.full(width, decoding.text[-1]), np.tri(width, dtype=bool)
            engine.run([Segment(context, tokens, np.arange(width), seen)])
            context.forget(0)
            width *= 2
