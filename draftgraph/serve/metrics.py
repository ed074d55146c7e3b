"""Figures for Prometheus: of requests, of the engine, and of how well drafting goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from draftgraph.batching.job import Progress
    from draftgraph.serve.generation import Answer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
TOKENS_PER_PASS = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
LAST_POSITION = 64  # in a draft: further ones, of which there can be many, are counted together
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
        self.stream_errors = self._counter("stream_errors", "Streams that ended with an error, by its code", ["code"])
        self.answers = self._counter("answers", "Answers by how they ended", ["finished_reason"])
        self.answer_seconds = self._histogram("answer_seconds", "Until one answer is complete", SECONDS)
        self.queue_seconds = self._histogram("queue_seconds", "Until a request had a place", SECONDS)
        self.first_token = self._histogram("time_to_first_token_seconds", "Until the first new token", SECONDS)
        self.per_token = self._histogram("time_per_token_seconds", "For each token after the first", TOKEN_SECONDS)
        self.per_pass = self._histogram("tokens_per_pass", "New tokens per pass of the target", TOKENS_PER_PASS)
        self.prompt_tokens = self._histogram("prompt_tokens", "Tokens of prompts", TOKENS)
        self.new_tokens = self._histogram("new_tokens", "Tokens of answers", TOKENS)
        self.tokens = self._counter("tokens", "New tokens by where they came from", ["source"])
        self.reused = self._counter("reused_prompt_tokens", "Prompt tokens that were known already")
        self.passes = self._counter("passes", "Passes of the target that gave tokens, one for each text in them")
        self.drafts = self._counter("drafts", "Passes that had a draft to check, one for each text in them")
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
        """Of an answer that is complete: how long its client waited."""
        self.answers.labels(answer.finish_reason).inc()
        self.answer_seconds.observe(seconds)
        if answer.first_token_seconds is not None:
            self.first_token.observe(answer.first_token_seconds)
            if answer.tokens > 1:
                self.per_token.observe((seconds - answer.first_token_seconds) / (answer.tokens - 1))

    def count_job(self, progress: Progress) -> None:
        """Of a job that has ended in whatever way: what the engine did for it.

        Tokens and drafts are counted here and nowhere else, so that their figures can be divided by one another.
        """
        stats = progress.stats or {}
        if (waited := stats.get("queue_seconds")) is not None:
            self.queue_seconds.observe(waited)
        if "steps" not in stats:  # it never had a place
            return
        steps, tokens, accepted = stats["steps"], stats["new_tokens"], stats["accepted_by_source"]
        self.prompt_tokens.observe(stats["prompt_tokens"])
        self.reused.inc(stats["reused_tokens"])
        self.new_tokens.observe(tokens)
        self.passes.inc(steps)
        self.drafts.inc(stats["drafts"])
        if steps:
            self.per_pass.observe(tokens / steps)
        for counter, counts in (
            (self.tokens, accepted | {"target": tokens - sum(accepted.values())}),
            (self.accepted, accepted),
            (self.drafted, stats["checked_by_source"]),
            (self.drafted_at, stats["checked_by_depth"]),
            (self.accepted_at, stats["accepted_by_depth"]),
        ):
            for label, count in counts.items():
                counter.labels(known_label(label)).inc(count)

    def show_engine(self, is_ready: bool, figures: dict[str, Any]) -> None:
        self.ready.set(is_ready)
        for name, gauge in self.engine.items():
            gauge.set(figures.get(name) or 0)


def written(figures: Iterable[Metric]) -> bytes:
    """As Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(figures))
    return generate_latest(registry)


def labelled(by_server: Iterable[tuple[str, Sequence[Metric]]]) -> list[Metric]:
    """The figures of several servers as one: whose a figure is says its label `replica`."""
    found: dict[str, Metric] = {}
    for server, figures in by_server:
        for figure in figures:
            family = found.setdefault(figure.name, Metric(figure.name, figure.documentation, figure.type))
            family.samples += [one._replace(labels=one.labels | {"replica": server}) for one in figure.samples]
    return list(found.values())


class Collected(Collector):
    def __init__(self, figures: Iterable[Metric]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return self._figures


class VLLMNames(Collector):
    """Figures under the names that vLLM's dashboards and benchmarks look for, older names included."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics, self._model = metrics, {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, metric in (
            ("num_requests_running", metrics.engine["running"]),
            ("num_requests_waiting", metrics.engine["waiting"]),
            ("request_success", metrics.answers),
            ("prefix_cache_hits", metrics.reused),
            ("spec_decode_num_drafts", metrics.drafts),
            ("time_to_first_token_seconds", metrics.first_token),
            ("request_time_per_output_token_seconds", metrics.per_token),
            ("inter_token_latency_seconds", metrics.per_token),
            ("time_per_output_token_seconds", metrics.per_token),
            ("e2e_request_latency_seconds", metrics.answer_seconds),
            ("request_queue_time_seconds", metrics.queue_seconds),
            ("request_prompt_tokens", metrics.prompt_tokens),
            ("request_generation_tokens", metrics.new_tokens),
        ):
            yield self._renamed(name, metric)
        for name, help, value in (
            ("prompt_tokens", "Tokens of prompts", total(metrics.prompt_tokens, "_sum")),
            ("generation_tokens", "New tokens", total(metrics.tokens)),
            ("prefix_cache_queries", "Tokens of prompts", total(metrics.prompt_tokens, "_sum")),
            ("spec_decode_num_draft_tokens", "Tokens that the target checked", total(metrics.drafted)),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", total(metrics.accepted)),
        ):
            yield self._family("counter", name, help, [("_total", {}, value)])
        usage = total(metrics.engine["slots_used"], "") / max(1.0, total(metrics.engine["slots_total"], ""))
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._family("gauge", name, "Share of key-value slots in use", [("", {}, usage)])
        by_place = [
            ("_total", {"position": str(int(place) - 1)}, count)  # vLLM counts from 0
            for place, count in totals(metrics.accepted_at).items()
            if place.isdigit()
        ]
        yield self._family("counter", "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place", by_place)

    def _renamed(self, name: str, metric: Counter | Gauge | Histogram) -> Metric:
        (ours,) = metric.collect()
        samples = [(one.name.removeprefix(ours.name), one.labels, one.value) for one in ours.samples]
        return self._family(ours.type, name, ours.documentation, samples)

    def _family(self, kind: str, name: str, help: str, samples: Iterable[tuple[str, dict[str, str], float]]) -> Metric:
        family = Metric(f"vllm:{name}", help, kind)
        for suffix, labels, value in samples:
            family.add_sample(family.name + suffix, self._model | labels, value)
        return family


def known_label(label: str) -> str:
    """A source as it is; of positions, which clients can make many of, those past the last have one label."""
    return f"over {LAST_POSITION}" if label.isdigit() and int(label) > LAST_POSITION else label


def totals(metric: Counter | Gauge | Histogram, suffix: str = "_total") -> dict[str, float]:
    """By the one label that a metric has, or by nothing."""
    samples = [sample for family in metric.collect() for sample in family.samples if sample.name.endswith(suffix)]
    return {next(iter(sample.labels.values()), ""): sample.value for sample in samples}


def total(metric: Counter | Gauge | Histogram, suffix: str = "_total") -> float:
    return sum(totals(metric, suffix).values())
