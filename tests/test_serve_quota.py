"""How much is taken on, and of whom: answers, texts that are still being read, what drafting may cost, what a client
leaves unread."""

import asyncio
import json
import socket
import threading
from array import array
from collections import Counter
from contextlib import ExitStack
from itertools import count

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_tools import SLOW, LiveServer, tokenizer, wait_until

from draftgraph.batching.job import OBJECT, Progress, Scores
from draftgraph.serve import jobs
from draftgraph.serve.engine import MOST_UNREAD, Submission
from draftgraph.serve.errors import ApiError
from draftgraph.serve.generation import LONG_BODY
from draftgraph.serve.quota import Quota

COMPLETIONS = "/v1/completions"
SMALL = {"prompt": "hello", "temperature": 0}
ENDLESS = {"prompt": f"the cat {SLOW}", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def post(server, body=None, key="none", **more) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        server.url + COMPLETIONS, json=SMALL | more if body is None else body, headers=headers, timeout=60
    )


class Streams(ExitStack):
    """Answers that go on until they are left."""

    def begin(self, server, count: int, key: str = "none") -> list[int]:
        """The statuses of so many more."""
        headers = {"Authorization": f"Bearer {key}"}
        asked = {"json": ENDLESS | {"stream": True}, "headers": headers, "timeout": 60}
        streams = [httpx.stream("POST", server.url + COMPLETIONS, **asked) for _ in range(count)]
        return [self.enter_context(stream).status_code for stream in streams]


# Seats and queue


def test_without_a_queue_all_seats_are_given_and_no_more():
    with LiveServer(max_texts=3, max_waiting=0) as server, Streams() as streams:
        assert post(server).status_code == 200
        assert streams.begin(server, 4) == [200, 200, 200, 429]


def test_free_seats_are_for_many_answers_to_one_request_whatever_the_queue():
    with LiveServer(max_texts=64, max_waiting=8) as server:
        assert len(post(server, n=16).json()["choices"]) == 16


def test_more_answers_than_there_can_be_are_refused_for_good():
    with LiveServer(max_texts=2, max_waiting=1, max_per_key=2) as server:
        answer = post(server, n=3)
        assert answer.status_code == 400 and "3 answers" in answer.json()["error"]["message"]
        assert post(server, n=2).status_code == 200


# Keys

KEYS = ("anna", "bob", "carl")


def test_a_key_that_has_taken_all_places_keeps_no_other_out():
    with LiveServer(api_keys=KEYS, max_texts=2, max_waiting=4) as server, Streams() as streams:
        assert streams.begin(server, 7, "anna") == [200] * 6 + [429]
        assert streams.begin(server, 4, "bob") == [200] * 3 + [429]
        assert streams.begin(server, 3, "carl") == [200] * 2 + [429]
        assert streams.begin(server, 1, "anna") == [429]


def test_a_key_has_no_more_than_it_may():
    with LiveServer(api_keys=KEYS, max_texts=8, max_per_key=2) as server, Streams() as streams:
        assert streams.begin(server, 3, "anna") == [200, 200, 429]
        assert streams.begin(server, 1, "bob") == [200]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.booleans()), max_size=60), st.integers(1, 24))
def test_whoever_has_less_than_an_equal_share_is_let_in(wanted, most):
    quota, held = Quota("answers", most), Counter()
    with ExitStack() as everything:
        leaves = {tenant: everything.enter_context(ExitStack()) for tenant in "abcd"}
        for tenant, amount, leaving in wanted:
            if leaving:
                leaves[tenant].close()
                del held[tenant]
            tenants = len({tenant, *(one for one in held if held[one])})
            free = most - held.total() >= amount
            due = held[tenant] + amount <= most // tenants
            try:
                leaves[tenant].enter_context(quota.held(tenant, amount))
                held[tenant] += amount
                assert free or due
            except ApiError as error:
                assert not free and not due
                assert error.status == (400 if amount > most else 429)
            assert held.total() <= most * (1 + 1 / 2 + 1 / 3 + 1 / 4)


# Texts that are being read


class Words:
    """A tokenizer that takes its time over texts that say so, and keeps a list of what it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(tokenizer(), name)

    def __call__(self, text, **options):
        self.texts.append(text)
        if text.startswith("slow"):
            self.begun.set()
            self.go_on.wait(60)
        return tokenizer()(text, **options)


@pytest.fixture
def words():
    found = Words()
    yield found
    found.go_on.set()


def sent(server, body, key="none") -> socket.socket:
    """A request whose answer nobody waits for yet."""
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(head.encode() + content)
    return connection


def answered(connection: socket.socket) -> bytes:
    return connection.recv(12)


def held(server, tenant="") -> int:
    return server.engine.places._taken[tenant]


def test_a_request_whose_text_is_being_read_has_a_place(words):
    with LiveServer(words=words, max_texts=1, max_waiting=1) as server:
        with sent(server, {"prompt": "slow"}) as first, sent(server, {"prompt": "second"}) as second:
            assert words.begun.wait(30)
            wait_until(lambda: held(server) == 2)
            assert post(server).status_code == 429
            words.go_on.set()
            assert answered(first) == answered(second) == b"HTTP/1.1 200"
        wait_until(lambda: held(server) == 0)
        assert post(server).status_code == 200


def test_texts_of_clients_that_have_gone_are_not_read(words):
    with LiveServer(words=words) as server:
        with sent(server, {"prompt": "slow"}):
            assert words.begun.wait(30)
            gone = [sent(server, {"prompt": f"gone {number}"}) for number in range(6)]
            wait_until(lambda: held(server) == 7)
            for connection in gone:
                connection.close()
            wait_until(lambda: held(server) == 1)
        wait_until(lambda: held(server) == 0)
        words.go_on.set()
        assert post(server).json()["choices"][0]["text"] == "hello"
        assert words.texts == ["slow", "hello"]


def test_so_many_bytes_of_long_texts_may_wait_and_short_ones_do_not_wait_for_them(words):
    with LiveServer(words=words, max_body=2 * LONG_BODY) as server, ExitStack() as stack:
        long = {"prompt": "slow", "user": "x" * (2 * LONG_BODY - 100)}
        for _ in range(jobs.BODIES):
            stack.enter_context(sent(server, long))
        wait_until(lambda: held(server) == jobs.BODIES)
        late = post(server, long)
        assert late.status_code == 429 and "bytes of prompts" in late.json()["error"]["message"]
        assert post(server).status_code == 200
        words.go_on.set()
        wait_until(lambda: held(server) == 0)
        assert post(server, long).status_code == 200


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_read(words, monkeypatch):
    monkeypatch.setattr(jobs, "LONG_TOKEN", 4)
    with LiveServer(words=words) as server:
        answer = post(server, prompt="123 " * 1500)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert [len(text) for text in words.texts] == [4 * 512]
        assert post(server, prompt="the cat sat on the mat " * 100).status_code == 400
        assert post(server, prompt="the cat sat on the mat " * 60, max_tokens=1).status_code == 200


def test_all_that_a_template_writes_counts(words):
    with LiveServer(words=words) as server:
        tool = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"]
        assert not words.texts


# What drafting may cost


@pytest.fixture(scope="module")
def server():
    with LiveServer(max_request_nodes=32, max_request_depth=4, allow_trace=False) as server:
        yield server


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mode": "tree", "max_nodes": 33}, "max_nodes may be 32 at most here, not 33"),
        ({"max_depth": 5}, "max_depth may be 4 at most here, not 5"),
        ({"mode": "chain", "chain_length": 5}, "chain_length may be 4 at most here, not 5"),
        ({"trace": True}, "trace is not allowed here"),
    ],
)
def test_who_asks_for_more_drafting_than_allowed_is_told_the_limit(server, asked, message):
    error = post(server, draftgraph=asked).json()["error"]
    assert (error["param"], error["message"]) == ("draftgraph", f"draftgraph.{message}")


def test_what_is_allowed_is_done(server):
    asked = {"mode": "tree", "max_nodes": 32, "max_depth": 4, "k": 2, "trace": False}
    assert post(server, draftgraph=asked).status_code == 200


@pytest.mark.parametrize(("mode", "nodes"), [("graph", 32), ("chain", 5), ("off", 1), ("auto", 32)])
def test_what_a_request_leaves_out_keeps_to_the_limits_too(server, mode, nodes):
    from draftgraph import GraphConfig

    maker = jobs.JobMaker(server.settings, server.engine.ready, "", "prompt")
    config = GraphConfig(**{"mode": "auto"} | maker._config({"mode": mode}))
    assert config.nodes == nodes and config.levels <= 4
    assert maker._config({}) == {}


# What is left unread


def test_a_stream_that_nobody_reads_is_given_up():
    cancelled = []
    submission = Submission("", ["a", "b"], cancelled.append)
    nodes = [{"token": 1}] * 1000
    for number in count():
        submission.put(Progress("ab"[number % 2], [1], ["target"], step={"nodes": nodes}))
        if cancelled:
            break
    assert (number - 1) * 1000 * OBJECT <= MOST_UNREAD and sorted(cancelled) == ["a", "b"]

    async def next_one() -> Progress:
        return await anext(aiter(submission))

    assert "not read" in asyncio.run(next_one()).error["message"]


def test_what_is_read_as_it_comes_may_be_as_long_as_it_likes():
    cancelled = []

    async def read() -> int:
        submission = Submission("", ["a"], cancelled.append)
        steps = aiter(submission)
        for _ in range(100):
            submission.put(
                Progress("a", [1], ["target"], step={"nodes": [{"token": 1}] * (MOST_UNREAD // OBJECT // 2)})
            )
            await anext(steps)
        submission.put(Progress("a", prompt_logprobs=Scores(0, array("f", [0.0]) * 2 * MOST_UNREAD)))
        return (await anext(steps)).size

    assert asyncio.run(read()) > MOST_UNREAD and not cancelled


def test_a_client_that_does_not_read_its_trace_is_told_so_in_the_end(monkeypatch):
    body = {"prompt": "the cat", "max_tokens": 400, "n": 16, "logprobs": 20, "stream": True, "ignore_eos": True}
    with LiveServer() as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        content = json.dumps(body | {"temperature": 1, "draftgraph": {"trace": True}}).encode()
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection.sendall(head % COMPLETIONS.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        answer = connection.recv(1 << 10)  # the stream has begun: before, giving up is a status of its own
        monkeypatch.setattr("draftgraph.serve.engine.MOST_UNREAD", 20_000)
        wait_until(lambda: server.engine.under_way == 0)
        answer += b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b'"finish_reason":"length"') < 16
    assert b"not read" in answer[-2000:] and b"[DONE]" in answer[-100:]


def test_openais_client_raises_a_rate_limit_where_a_key_has_too_much_under_way():
    with LiveServer(api_keys=KEYS, max_per_key=1) as server, Streams() as streams:
        streams.begin(server, 1, "anna")
        with pytest.raises(openai.RateLimitError, match="under way already"):
            server.client(api_key="anna").completions.create(model="fake", prompt="hello")
