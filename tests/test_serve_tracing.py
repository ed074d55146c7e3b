"""Traces: one span for each request at a collector, under the client's, with figures and without what was asked."""

import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serve_tools import SLOW, LiveServer, wait_until

from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.extras import install_command
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.tracing import tracing_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector:
    """Receives OTLP over HTTP on a free port."""

    def __enter__(self) -> "Collector":
        self.bodies = bodies = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def resources(self) -> list:
        assert {path for path, _ in self.bodies} <= {"/v1/traces"}
        return [one for _, body in self.bodies for one in ExportTraceServiceRequest.FromString(body).resource_spans]

    def spans(self) -> list[Span]:
        scopes = [scope for resource in self.resources() for scope in resource.scope_spans]
        return sorted((span for scope in scopes for span in scope.spans), key=lambda span: span.start_time_unix_nano)


def values(attributes) -> dict:
    def value_of(given):
        kind = given.WhichOneof("value")
        return [value_of(one) for one in given.array_value.values] if kind == "array_value" else getattr(given, kind)

    return {one.key: value_of(one.value) for one in attributes}


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


def test_a_request_has_one_span_under_its_clients(collector):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    with LiveServer(otlp_endpoint=collector.url) as server:
        body = {"prompt": "my secret", "temperature": 0, "max_tokens": 6, "ignore_eos": True, "n": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()
    (span,) = collector.spans()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("text_completion fake", Span.SPAN_KIND_SERVER)
    assert span.end_time_unix_nano > span.start_time_unix_nano
    found, usage = values(span.attributes), answer["usage"]
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") < 60
    assert found.pop("gen_ai.latency.time_in_queue") == usage["draftgraph"]["queue_seconds"]
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "draftgraph.request_id": "mine",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "draftgraph",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "draftgraph.steps": usage["draftgraph"]["steps"],
        "draftgraph.tokens_per_pass": usage["draftgraph"]["tokens_per_pass"],
    }
    (resource,) = collector.resources()
    assert values(resource.resource.attributes)["service.name"] == "draftgraph"
    assert not any(b"secret" in body for _, body in collector.bodies)


def test_streams_and_failures_have_their_spans_too_and_probes_have_none(collector, monkeypatch):
    monkeypatch.setenv(ENDPOINT, collector.url)
    with LiveServer(deadline=0.5, adapters=("tuned",)) as server:
        chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": True, "model": "tuned"}
        httpx.post(f"{server.url}/v1/chat/completions", json=chat)
        slow = {"prompt": f"a{SLOW}", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
        httpx.post(f"{server.url}/v1/completions", json=slow)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "model": "other"})
        httpx.get(f"{server.url}/health")
    chatted, late, refused = collector.spans()
    assert chatted.name == "chat tuned" and len(chatted.trace_id.hex()) == 32 and not chatted.parent_span_id
    assert values(chatted.attributes)["gen_ai.response.finish_reasons"] == ["stop"]
    assert chatted.status.code == refused.status.code == Status.STATUS_CODE_UNSET
    found = values(late.attributes)
    assert late.status.code == Status.STATUS_CODE_ERROR and found["error.type"] == "deadline"
    assert found["http.response.status_code"] == 504 and found["gen_ai.response.finish_reasons"] == ["error"]
    assert refused.name == "POST /v1/completions" and values(refused.attributes)["error.type"] == "model_not_found"


def test_a_span_that_the_client_does_not_sample_is_not_sent(collector):
    with LiveServer(otlp_endpoint=f"{collector.url}/v1/traces/") as server:
        for flags in ("00", "01"):
            httpx.get(f"{server.url}/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
        httpx.get(f"{server.url}/v1/models", headers={"traceparent": "nonsense"})
    sampled, own = collector.spans()
    assert sampled.trace_id.hex() == TRACE != own.trace_id.hex()


def test_a_collector_that_is_away_holds_up_nobody():
    with LiveServer(otlp_endpoint="http://127.0.0.1:9") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        server.server.should_exit = True
        wait_until(lambda: not server.thread.is_alive(), 10)


def test_without_an_endpoint_nothing_is_imported(monkeypatch):
    code = (
        "import sys, draftgraph.serve.app; from draftgraph.serve.settings import ServerSettings\n"
        "from draftgraph.serve.tracing import tracing_of\n"
        "assert tracing_of(ServerSettings()) is None\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    monkeypatch.delenv(ENDPOINT, raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(DraftGraphError, match=re.escape(install_command("otel"))):
        tracing_of(ServerSettings(otlp_endpoint="http://127.0.0.1:9"))
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    assert tracing_of(ServerSettings()) is None and install_command("otel") in capsys.readouterr().err
    with pytest.raises(UsageError, match="must be the URL"):
        tracing_of(ServerSettings(otlp_endpoint="localhost:4318"))
