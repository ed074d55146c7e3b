"""Hub names: a hub on this machine that serves, refuses, goes away, or was never there."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from tiny_models import WORDS, one_line_of, start_python, tiny_llama, tokenizer_over

from draftgraph.errors import LoadError
from draftgraph.models import load_model
from draftgraph.models.faults import explain

COMMIT = "a" * 40


@pytest.fixture
def hub(tmp_path):
    """Serves the model me/tiny; me/gated is gated."""
    folder = tmp_path / "served"
    tiny_llama().save_pretrained(folder)
    tokenizer_over(WORDS).save_pretrained(folder)

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0].strip("/")
            if path == "api/models/me/tiny":
                self.reply(200, json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": [], "tags": []}).encode())
            elif path.startswith("me/gated/"):
                self.reply(403, error="GatedRepo")
            elif not path.startswith(("me/tiny/", "api/models/me/tiny/")):
                self.reply(404, error="RepoNotFound")
            elif (file := folder / path.rpartition("/")[2]).is_file():
                self.reply(200, file.read_bytes())
            else:
                self.reply(404, error="EntryNotFound")

        do_HEAD = do_GET

        def reply(self, status, content=b"", error=None):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_name_loads_and_its_cached_copy_when_the_hub_is_away(hub, tmp_path):
    code = """
from draftgraph.errors import LoadError
from draftgraph.models import load_model
def attempt(name):
    try:
        model, tokenizer = load_model(name, device="cpu")
        print(type(model).__name__, tokenizer.convert_tokens_to_ids("word7"), flush=True)
    except LoadError as error:
        print(error, flush=True)
for name in ("me/tiny", "me/gated", "me/none"):
    attempt(name)
input()
attempt("me/tiny")
"""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    process = start_python(code, HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "home"))
    loaded, gated, unknown = (process.stdout.readline() for _ in range(3))
    hub.shutdown()
    hub.server_close()
    out, err = process.communicate("\n", timeout=100)
    assert loaded == out == "LlamaForCausalLM 8\n", err
    assert "me/gated is gated" in gated
    assert "no model named me/none" in unknown
    (line,) = (line for line in err.splitlines() if line.startswith("draftgraph"))
    assert "the hub does not answer" in line and "cached copy of me/tiny" in line


def test_a_hub_name_offline_and_not_cached_is_said():
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE") as error:
        load_model("someone/no-such-model", device="cpu")
    one_line_of(error)


def test_an_unreachable_hub_is_said_soon():
    code = """
import time
from draftgraph.errors import LoadError
from draftgraph.models import load_model
import transformers
before = time.monotonic()
try:
    load_model("someone/some-model", device="cpu")
except LoadError as error:
    print(error)
print(time.monotonic() - before < 15)
"""
    process = start_python(code, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    out, err = process.communicate(timeout=100)
    line, soon = out.splitlines()
    assert "the hub cannot be reached" in line and "HF_ENDPOINT" in line, err
    assert soon == "True"


def hub_error(kind, status):
    from huggingface_hub import errors

    try:
        import httpx2 as httpx
    except ImportError:
        import httpx

    response = httpx.Response(status, request=httpx.Request("HEAD", "http://hub.invalid"))
    return getattr(errors, kind)("refused\nby the hub", response=response)


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("GatedRepoError", 403, "is gated.*HF_TOKEN"),
        ("RepositoryNotFoundError", 401, "no model named a/b.*HF_TOKEN"),
        ("RevisionNotFoundError", 404, "revision"),
    ],
)
def test_a_refusal_by_the_hub_is_said(monkeypatch, kind, status, said):
    def refuse(*_, **__):
        raise hub_error(kind, status)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(LoadError, match=said) as error:
        load_model("a/b", device="cpu")
    one_line_of(error)
    wrapped = OSError("many\nlines")
    wrapped.__cause__ = hub_error(kind, status)
    assert str(explain(wrapped, "a/b")) == str(error.value)
