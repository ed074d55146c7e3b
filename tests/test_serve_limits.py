"""Clients that send too much, too slowly or on too many connections hold up nobody else."""

import json
import logging
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serve_tools import SERVE, SLOW, LiveServer, fake_command, tokenizer, wait_until

from draftgraph.serve import connections
from draftgraph.serve.connections import affordable
from draftgraph.serve.generation import LONG_BODY
from draftgraph.serve.logs import RepeatLimit
from draftgraph.serve.settings import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SECONDS = 5.0  # in which a server under attack answers: far less on an idle machine, far more without limits
MANY = 1_360_000


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "SLACK", 1.0)
        with LiveServer(header_seconds=1.0, body_seconds=1.0, idle_seconds=1.0, max_connections=40) as server:
            yield server


def test_a_connection_is_kept_longer_than_clients_reuse_it():
    """Else a request now and then meets a connection that is being closed."""
    assert ServerSettings.idle_seconds >= 2 * httpx.Limits().keepalive_expiry


@contextmanager
def watched(server):
    """/health is asked for all the time, and always answers soon."""
    over = threading.Event()

    def longest_wait() -> float:
        longest = 0.0
        while not over.is_set():
            started = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            longest = max(longest, time.monotonic() - started)
        return longest

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(longest_wait)
        try:
            yield
        finally:
            over.set()
    assert watching.result() < SECONDS


def connect(server, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def sent_slowly(connection: socket.socket, seconds: float) -> bool:
    """Whether the connection is closed before so many seconds are over, for all the bytes that come."""
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        try:
            connection.sendall(b"x")
        except OSError:
            return True
        time.sleep(0.1)
    return False


# Bodies


def repeated(element: str, count: int = MANY) -> str:
    return f"[{','.join([element] * count)}]"


def biases(count: int) -> str:
    return json.dumps({f"x{place}": "y" for place in range(count)})


def post(server, path: str, content: str) -> httpx.Response:
    return httpx.post(server.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=60)


@pytest.mark.parametrize(
    ("path", "fields", "large", "message"),
    [
        (COMPLETIONS, '"prompt": ', lambda: repeated("-1"), "prompt.0: Input should be greater than or equal to 0"),
        (COMPLETIONS, '"prompt": ', lambda: repeated("1"), "context window"),
        (COMPLETIONS, '"prompt": ', lambda: repeated("[]"), "objects and lists"),
        (COMPLETIONS, '"prompt": ', lambda: f'"{"1" * MANY}"', "characters"),
        (COMPLETIONS, '"prompt": "a", "stop": ', lambda: repeated("1"), "stop.0: Input should be a valid string"),
        (COMPLETIONS, '"prompt": "a", "logit_bias": ', lambda: biases(200_000), "at most 1024 tokens, not 200000"),
        (COMPLETIONS, '"prompt": "a", "unknown": ', lambda: repeated("{}"), "objects and lists"),
        (CHAT, '"messages": ', lambda: repeated("{}", 200_000), "messages.0.role: Field required"),
        (CHAT, '"messages": ', lambda: repeated("1"), "messages.0: Input should be"),
        (CHAT, '"messages": [{"role": "user"}], "tools": ', lambda: repeated("1"), "tools.0: Input should be"),
    ],
)
def test_a_large_body_is_refused_by_name_and_delays_nobody(server, path, fields, large, message):
    content = f"{{{fields}{large()}}}"
    with watched(server):
        answer = post(server, path, content)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text[:300]


def test_a_tool_call_with_deeply_nested_arguments_breaks_nothing(server):
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hello"}]
    assert httpx.post(server.url + CHAT, json={"messages": messages, "temperature": 0}).status_code == 200


def test_too_many_log_probabilities_of_prompts_are_refused(server):
    body = {"prompt": [[40] * 400] * 64, "echo": True, "logprobs": 20, "max_tokens": 0}
    answer = httpx.post(server.url + COMPLETIONS, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"


def test_too_many_tokens_at_once_are_refused(server, monkeypatch):
    monkeypatch.setattr("draftgraph.serve.engine.MOST_TOKENS", 1000)
    body = {"prompt": [40] * 400, "n": 3, "max_tokens": 1}
    answer = httpx.post(server.url + COMPLETIONS, json=body)
    assert answer.status_code == 400 and "1200 tokens" in answer.json()["error"]["message"]
    body = {"prompt": ["a"] * 8, "max_tokens": 1, "allowed_token_ids": [40] * 200}
    answer = httpx.post(server.url + COMPLETIONS, json=body)
    assert answer.status_code == 400 and "1608 tokens" in answer.json()["error"]["message"]


def test_all_log_probabilities_that_may_be_asked_for_delay_nobody():
    """Sixteen answers with the twenty best tokens in each place of a long prompt, for several clients at once."""
    body = {"prompt": [40 + place % 200 for place in range(1500)], "n": 16, "logprobs": 20, "echo": True}
    with LiveServer(fake_command(window=2048)) as server, watched(server), ThreadPoolExecutor(2) as clients:
        asked = body | {"temperature": 1, "max_tokens": 4}
        for answer in clients.map(lambda _: httpx.post(server.url + COMPLETIONS, json=asked, timeout=60), range(2)):
            assert answer.status_code == 200, answer.text
            choices = [choice["logprobs"] for choice in answer.json()["choices"]]
            assert len(choices) == 16 and {len(one["top_logprobs"]) for one in choices} == {1504}


def test_a_body_in_tiny_chunks_delays_nobody(server):
    begun = connect(server, POST + b"Transfer-Encoding: chunked\r\n\r\n")
    with watched(server), begun as connection, pytest.raises(ConnectionError):
        for _ in range(100):
            connection.sendall(b"1\r\n[\r\n" * 10_000)


def test_small_chunks_of_a_small_body_are_read(server):
    body = json.dumps({"prompt": "hello", "temperature": 0}).encode()
    pieces = (body[place : place + 1] for place in range(len(body)))
    answer = httpx.post(server.url + COMPLETIONS, content=pieces, headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == "hello"


def test_a_body_of_two_lengths_is_refused_and_nothing_behind_it_is_read(server):
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server, POST + lengths + b"0\r\n\r\n" + HEAD + b"\r\n") as connection:
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


class SlowWords:
    """A tokenizer that takes its time over some texts."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def __call__(self, text: str, **more: Any) -> Any:
        if text == "slow":
            self.begun.set()
            self.go_on.wait(60)
        return tokenizer()(text, **more)


def test_a_short_text_does_not_wait_until_a_long_one_is_tokenized():
    words = SlowWords()
    with LiveServer(words=words) as server, ThreadPoolExecutor(1) as thread:
        long = {"prompt": "slow", "user": "x" * LONG_BODY}
        asked = thread.submit(httpx.post, server.url + COMPLETIONS, json=long, timeout=60)
        try:
            assert words.begun.wait(60)
            assert httpx.post(server.url + COMPLETIONS, json={"prompt": "hello"}, timeout=20).status_code == 200
        finally:
            words.go_on.set()
        assert asked.result().status_code == 200


# Slow clients


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, POST + b"Content-Length: 100\r\n\r\n{"])
@pytest.mark.parametrize("slowly", [False, True])
def test_a_request_that_does_not_come_is_not_waited_for(server, sent, slowly):
    with connect(server, sent) as connection:
        if slowly:
            assert sent_slowly(connection, 15)
        else:
            wait_until(lambda: is_closed(connection), 15)


def test_a_second_request_that_does_not_come_is_not_waited_for(server):
    for sent in (b"", b"GET /"):
        with connect(server, HEAD + b"\r\n") as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            connection.sendall(sent)
            wait_until(lambda: is_closed(connection), 15)


def test_a_body_that_goes_on_after_its_refusal_is_not_read_for_ever(server):
    with connect(server, POST + b"Content-Length: 100000000\r\n\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
        assert sent_slowly(connection, 15)


def test_an_answer_that_is_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(connections, "READING_SECONDS", 1.0)
    with LiveServer() as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(1.0)
        with pytest.raises(OSError):  # the server reads no further while its answers are not read
            while True:
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        wait_until(lambda: not server.server.server_state.connections)


# Many connections


def test_what_is_written_is_sent_at_once(server):
    """Nagle's algorithm would keep the end of every answer, and tokens of streams, for 40 ms."""
    with connect(server, HEAD + b"\r\n") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        sockets = [one._socket.get_extra_info("socket") for one in server.server._connections._open]
        assert sockets and all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)


def test_many_half_open_connections_keep_nobody_out(server):
    with ExitStack() as stack, watched(server):
        held = [stack.enter_context(connect(server, HEAD)) for _ in range(200)]
        assert httpx.post(server.url + COMPLETIONS, json={"prompt": "hello", "temperature": 0}).status_code == 200
        wait_until(lambda: sum(map(is_closed, held)) >= 160)


def test_the_oldest_connection_that_is_not_being_answered_makes_room():
    with LiveServer(max_connections=3) as server, ExitStack() as stack:
        stream = {"prompt": f"the cat {SLOW}", "max_tokens": 100, "temperature": 0, "stream": True, "ignore_eos": True}
        running = stack.enter_context(httpx.stream("POST", server.url + COMPLETIONS, json=stream, timeout=30))
        first, second, third = (stack.enter_context(connect(server, HEAD)) for _ in range(3))
        wait_until(lambda: is_closed(first))
        assert not is_closed(second) and not is_closed(third)
        assert running.read().endswith(b"data: [DONE]\n\n")


def test_where_all_are_being_answered_a_new_connection_is_closed():
    with LiveServer(max_connections=1) as server:
        stream = {"prompt": f"the cat {SLOW}", "max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=stream, timeout=30) as running:
            with connect(server) as connection:
                wait_until(lambda: is_closed(connection))
            assert running.read().endswith(b"data: [DONE]\n\n")


def test_there_are_no_more_connections_than_files_may_be_open(monkeypatch):
    for files, most in ((80, 16), (10, 1), (4096, 1000), (resource.RLIM_INFINITY, 1000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert affordable(1000) == most


def test_with_few_files_half_open_connections_neither_keep_others_out_nor_fill_the_log(tmp_path):
    log, code = tmp_path / "log", f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))\n{SERVE}"
    with log.open("w") as written, subprocess.Popen([sys.executable, "-c", code], stderr=written) as process:
        try:
            wait_until(lambda: "the model is ready" in log.read_text(), 120)
            address = re.search(r"http://([\d.]+):(\d+)", log.read_text())
            assert address is not None
            place = (address[1], int(address[2]))
            with ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(socket.create_connection(place, timeout=20)).sendall(HEAD)
                for _ in range(20):
                    assert httpx.get(f"{address[0]}/health", timeout=SECONDS).status_code == 200
        finally:
            process.kill()
    assert len(log.read_text().splitlines()) < 50


def test_a_request_that_never_came_whole_is_not_logged(server, caplog):
    caplog.set_level(logging.INFO, "draftgraph.serve")
    connect(server, POST + b"Content-Length: 100\r\n\r\n{").close()
    gone = 'draftgraph_requests_total{route="other",status="499"}'
    wait_until(lambda: gone in server.figures())
    assert not [record for record in caplog.records if "499" in record.getMessage()]


def test_a_warning_that_comes_again_and_again_is_logged_now_and_then(caplog, monkeypatch):
    caplog.handler.addFilter(limit := RepeatLimit(most=3, seconds=10.0))
    clock = iter([*[0.0] * 100, *[11.0] * 5])
    monkeypatch.setattr("draftgraph.serve.logs.time", SimpleNamespace(monotonic=lambda: next(clock)))
    logger = logging.getLogger("some library")
    for number in range(105):
        logger.warning("warning %d", number)
        logger.log(logging.INFO, "not counted")
    caplog.handler.removeFilter(limit)
    later = ["warning 100 (97 more were not logged)", "warning 101", "warning 102"]
    assert caplog.messages == ["warning 0", "warning 1", "warning 2", *later]
