"""Requests made up from the server's own schema: no 500, no hang, every answer as the schema says.

DRAFTGRAPH_SCHEMA_CASES sets how many for each route that takes a body; `make soak` asks for thousands.
"""

import os

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serve_tools import FakeScheduler, LiveServer, fake_command

TOKENS = {"prompt", "tokens", "allowed_token_ids", "stop_token_ids"}
CASES = int(os.environ.get("DRAFTGRAPH_SCHEMA_CASES", "150"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server():
    with LiveServer(fake_command(faulty=False), max_model_len=64) as server:  # answers that fill the window are short
        yield server
        body = {"prompt": "hello", "temperature": 0}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] == "hello"
        assert server.engine.under_way == 0
        assert server.figures()["draftgraph_engine_failures_total"] == 0


def in_vocabulary(value):
    """Most made-up numbers are no tokens, and all of those are answered alike."""
    if isinstance(value, list):
        return [in_vocabulary(one) for one in value]
    return value % FakeScheduler.vocabulary if type(value) is int and value > 0 else value


schema = schemathesis.openapi.from_dict(LiveServer().app.openapi())


@schema.parametrize()
@settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    database=None,
)
def test_made_up_requests_are_answered_or_refused(case, server):
    if isinstance(case.body, dict):
        case.body.pop("model", None)  # made-up names are all answered alike
        for name in TOKENS & case.body.keys():
            case.body[name] = in_vocabulary(case.body[name])
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=10)
