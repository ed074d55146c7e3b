"""A span for each request, sent to a collector of OpenTelemetry (OTLP over HTTP). Of what was asked it has no text."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from draftgraph import __version__
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.extras import install_command
from draftgraph.notices import notice
from draftgraph.serve.settings import ServerSettings

if TYPE_CHECKING:
    from draftgraph.serve.generation import Generation
    from draftgraph.serve.guard import Outcome

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")  # which the exporter reads
PATH = "/v1/traces"
FLUSH_SECONDS = 2.0  # for the last spans when the server ends: a collector that is away must not hold it up
OPERATIONS = {"/v1/completions": "text_completion"}  # every other route chats
Attributes = dict[str, Any]


def tracing_of(settings: ServerSettings) -> Tracing | None:
    """None without an endpoint: then nothing of OpenTelemetry is imported."""
    endpoint = settings.otlp_endpoint
    if endpoint is None and not any(map(os.environ.get, ENDPOINTS)):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--otlp-endpoint must be the URL of a collector, as http://localhost:4318, not {endpoint!r}")
    try:
        return Tracing(settings)
    except ImportError as error:
        missing = f"traces need {error.name}: {install_command('otel')}"
        if endpoint is not None:
            raise DraftGraphError(missing) from error
        notice(missing)  # the variable may be set for every process of a cluster
        return None


class Tracing:
    def __init__(self, settings: ServerSettings) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = settings.otlp_endpoint
        endpoint = None if given is None else given.rstrip("/").removesuffix(PATH) + PATH
        name = os.environ.get("OTEL_SERVICE_NAME", "draftgraph")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("draftgraph.serve", __version__)
        self._propagator, self._model = TraceContextTextMapPropagator(), settings.model_name

    def record(self, outcome: Outcome, headers: dict[str, str], generation: Generation | None) -> None:
        """Of a request that has ended, under the span that its client named in `traceparent`."""
        from opentelemetry.trace import SpanKind, StatusCode

        ended = time.time_ns()
        attributes = attributes_of(outcome)
        name = f"{outcome.method} {outcome.route}"
        if generation is not None:
            attributes |= generation_attributes(generation, outcome.route, self._model)
            name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=ended - int(outcome.seconds * 1e9),
            attributes=attributes,
        )
        if outcome.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    def close(self) -> None:
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)


def attributes_of(outcome: Outcome) -> Attributes:
    found = {
        "http.request.method": outcome.method,
        "http.route": outcome.route,
        "http.response.status_code": outcome.status,
        "draftgraph.request_id": outcome.request_id,
    }
    if outcome.status >= 400:
        found["error.type"] = outcome.code or str(outcome.status)
    return found


def generation_attributes(generation: Generation, route: str, model: str) -> Attributes:
    """By the semantic conventions for generative AI; for times that those have no name for, by vLLM's names."""
    answers, usage = list(generation.answers.values()), generation.usage()
    first, job = [one.first_token_seconds for one in answers if one.first_token_seconds is not None], answers[0].job
    found = {
        "gen_ai.operation.name": OPERATIONS.get(route, "chat"),
        "gen_ai.provider.name": "draftgraph",
        "gen_ai.request.model": job.adapter or model,
        "gen_ai.response.model": job.adapter or model,
        "gen_ai.response.id": generation.id,
        "gen_ai.response.finish_reasons": [one.finish_reason or "error" for one in answers],
        "gen_ai.request.choice.count": len(answers),
        "gen_ai.request.max_tokens": job.max_tokens,
        "gen_ai.request.temperature": job.temperature,
        "gen_ai.request.top_p": job.top_p,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.latency.time_in_queue": usage["draftgraph"]["queue_seconds"],
        "draftgraph.steps": usage["draftgraph"]["steps"],
        "draftgraph.tokens_per_pass": usage["draftgraph"]["tokens_per_pass"],
    }
    return found | ({"gen_ai.latency.time_to_first_token": min(first)} if first else {})
