"""What /metrics says after known requests, in our names and in vLLM's; the dashboard; and what the log leaves out."""

import json
import logging
import re
from pathlib import Path

import httpx
import openai
import pytest
from serve_tools import DIE, MEMORY, SLOW, LiveServer, assert_figures_agree, by_label

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
    assert_figures_agree(figures)
    steps = sum(answer["usage"]["draftgraph"]["steps"] for answer in answers)
    assert figures["draftgraph_passes_total"] == steps
    for name in ("time_to_first_token_seconds", "time_per_token_seconds", "tokens_per_pass", "prompt_tokens"):
        assert figures[f"draftgraph_{name}_count"] == 4
    assert figures["draftgraph_queue_seconds_count"] == 4
    assert figures["draftgraph_reused_prompt_tokens_total"] == 8
    assert figures["draftgraph_ready"] == 1


def test_figures_agree_whatever_became_of_the_jobs():
    with LiveServer(deadline=1.0) as server:
        client, more = server.client(), {"ignore_eos": True}
        asked = {"model": "fake", "prompt": "the cat sat on", "temperature": 0, "max_tokens": 400}
        slow = asked | {"prompt": f"the cat sat {SLOW}", "extra_body": more}
        complete(server, max_tokens=60)
        client.completions.create(**asked, stop="sat", extra_body=more)
        list(client.completions.create(**asked, stop=["sat", "on"], n=2, stream=True, extra_body=more))
        with client.completions.create(**slow, stream=True) as gone:
            next(iter(gone))
        for prompt, why in ((slow["prompt"], "too long"), (MEMORY, "no memory"), (f"{SLOW}{DIE}", "status 3")):
            with pytest.raises(openai.APIError, match=why):
                client.completions.create(**slow | {"prompt": prompt})
        server.wait_until_ready()
        complete(server, max_tokens=60)
        figures = server.figures()
    assert_figures_agree(figures)
    assert by_label(figures, "answers") == {"stop": 5, "abort": 1, "error": 3}
    assert figures["draftgraph_new_tokens_count"] == 8  # but for the job whose figures died with the engine
    assert figures["draftgraph_answer_seconds_count"] == 5


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


def test_figures_are_told_under_vllms_names_if_asked_for(server):
    usage = complete(server, max_tokens=12, ignore_eos=True)["usage"]  # in steps of 2, 3, 4, 1 and 2 tokens
    figures = server.figures()
    told = {name.partition(":")[2]: value for name, value in figures.items() if name.startswith("vllm:")}
    expected = {
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 16,
        "spec_decode_num_accepted_tokens_total": 7,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 4,
        'spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 1,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "gpu_cache_usage_perc": 0,
        "prompt_tokens_total": usage["prompt_tokens"],
        "generation_tokens_total": 12,
        "prefix_cache_queries_total": usage["prompt_tokens"],
        "prefix_cache_hits_total": 2,
        'request_success_total{finished_reason="length"}': 1,
        "request_prompt_tokens_sum": usage["prompt_tokens"],
        "request_generation_tokens_sum": 12,
    }
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_queue_time"):
        expected |= {f"{name}_seconds_count": 1, f'{name}_seconds_bucket{{le="+Inf"}}': 1}
    expected |= {"e2e_request_latency_seconds_count": 1, "request_time_per_output_token_seconds_count": 1}
    for name, value in expected.items():
        start, _, labels = name.partition("{")
        labels = ",".join(sorted(['model_name="fake"', *filter(None, [labels.rstrip("}")])]))
        assert told[f"{start}{{{labels}}}"] == value, name
    with LiveServer() as plain:
        assert not any(name.startswith("vllm:") for name in plain.figures())


def test_the_dashboard_asks_only_for_figures_that_there_are(server):
    complete(server)
    known = {re.split(r"[{]", name)[0] for name in server.figures()}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    names = {name for expression in asked for name in re.findall(r"draftgraph_\w+", expression)}
    never_yet = {"draftgraph_accepted_tokens_by_position_total", "draftgraph_stream_errors_total"}
    assert len(names) > 12 and names <= known | never_yet, names - known


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
