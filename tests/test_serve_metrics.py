"""What /metrics says after known requests, in our names and in vLLM's; the dashboard; and what the log leaves out."""

import json
import logging
import re
from pathlib import Path

import httpx
import pytest
from serve_tools import LiveServer

DASHBOARD = Path(__file__).resolve().parent.parent / "docs" / "grafana.json"


@pytest.fixture
def server():
    with LiveServer(vllm_metrics=True) as server:
        yield server


def complete(server, prompt="hello there", **more) -> dict:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "temperature": 0} | more)
    assert answer.status_code == 200
    return answer.json()


def test_figures_add_up_to_what_was_answered(server):
    answers = [complete(server), complete(server, n=2, max_tokens=9), complete(server, max_tokens=3)]
    figures = server.figures()
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    told = {name: value for name, value in figures.items() if name.startswith("draftgraph_tokens_total")}
    assert sum(told.values()) == tokens == figures["draftgraph_new_tokens_sum"]
    accepted = {name for name in figures if name.startswith("draftgraph_accepted_tokens_total")}
    by_source = {name: figures[name.replace("accepted_tokens", "tokens")] for name in accepted}
    assert accepted and all(figures[name] == by_source[name] for name in accepted)
    steps = sum(answer["usage"]["draftgraph"]["steps"] for answer in answers)
    assert figures["draftgraph_passes_total"] == steps
    for name in ("time_to_first_token_seconds", "time_per_token_seconds", "tokens_per_pass", "prompt_tokens"):
        assert figures[f"draftgraph_{name}_count"] == 4
    assert figures["draftgraph_queue_seconds_count"] == 4
    assert figures["draftgraph_reused_prompt_tokens_total"] == 8
    assert figures["draftgraph_ready"] == 1


def test_requests_are_counted_by_route_and_status(server):
    complete(server)
    httpx.get(f"{server.url}/v1/models/fake")
    httpx.get(f"{server.url}/v1/models/other")
    httpx.get(f"{server.url}/secret/path")
    httpx.post(f"{server.url}/v1/completions", content=b"{")
    figures = server.figures()
    assert figures['draftgraph_requests_total{route="/v1/completions",status="200"}'] == 1
    assert figures['draftgraph_requests_total{route="/v1/completions",status="400"}'] == 1
    assert figures['draftgraph_requests_total{route="/v1/models/{name:path}",status="200"}'] == 1
    assert figures['draftgraph_requests_total{route="/v1/models/{name:path}",status="404"}'] == 1
    assert figures['draftgraph_requests_total{route="other",status="404"}'] == 1
    assert not any("secret" in name for name in figures)


def test_drafting_is_told_under_vllms_names_if_asked_for(server):
    usage = complete(server, max_tokens=12)["usage"]
    steps, tokens = usage["draftgraph"]["steps"], usage["completion_tokens"]
    figures = server.figures()
    told = {name.partition(":")[2]: value for name, value in figures.items() if name.startswith("vllm:")}
    model = '{model_name="fake"}'
    assert told[f"spec_decode_num_drafts_total{model}"] == steps
    assert told[f"spec_decode_num_draft_tokens_total{model}"] == 4 * steps
    assert told[f"spec_decode_num_accepted_tokens_total{model}"] == tokens - steps
    assert told['spec_decode_num_accepted_tokens_per_pos_total{model_name="fake",position="0"}'] == steps
    with LiveServer() as plain:
        assert not any(name.startswith("vllm:") for name in plain.figures())


def test_the_dashboard_asks_only_for_figures_that_there_are(server):
    complete(server)
    known = {re.split(r"[{]", name)[0] for name in server.figures()}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    names = {name for expression in asked for name in re.findall(r"draftgraph_\w+", expression)}
    assert len(names) > 12 and names <= known | {"draftgraph_accepted_tokens_by_position_total"}, names - known


def test_the_log_tells_of_requests_but_not_of_what_was_asked(server, caplog):
    caplog.set_level(logging.INFO, "draftgraph.serve")
    complete(server, "my secret", user="secret user")
    httpx.post(f"{server.url}/v1/secret", content=b"secret")
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "secret", "n": 999})
    lines = [record.getMessage() for record in caplog.records]
    assert any("POST /v1/completions 200" in line for line in lines)
    assert not any("/ready" in line for line in lines)
    assert not any("secret" in line for line in lines)


def test_the_log_tells_what_was_asked_if_told_to(caplog):
    caplog.set_level(logging.INFO, "draftgraph.serve")
    with LiveServer(log_prompts=True) as server:
        complete(server, "my secret")
        json_object = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        server.client().responses.create(model="fake", input="another secret", text=json_object, temperature=0)
    for secret in ("my secret", "another secret"):
        assert any(secret in record.getMessage() for record in caplog.records)


def test_every_answer_has_a_name(server):
    answers = [httpx.get(f"{server.url}{path}") for path in ("/health", "/nothing", "/health")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3
