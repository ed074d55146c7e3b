"""`draftgraph serve`: quick to explain itself, clear about what is wrong, and a server from start to stop."""

import builtins
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from cli_tools import Runner, refused
from serve_tools import SERVE

import draftgraph.serve.run
from draftgraph.extras import install_command
from draftgraph.serve.engine_process import Loop, reporting_faults

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def run(capsys, monkeypatch) -> Runner:
    return Runner(capsys, monkeypatch)


@pytest.fixture
def started(monkeypatch, folder) -> list:
    """The server is not run: what it would be run with."""
    calls: list = []
    monkeypatch.setattr(draftgraph.serve.run, "run", lambda *arguments: calls.append(arguments))
    return calls


def test_options_become_settings(run, started, folder, tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    options = ["--port", 0, "--api-keys", keys, "--max-texts", 3, "--max-waiting", 4, "--max-model-len", 100]
    options += [
        "--deadline",
        5,
        "--grace",
        6,
        "--cors-origin",
        "http://a",
        "--cors-origin",
        "http://b",
        "--vllm-metrics",
    ]
    options += ["--alias", "gpt-4o", "--alias", "b"]
    options += ["--max-connections", 8, "--header-seconds", 9, "--body-seconds", 10, "--idle-seconds", 11]
    options += ["--heartbeat", 12, "--silence", 13, "--log-level", "debug", "--log-format", "json"]
    options += ["--tls-cert", "c.pem", "--tls-key", "k.pem", "--otlp-endpoint", "http://c:4318"]
    options += ["--chunked-prefill-size", 12, "--max-request-nodes", 13, "--max-request-depth", 13, "--max-per-key", 2]
    options += ["--no-allow-trace"]
    options += ["--temperature", 0, "--max-new-tokens", 7, "--draft", "self", "--mode", "graph", "--k", 2]
    monkeypatch.setenv("DRAFTGRAPH_API_KEYS", "three")
    done = run("serve", folder, *options)
    assert (done.status, done.out) == (0, ""), done
    ((settings, found, engine),) = started
    assert settings.api_keys == ("three", "one", "two") and settings.names == (folder.name, "gpt-4o", "b")
    assert (settings.max_texts, settings.max_waiting, settings.max_model_len) == (3, 4, 100)
    assert (settings.max_request_nodes, settings.max_request_depth, settings.max_per_key) == (13, 13, 2)
    assert not settings.allow_trace
    assert (settings.deadline, settings.grace, settings.temperature, settings.max_tokens) == (5, 6, 0, 7)
    assert (settings.max_connections, settings.header_seconds) == (8, 9)
    assert (settings.body_seconds, settings.idle_seconds) == (10, 11)
    assert (settings.heartbeat, settings.silence) == (12, 13)
    assert (settings.log_level, settings.log_format, settings.otlp_endpoint) == ("debug", "json", "http://c:4318")
    assert (settings.key_file, settings.tls_cert, settings.tls_key) == (str(keys), "c.pem", "k.pem")
    assert settings.cors_origins == ("http://a", "http://b") and settings.vllm_metrics
    assert engine["load"] == {"target": str(folder), "draft": "self"} and engine["graph"]["k"] == 2
    assert engine["limits"] == {"texts": 3, "slots": None, "past_tokens": 0, "chunk": 12, "nodes": 14}
    assert json.loads(json.dumps(engine)) == engine
    assert found.chat_template


def test_by_default_only_this_machine_is_served(run, started, folder):
    assert run("serve", folder).err == ""
    settings = started[0][0]
    assert (settings.host, settings.api_keys, settings.cors_origins) == ("127.0.0.1", (), ())
    assert (settings.log_prompts, settings.vllm_metrics) == (False, False)


def test_serving_everybody_without_keys_is_warned_of(run, started, folder):
    assert "--api-keys" in run("serve", folder, "--host", "0.0.0.0").err


@pytest.mark.parametrize(
    "options",
    [
        ["--port", 70000],
        ["--max-texts", 0],
        ["--max-waiting", -1],
        ["--deadline", 0],
        ["--deadline", "inf"],
        ["--max-connections", 0],
        ["--header-seconds", 0],
        ["--body-seconds", "nan"],
        ["--idle-seconds", -1],
        ["--temperature", -1],
        ["--api-keys", "missing"],
        ["--heartbeat", 0],
        ["--silence", "inf"],
        ["--log-level", "loud"],
        ["--log-format", "xml"],
        ["--mode", "magic"],
    ],
)
def test_wrong_options_are_refused_in_one_line(run, started, folder, options):
    refused(run("serve", folder, *options))
    assert not started


def test_a_missing_model_is_refused_before_anything_is_started(run, started, tmp_path):
    refused(run("serve", tmp_path / "missing"), "missing", status=1)
    assert not started


def test_missing_packages_are_named_with_what_installs_them(run, monkeypatch):
    real = builtins.__import__

    def without_uvicorn(name, *rest, **more):
        if name == "uvicorn":
            raise ImportError("no", name="uvicorn")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_uvicorn)
    refused(run("serve"), "uvicorn", install_command("serve"), status=1)


def test_help_needs_none_of_them():
    code = (
        "import sys; from draftgraph.cli import main; status = main(['serve', '--help'])\n"
        "assert not status and not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "--api-keys" in done.stdout


def test_a_port_in_use_is_named(run, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run("serve", folder, "--port", port), str(port), "--port", status=1)


@pytest.mark.parametrize("signal_sent", [signal.SIGTERM, signal.SIGINT])
def test_a_server_listens_answers_and_stops_when_told(signal_sent):
    process = subprocess.Popen([sys.executable, "-c", SERVE], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = re.search(r"http://\S+", process.stderr.readline())
        assert url is not None
        while "the model is ready" not in process.stderr.readline():
            assert process.poll() is None
        answer = httpx.post(f"{url[0]}/v1/completions", json={"prompt": "secret", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "secret"
        process.send_signal(signal_sent)
        _, log = process.communicate(timeout=10)
        assert process.returncode in (-signal_sent, 1, 130) and "secret" not in log
        assert "POST /v1/completions 200" in log
    finally:
        process.kill()


# The engine's side of the wire


class Pieces:
    """A scheduler whose steps fail."""

    busy = True

    def submit(self, job) -> None:
        raise KeyError(job["id"])

    def cancel(self, id) -> None: ...

    def step(self):
        raise ValueError("broken\ninto pieces")

    def figures(self):
        return {}


class Idle(Pieces):
    busy = False


@pytest.fixture
def wire(monkeypatch):
    """Both ends; when ours is closed, the engine would end its process."""
    ended = threading.Event()
    monkeypatch.setattr("draftgraph.serve.engine_process.os._exit", lambda status: ended.set())
    ours, theirs = socket.socketpair()
    with ours.makefile() as told:
        yield ours, theirs, (json.loads(line) for line in told)
    ours.close()
    assert ended.wait(5)


def test_a_job_that_cannot_be_read_fails_alone(wire):
    ours, theirs, told = wire
    ours.sendall(b'{"submit": {"id": "7"}}\n')
    ours.sendall(b'{"stop": true}\n')
    Loop(theirs, Idle(), dict).run({})
    (progress,) = next(message for message in told if "progress" in message)["progress"]
    assert progress["id"] == "7" and progress["error"] == {"kind": "engine", "message": "KeyError: '7'"}


def test_a_step_that_fails_is_told_in_one_line(wire):
    _, theirs, told = wire
    assert reporting_faults(theirs, lambda: Loop(theirs, Pieces(), dict).run({"model": "x"})) == 70
    assert next(told) == {"ready": {"model": "x"}}
    assert next(told)["traceback"].startswith("Traceback")
    assert next(told) == {"fault": "ValueError: broken into pieces"}


def test_a_stop_ends_the_loop_between_two_steps(wire):
    ours, theirs, _ = wire
    thread = threading.Thread(target=Loop(theirs, Idle(), dict).run, args=({},))
    thread.start()
    ours.sendall(b'{"stop": true}\n')
    thread.join(5)
    assert not thread.is_alive()


def test_the_api_process_never_imports_torch():
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "import draftgraph.serve.app, draftgraph.serve.run, draftgraph.serve.engine_process\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
