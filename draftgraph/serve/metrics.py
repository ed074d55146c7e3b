"""Figures for Prometheus: of requests, of the engine, and of how well drafting goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from draftgraph.batching.job import Progress
    from draftgraph.serve.generation import Answer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
TOKENS_PER_PASS = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
LAST_POSITION = 64
ENGINE_FIGURES = {
    "running": "Requests that are being answered",
    "waiting": "Requests that wait for a place",
    "batch_size": "Texts in the last pass of the target",
    "slots_used": "Key-value slots in use",
    "slots_total": "Key-value slots there are",
}


class Metrics:
    """All of one server's figures, in a registry of their own."""

    def __init__(self, model_name: str, vllm_names: bool = False) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by route and status", ["route", "status"])
        self.request_seconds = self._histogram("request_seconds", "Until an answer is complete", SECONDS, ["route"])
        self.queue_seconds = self._histogram("queue_seconds", "Until a request had a place", SECONDS)
        self.first_token = self._histogram("time_to_first_token_seconds", "Until the first new token", SECONDS)
        self.per_token = self._histogram("time_per_token_seconds", "For each token after the first", TOKEN_SECONDS)
        self.per_pass = self._histogram("tokens_per_pass", "New tokens per pass of the target", TOKENS_PER_PASS)
        self.prompt_tokens = self._histogram("prompt_tokens", "Tokens of prompts", TOKENS)
        self.new_tokens = self._histogram("new_tokens", "Tokens of answers", TOKENS)
        self.tokens = self._counter("tokens", "New tokens by where they came from", ["source"])
        self.reused = self._counter("reused_prompt_tokens", "Prompt tokens that were known already")
        self.passes = self._counter("passes", "Passes of the target that gave tokens, one for each text in them")
        self.drafted = self._counter("drafted_tokens", "Tokens that the target checked", ["source"])
        self.accepted = self._counter("accepted_tokens", "Drafted tokens that the target agreed with", ["source"])
        self.drafted_at = self._counter("drafted_tokens_by_position", "Checked, by place in a draft", ["position"])
        self.accepted_at = self._counter("accepted_tokens_by_position", "Accepted, by place in a draft", ["position"])
        self.ready = Gauge("draftgraph_ready", "Whether the model can answer", registry=registry)
        self.failures = self._counter("engine_failures", "Times that the engine process failed")
        self.engine = {
            name: Gauge(f"draftgraph_{name}", help, registry=registry) for name, help in ENGINE_FIGURES.items()
        }
        if vllm_names:
            registry.register(VLLMNames(self, model_name))

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(f"draftgraph_{name}", help, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"draftgraph_{name}", help, labels, registry=self.registry)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def count_answer(self, answer: Answer, seconds: float) -> None:
        """Of an answer that is complete."""
        self.prompt_tokens.observe(len(answer.job.tokens))
        self.new_tokens.observe(answer.tokens)
        self.passes.inc(answer.steps)
        for source, count in answer.sources.items():
            self.tokens.labels(source).inc(count)
            if source != "target":
                self.accepted.labels(source).inc(count)
        if answer.first_token_seconds is not None:
            self.first_token.observe(answer.first_token_seconds)
            self.per_pass.observe(answer.tokens / answer.steps)
            if answer.tokens > 1:
                self.per_token.observe((seconds - answer.first_token_seconds) / (answer.tokens - 1))

    def count_stats(self, progress: Progress) -> None:
        """Of a job that is done, from the engine's figures."""
        stats = progress.stats or {}
        if (waited := stats.get("queue_seconds")) is not None:
            self.queue_seconds.observe(waited)
        self.reused.inc(stats.get("reused_tokens") or 0)
        for counter, name in (
            (self.drafted, "checked_by_source"),
            (self.drafted_at, "checked_by_depth"),
            (self.accepted_at, "accepted_by_depth"),
        ):
            for label, count in (stats.get(name) or {}).items():
                counter.labels(known_label(label)).inc(count)

    def show_engine(self, is_ready: bool, figures: dict[str, Any]) -> None:
        self.ready.set(is_ready)
        for name, gauge in self.engine.items():
            gauge.set(figures.get(name) or 0)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class VLLMNames(Collector):
    """The figures of drafting under the names that vLLM's dashboards and benchmarks look for."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics, self._model = metrics, model_name

    def collect(self) -> Iterator[CounterMetricFamily]:
        metrics = self._metrics
        for name, help, counter in (
            ("drafts", "Number of spec decoding drafts.", metrics.passes),
            ("draft_tokens", "Number of draft tokens.", metrics.drafted),
            ("accepted_tokens", "Number of accepted tokens.", metrics.accepted),
        ):
            family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", help, labels=["model_name"])
            family.add_metric([self._model], sum(totals(counter).values()))
            yield family
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            labels=["model_name", "position"],
        )
        for place, count in totals(metrics.accepted_at).items():
            by_place.add_metric([self._model, str(int(place) - 1)], count)  # vLLM counts from 0
        yield by_place


def known_label(label: str) -> str:
    """A source as it is; of positions, which clients can make many of, the last stands for all further ones."""
    return str(min(int(label), LAST_POSITION)) if label.isdigit() else label


def totals(counter: Counter) -> dict[str, float]:
    """By the one label that a counter has, or by nothing."""
    samples = [sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")]
    return {next(iter(sample.labels.values()), ""): sample.value for sample in samples}
