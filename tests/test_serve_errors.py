"""Whatever a client sends: an error in OpenAI's form that names what is wrong, never a 500, never a hang."""

import json
import socket

import httpx
import openai
import pytest
from serve_tools import MEMORY, WINDOW, LiveServer, tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with LiveServer(max_body=200_000, body_seconds=0.5, max_choices=4, max_prompts=5, max_stops=3) as server:
        yield server
        assert httpx.post(server.url + CHAT, json=HELLO).json()["choices"][0]["message"]["content"] == "hello"


def refused(answer: httpx.Response, status: int = 400, *words: str, param: str | None = None) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert all(word in error["message"] for word in words), error["message"]
    assert param is None or error["param"] == param
    return error


def post(server, body, path=CHAT, **more) -> httpx.Response:
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    return httpx.post(server.url + path, content=content, headers=JSON | more.pop("headers", {}), timeout=20, **more)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "forbidden", "content": ""}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": 10**9}, "n"),
        ({"stop": ["a", "b", "c", "d"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a" * 600]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "refuse"}}}}, None),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"draftgraph": {"mode": "magic"}}, "draftgraph"),
        ({"draftgraph": {"k": 0}}, "draftgraph"),
        ({"draftgraph": {"max_nodes": 10**9}}, "draftgraph"),
        ({"draftgraph": {"theta_prob": 2}}, "draftgraph"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, change, param):
    error = refused(post(server, HELLO | change), 400, param=param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 6}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ],
)
def test_completions_refuse_too(server, change, param):
    refused(post(server, change, COMPLETIONS), 400, param=param)


def test_a_prompt_must_fit_the_window_with_its_answer(server):
    prompt = [40] * (WINDOW - 10)
    assert post(server, {"prompt": prompt, "max_tokens": 10}, COMPLETIONS).status_code == 200
    error = refused(post(server, {"prompt": prompt, "max_tokens": 11}, COMPLETIONS), 400, str(WINDOW), param="prompt")
    assert error["code"] == "context_length_exceeded"
    long = HELLO | {"messages": [{"role": "user", "content": "x" * WINDOW}]}
    assert refused(post(server, long), 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"messages": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"temperature": 1e999999}',
        b'{"temperature": -Infinity, "messages": [{"role": "user", "content": "a"}]}',
        b"[" * 100_000,
        b'{"a":' * 30_000,
        b'{"tools": ' + b"[" * 210 + b"]" * 210 + b', "messages": [{"role": "user", "content": "a"}]}',
        b'{"tools": [{"a": ' + b"[" * 900 + b"]" * 900 + b'}], "messages": [{"role": "user", "content": "a"}]}',
        b"{" + b"\x00" * 100,
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_malformed_bodies_are_refused(server, body, path):
    refused(post(server, body, path), 400)


def test_json_of_another_type_is_refused(server):
    answer = httpx.post(server.url + CHAT, content=json.dumps(HELLO), headers={"Content-Type": "text/plain"})
    refused(answer, 400, "application/json")


@pytest.mark.parametrize("text", ["\ud800", "a\ud800b", "\udc00\ud800"])
def test_lone_surrogates_are_refused(server, text):
    for change in ({"messages": [{"role": "user", "content": text}]}, {"model": text}, {"user": text}, {text: 1}):
        refused(post(server, HELLO | change), 400, "not JSON")
    for prompt in (text, [text], ["a", text]):
        refused(post(server, {"prompt": prompt}, COMPLETIONS), 400, "not JSON")


def test_messages_name_what_is_wrong(server):
    refused(post(server, HELLO | {"stream_options": {}}), 400, "stream_options is only for requests with stream: true")
    refused(post(server, HELLO | {"metadata": [[[[]]] * 9] * 9, "tools": [{"a": nested(210)}]}), 400, "recursion limit")
    refused(post(server, b"[]"), 400, "must be a JSON object")
    refused(post(server, b'{"messages": }'), 400, "not JSON")
    refused(post(server, HELLO | {"top_p": 7}), 400, "top_p: Input should be less than or equal to 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 5}, "prompt: Input should be a valid string"),
        ({"prompt": {}}, "prompt: Input should be a valid string"),
        ({"prompt": [3, -1]}, "prompt.1: Input should be greater than or equal to 0"),
        ({"prompt": [None]}, "prompt.0: Input should be a valid integer"),
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        ({"prompt": [[3], [4, -1]]}, "prompt.1.1: Input should be greater than or equal to 0"),
        ({"prompt": "a", "stop": 5}, "stop: Input should be a valid string"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop.1: Input should be a valid string"),
        ({"prompt": "a", "stop": {}}, "stop: Input cannot be of this type"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x: Input should be a valid integer"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias: at most 1024 tokens, not 1025"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema: Input cannot be of this type",
        ),
    ],
)
def test_a_field_is_named_as_the_client_wrote_it(server, change, message):
    assert refused(post(server, change, COMPLETIONS))["message"].startswith(message)


def test_what_is_wrong_in_a_message_is_named_by_its_place(server):
    parts = [{"type": "text", "text": "a"}, {"type": 5}]
    messages = [*HELLO["messages"], {"role": "user", "content": parts}]
    refused(post(server, {"messages": messages}), 400, "messages.1.content.1.type: Input should be a valid string")


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


def test_fields_may_be_null(server):
    names = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream", "tools")
    names += ("top_logprobs", "user", "response_format", "stream_options", "draftgraph", "tool_choice", "model")
    assert post(server, {"messages": HELLO["messages"]} | dict.fromkeys(names)).status_code == 200


def test_another_model_is_not_found(server):
    error = refused(post(server, HELLO | {"model": "gpt-4"}), 404, "gpt-4", "fake", param="model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_may_ask_for_headers_alone(server, path):
    answer = httpx.head(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_wrong_paths_and_methods(server):
    refused(httpx.get(server.url + "/v1/nothing"), 404, "/v1/nothing")
    refused(httpx.get(server.url + CHAT), 405, "GET")
    refused(httpx.delete(server.url + "/v1/models"), 405)
    refused(httpx.get(server.url + "/%ff%00/..%2f"), 404)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server):
    large = json.dumps(HELLO | {"user": "x" * 300_000})
    assert refused(post(server, large), 413)["code"] == "body_too_large"

    def in_pieces():
        for place in range(0, len(large), 10_000):
            yield large[place : place + 10_000].encode()

    refused(httpx.post(server.url + CHAT, content=in_pieces(), headers=JSON), 413)


def test_a_body_that_never_comes_is_given_up(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_openai_raises_the_right_errors(server):
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="n must be at most 4"):
        client.chat.completions.create(model="fake", messages=HELLO["messages"], n=9)
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="gpt-4", messages=HELLO["messages"])
    with pytest.raises(openai.InternalServerError, match="no memory left"):
        client.completions.create(model="fake", prompt=MEMORY)


def test_a_failure_of_one_of_many_answers_fails_the_request(server):
    body = {"prompt": ["a", f"b{MEMORY}", "c"], "max_tokens": 20}
    assert refused(post(server, body, COMPLETIONS), 503)["code"] == "out_of_memory"


def test_only_this_machines_names_are_answered_to_without_keys(server):
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80"):
        assert httpx.get(server.url + "/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example:80", ""):
        assert refused(httpx.get(server.url + "/v1/models", headers={"Host": host}), 403)["code"] == "unknown_host"


def test_a_page_from_elsewhere_is_not_let_in(server):
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(server.url + CHAT, headers=asked)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_a_tokenizer_without_a_template_refuses_chats(server, monkeypatch):
    monkeypatch.setattr(tokenizer(), "chat_template", None)
    refused(post(server, HELLO), 400, "chat template")
