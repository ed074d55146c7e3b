"""The log: how every request ended and under which name, as text or JSON; and that a server says when it stops."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from serve_tools import DIE, FAULT, SERVE, SLOW, LiveServer, by_label, wait_until

from draftgraph.serve.engine import Engine
from draftgraph.serve.logs import JSONLines, logged_pipe, logging_to_stderr
from draftgraph.serve.settings import ServerSettings

ROUTE = "/v1/completions"
ENDLESS = {"prompt": f"the cat {SLOW}", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with LiveServer(deadline=2.0) as server:
        yield server


@pytest.fixture
def lines(caplog):
    """The log so far."""
    caplog.set_level(logging.INFO, "draftgraph.serve")
    return lambda: [record.getMessage() for record in caplog.records]


def counted(server, status) -> float:
    return server.figures().get(f'draftgraph_requests_total{{route="{ROUTE}",status="{status}"}}', 0)


def stream(server):
    return httpx.stream("POST", server.url + ROUTE, json=ENDLESS)


def kill_engine(server) -> None:
    assert httpx.post(server.url + ROUTE, json={"prompt": DIE}).status_code == 503


@pytest.mark.parametrize(
    ("fail", "status", "code"),
    [(lambda server: None, 504, "deadline"), (kill_engine, 503, "engine_unavailable")],
)
def test_a_stream_that_fails_is_not_counted_as_a_success(server, lines, fail, status, code):
    server.wait_until_ready()
    sound = counted(server, 200)
    with stream(server) as answer:
        assert answer.status_code == 200
        fail(server)
        assert code in answer.read().decode()
    wait_until(lambda: any(f"POST {ROUTE} {status} {code} in a stream" in line for line in lines()))
    assert counted(server, status) >= 1 and counted(server, 200) == sound
    assert by_label(server.figures(), "stream_errors")[code] == 1


def test_a_client_that_leaves_a_stream_is_told_apart(server, lines):
    server.wait_until_ready()
    failed = by_label(server.figures(), "stream_errors")
    with stream(server) as answer:
        next(answer.iter_bytes())
    wait_until(lambda: any(f"POST {ROUTE} 499 client_gone in a stream" in line for line in lines()))
    assert counted(server, 499) == 1 and by_label(server.figures(), "stream_errors") == failed


def test_the_log_names_the_error_of_a_whole_answer(server, lines):
    httpx.post(server.url + ROUTE, json={"prompt": "a", "model": "other"})
    wait_until(lambda: any(f"POST {ROUTE} 404 model_not_found 0." in line for line in lines()))


def test_a_sane_request_id_of_the_client_is_kept(server, lines):
    for given in ("abc-123", "01HV.x:y/z+=_", "x" * 128):
        answer = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": given})
        assert answer.headers.get_list("x-request-id") == [given]
        wait_until(lambda given=given: any(line.endswith(f"request {given}") for line in lines()))


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "a\tb", "ümlaut".encode(), "%0a<script>"])
def test_any_other_gets_one_of_the_servers(server, lines, given):
    answer = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": given})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    wait_until(lambda: any(line.endswith(f"request {answer.headers['x-request-id']}") for line in lines()))


def test_a_fault_of_the_server_is_logged_with_the_id_that_its_client_gets(server, caplog, monkeypatch):
    monkeypatch.setattr("draftgraph.serve.app.chat_jobs", lambda *_: 1 / 0)
    body = {"messages": [{"role": "user", "content": "a secret"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] == "mine"
    (fault,) = [record for record in caplog.records if record.getMessage() == "request mine failed"]
    assert fault.exc_info[0] is ZeroDivisionError


def test_a_json_line_has_the_fields_of_a_request(server, caplog, lines):
    httpx.post(server.url + ROUTE, json={"prompt": "a", "model": "other"}, headers={"X-Request-Id": "json-one"})
    wait_until(lambda: any("json-one" in line for line in lines()))
    (found,) = [
        json.loads(JSONLines().format(record)) for record in caplog.records if "json-one" in record.getMessage()
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found.pop("time"))
    assert found.pop("seconds") > 0 and found.pop("message").startswith(f"POST {ROUTE} 404")
    assert found == {
        "level": "info",
        "logger": "draftgraph.serve",
        "method": "POST",
        "route": ROUTE,
        "status": 404,
        "code": "model_not_found",
        "in_stream": False,
        "request_id": "json-one",
    }


def served_log(do, **settings) -> str:
    """Of a server in a process of its own: something is done with its address, then it is told to stop."""
    command = [sys.executable, "-c", SERVE, json.dumps(settings)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        log = ""
        while "the model is ready" not in log:
            assert process.poll() is None, log
            log += process.stderr.readline()
        do(re.search(r"http://[\w.:]+", log)[0])
        process.send_signal(signal.SIGTERM)
        return log + process.communicate(timeout=20)[1]
    finally:
        process.kill()


def test_a_server_says_how_many_answers_are_under_way_when_it_stops():
    with httpx.Client() as client:
        begun = []

        def begin(url) -> None:
            begun.append(client.send(client.build_request("POST", url + ROUTE, json=ENDLESS), stream=True))

        log = served_log(begin, grace=0.5)
    stopping, cut, request, stopped = log.splitlines()[-4:]
    assert "stopping: 1 answers under way have 0.5 seconds to end" in stopping
    assert "1 answers end with an error: the server is stopping" in cut
    assert f"POST {ROUTE} 503 server_stopping in a stream" in request
    assert re.search(r"stopped after \d+\.\d seconds", stopped)


def test_every_line_is_json_if_asked_for():
    log = served_log(lambda url: httpx.get(f"{url}/v1/models"), log_format="json")
    lines = [json.loads(line) for line in log.splitlines()]
    assert "/v1/models" in {line.get("route") for line in lines}
    assert lines[-1]["message"].startswith("stopped after")


NOISE = (
    "import os, warnings; os.write(2, b'native: half'); os.write(2, b' a line\\n\\xff'); warnings.warn('of a library')"
)


def test_what_the_engine_writes_is_json_too():
    """What native code writes, a warning, and an error in one line with its traceback."""

    def fail(url) -> None:
        assert httpx.post(url + ROUTE, json={"prompt": FAULT, "max_tokens": 4}).status_code == 503

    lines = [json.loads(line) for line in served_log(fail, log_format="json", before=NOISE).splitlines()]
    said = [line["message"] for line in lines if line["logger"] == "draftgraph.engine"]
    assert said[0] == "native: half a line" and said[1].startswith("\ufffd") and "of a library" in said[1]
    [fault] = [line for line in lines if "Traceback" in line["message"]]
    assert fault["level"] == "error" and "an illegal memory access" in fault["message"]


def test_all_that_the_engine_writes_is_told_at_every_level(capsys):
    async def written() -> None:
        logged, stderr = logged_pipe()
        lines = b"".join(b"line %d\n" % number for number in range(20)) + b"x" * 100_000 + b"\nlast words"
        with stderr:
            await asyncio.to_thread(stderr.write, lines)
        await logged

    with logging_to_stderr(ServerSettings(log_level="error", log_format="json")):
        asyncio.run(written())
    told = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert told[:20] == [f"line {number}" for number in range(20)] and told[-1] == "last words"
    assert "".join(told[20:-1]) == "x" * 100_000


def test_an_engine_has_ended_though_one_that_it_started_still_holds_its_stderr(tmp_path, monkeypatch):
    monkeypatch.setattr("draftgraph.serve.engine.EXIT_SECONDS", 3600.0)
    pid = tmp_path / "pid"
    code = f"""
import pathlib, subprocess, sys
pathlib.Path({str(pid)!r}).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
sys.exit(7)
"""

    async def ended() -> str:
        engine = Engine([sys.executable, "-c", code], ServerSettings(log_format="json"))
        return await asyncio.wait_for(engine._run_once(), 60)

    try:
        assert asyncio.run(ended()) == "its process ended with status 7"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("level", "told"), [("debug", {"/ready", "/v1/models"}), ("info", {"/v1/models"}), ("error", set())]
)
def test_the_level_decides_what_is_logged(capsys, level, told):
    with logging_to_stderr(ServerSettings(log_level=level, log_format="json")), LiveServer() as server:
        httpx.get(f"{server.url}/v1/models")
    routes = {json.loads(line).get("route") for line in capsys.readouterr().err.splitlines()}
    assert routes - {None} == told
