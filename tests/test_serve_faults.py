"""The engine dies, runs out of memory, gets stuck or is full; clients go away; the server is told to stop."""

import asyncio
import os
import signal
import socket
import threading
import time

import httpx
import openai
import pytest
from serve_tools import DIE, FAULT, SLOW, STUCK, LiveServer, fake_command, wait_until

LONG = f"the cat {SLOW}" * 3


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def endless(client, max_tokens=400):
    """A stream that goes on for seconds."""
    more = {"ignore_eos": True}
    return client.completions.create(
        model="fake", prompt=LONG, max_tokens=max_tokens, temperature=0, stream=True, extra_body=more
    )


async def in_16_streams(server, while_they_run) -> list[BaseException | str]:
    """What became of each."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)

    async def read() -> str:
        text = ""
        async for chunk in await endless(client):
            text += chunk.choices[0].text
        return text

    streams = [asyncio.create_task(read()) for _ in range(16)]
    while server.figures()["draftgraph_running"] < 16:
        await asyncio.sleep(0.05)
    await while_they_run(client)
    return await asyncio.gather(*streams, return_exceptions=True)


async def kill(server) -> None:
    os.kill(server.engine.process_id, signal.SIGKILL)


def answers_again(server) -> None:
    server.wait_until_ready()
    answer = server.client().completions.create(model="fake", prompt="hello", temperature=0, max_tokens=20)
    assert answer.choices[0].text == "hello"


def test_killing_the_engine_ends_16_streams_with_an_error_and_another_comes_up(server):
    before, failures = server.engine.process_id, server.figures()["draftgraph_engine_failures_total"]
    ends = asyncio.run(in_16_streams(server, lambda client: kill(server)))
    assert len(ends) == 16 and all(isinstance(end, openai.APIError) and "signal 9" in str(end) for end in ends), ends
    answers_again(server)
    assert server.engine.process_id != before
    assert server.figures()["draftgraph_engine_failures_total"] == failures + 1


@pytest.mark.parametrize(("token", "word"), [(FAULT, "CUDA error"), (DIE, "status 3")])
def test_an_engine_that_breaks_ends_16_streams_with_an_error(server, token, word):
    async def break_it(client) -> None:
        with pytest.raises(openai.InternalServerError, match=word):
            await client.completions.create(model="fake", prompt=token)

    ends = asyncio.run(in_16_streams(server, break_it))
    assert all(isinstance(end, openai.APIError) and word in str(end) for end in ends), ends
    answers_again(server)


def test_while_the_engine_is_away_the_server_says_so():
    with LiveServer(restart_wait=1.0) as server:
        os.kill(server.engine.process_id, signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"
        assert answer.headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.figures()["draftgraph_ready"] == 0
        answers_again(server)


def test_openais_client_tries_again_by_itself(server):
    os.kill(server.engine.process_id, signal.SIGKILL)
    answer = server.client(max_retries=5).completions.create(model="fake", prompt="hello", temperature=0)
    assert answer.choices[0].text == "hello"


def test_an_engine_that_fails_again_and_again_is_started_less_and_less_often(server):
    engine = server.engine
    waits = [engine._wait_after(failures) for failures in range(1, 2000)]
    assert waits == sorted(waits) and waits[0] == 0.05 and waits[-1] == server.settings.restart_wait_most


def test_a_client_that_goes_away_frees_its_place(server):
    with endless(server.client()) as stream:
        next(iter(stream))
        wait_until(lambda: server.engine.under_way == 1)
    wait_until(lambda: server.engine.under_way == 0)
    wait_until(lambda: server.engine.figures["running"] == 0, 3)


def test_a_client_that_goes_away_while_it_waits_for_the_whole_answer_frees_its_place(server):
    body = {"prompt": LONG, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: server.engine.under_way == 0, 3)
    wait_until(lambda: server.engine.figures["running"] == 0, 3)


def test_one_of_several_answers_that_stops_early_leaves_the_others(server):
    answer = server.client().completions.create(
        model="fake", prompt=["abc", "axc"], stop="b", temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.choices[0].text == "a"
    assert server.engine.under_way == 0


@pytest.mark.parametrize(("fault", "slack"), [("deaf", 0.2), ("dead", 60.0)])
def test_an_answer_ended_by_a_stop_string_comes_though_the_engine_tells_no_figures(monkeypatch, fault, slack):
    monkeypatch.setattr("draftgraph.serve.engine.SLACK", slack)
    with LiveServer() as server:
        send = server.engine._send

        def faulty_send(message):
            if "cancel" not in message:
                send(message)
            elif fault == "dead" and server.engine.process_id:
                os.kill(server.engine.process_id, signal.SIGKILL)

        monkeypatch.setattr(server.engine, "_send", faulty_send)
        body = {"prompt": f"abc{SLOW}", "stop": "b", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "a" and answer["choices"][0]["finish_reason"] == "stop"
        assert server.engine.under_way == 0


def test_a_full_queue_answers_429_and_says_when_to_come_back():
    with LiveServer(max_texts=2, max_waiting=1) as server:
        client = server.client()
        streams = [endless(client) for _ in range(3)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="fake", prompt="hello")
        assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "queue_full"
        with pytest.raises(openai.BadRequestError, match="4 answers"):
            client.completions.create(model="fake", prompt="hello", n=4)
        streams[0].close()
        wait_until(lambda: server.engine.under_way == 2)
        assert client.completions.create(model="fake", prompt="hello", temperature=0).choices[0].text == "hello"
        for stream in streams[1:]:
            stream.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(stream):
    with LiveServer(deadline=0.3) as server:
        started = time.monotonic()
        with pytest.raises(openai.APIError, match="too long") as caught:
            answer = server.client(max_retries=2).completions.create(
                model="fake", prompt=LONG, max_tokens=400, temperature=0, stream=stream, extra_body={"ignore_eos": True}
            )
            list(answer)
        assert time.monotonic() - started < 5
        if not stream:
            assert caught.value.response.status_code == 504


def test_an_engine_that_is_stuck_does_not_keep_its_clients(monkeypatch):
    monkeypatch.setattr("draftgraph.serve.engine.SLACK", 0.2)
    monkeypatch.setattr("draftgraph.serve.engine.EXIT_SECONDS", 0.2)
    with LiveServer(deadline=0.3) as server:
        with pytest.raises(openai.InternalServerError, match="too long"):
            server.client().completions.create(model="fake", prompt=STUCK)
        assert server.engine.under_way == 0


def test_an_engine_that_stands_still_is_not_ready_until_it_goes_on():
    with LiveServer(heartbeat=2.0) as server:
        process = server.engine.process_id
        os.kill(process, signal.SIGSTOP)
        try:
            server.wait_until_away()
            answer = httpx.get(f"{server.url}/ready")
            assert answer.json()["error"]["code"] == "engine_unavailable" and answer.headers["retry-after"] == "1"
            assert server.figures()["draftgraph_ready"] == 0
        finally:
            os.kill(process, signal.SIGCONT)
        answers_again(server)
        assert server.engine.process_id == process and server.figures()["draftgraph_ready"] == 1


def test_an_engine_that_is_stuck_is_killed_and_started_again():
    with LiveServer(silence=4.0) as server:
        with pytest.raises(openai.InternalServerError, match="signal 9"):
            server.client().completions.create(model="fake", prompt=STUCK)
        answers_again(server)


def test_told_to_stop_the_server_lets_answers_come_to_their_end():
    with LiveServer() as server:
        stream = endless(server.client(), max_tokens=50)
        first = next(iter(stream)).choices[0].text
        server.server.should_exit = True
        wait_until(lambda: server.engine.closing)
        rest = "".join(chunk.choices[0].text for chunk in stream)
        assert len((first + rest).split()) > 10
        with pytest.raises(openai.APIConnectionError):
            server.client().models.list()
        server.thread.join(10)
        assert server.engine.process_id is None


def test_what_outlasts_the_grace_time_ends_with_an_error():
    with LiveServer(grace=0.3) as server:
        stream = endless(server.client())
        next(iter(stream))
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        server.thread.join(5)
        assert not server.thread.is_alive()


def test_an_engine_without_its_api_ends_by_itself(server):
    ours, theirs = socket.socketpair()
    child = os.posix_spawn(
        fake_command()[0],
        [*fake_command(), str(theirs.fileno())],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), theirs.fileno())],
    )
    theirs.close()
    assert b'"ready"' in ours.recv(1000)
    ours.close()
    ended = threading.Event()
    threading.Thread(target=lambda: (os.waitpid(child, 0), ended.set()), daemon=True).start()
    assert ended.wait(5)


def test_a_model_that_cannot_be_loaded_stops_the_server():
    broken = [fake_command()[0], "-c", "import sys; sys.exit(7)"]
    server = LiveServer(command=broken)
    server.engine.on_failed_start = lambda: setattr(server.server, "should_exit", True)
    server.thread.start()
    server.thread.join(20)
    assert not server.thread.is_alive() and server.engine.failed_to_start == "its process ended with status 7"


def test_an_engine_that_talks_nonsense_is_started_again(tmp_path):
    mark = tmp_path / "was here"
    code = f"""
import os, pathlib, sys, time
wire, mark = int(sys.argv[1]), pathlib.Path({str(mark)!r})
os.write(wire, b'{{"ready": {{"model": "x", "context_window": 9, "vocabulary": 9}}}}\\n')
if not mark.exists():
    mark.touch()
    os.write(wire, b"nonsense\\n")
time.sleep(60)
"""
    with LiveServer(command=[fake_command()[0], "-c", code]) as server:
        wait_until(lambda: server.figures()["draftgraph_engine_failures_total"] == 1)
        server.wait_until_ready()
