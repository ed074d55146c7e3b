"""Keys: who is let in, what a tenant is called, and that nobody gets at the answers of another."""

import httpx
import openai
import pytest
from serve_tools import SLOW, LiveServer

from draftgraph.errors import UsageError
from draftgraph.serve.settings import Keys, ServerSettings, read_keys

OPEN = ("/health", "/ready", "/docs", "/openapi.json")
CLOSED = ("/v1/models", "/v1/models/fake", "/metrics", "/v1/chat/completions", "/v1/nothing", "/nothing")


@pytest.fixture(scope="module")
def server():
    with LiveServer(api_keys=("first-key", "schlüssel"), cors_origins=("http://page.example",)) as server:
        yield server


def get(server, path, authorization=None) -> httpx.Response:
    headers = {} if authorization is None else {"Authorization": authorization}
    return httpx.get(server.url + path, headers=headers)


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer first-ke",
        "Bearer first-keyy",
        "first-key",
        "Basic first-key",
    ],
)
def test_without_a_right_key_there_is_no_answer(server, path, authorization):
    answer = get(server, path, authorization)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_any_of_the_keys_is_let_in(server):
    assert get(server, "/v1/models", "Bearer first-key").status_code == 200
    assert get(server, "/v1/models", "bearer  first-key").status_code == 200
    assert get(server, "/v1/models", "Bearer schlüssel".encode()).status_code == 200


def test_openais_client_sends_its_key(server):
    asked = {"model": "fake", "prompt": "hello", "temperature": 0}
    assert server.client(api_key="first-key").completions.create(**asked).choices[0].text == "hello"
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").completions.create(**asked)


@pytest.mark.parametrize("path", OPEN)
def test_pages_that_tell_nothing_are_open(server, path):
    assert get(server, path).status_code == 200


def test_a_body_is_not_read_without_a_key(server):
    answer = httpx.post(f"{server.url}/v1/completions", content=b"x" * 10_000_000)
    assert answer.status_code == 401


def test_pages_of_a_named_origin_may_ask(server):
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{server.url}/v1/completions", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page.example"
    other = httpx.options(f"{server.url}/v1/completions", headers=asked | {"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_any_host_name_is_answered_to_where_keys_are_needed(server):
    assert httpx.get(f"{server.url}/health", headers={"Host": "api.example"}).status_code == 200


def test_a_tenant_is_known_by_a_digest_of_his_key():
    keys = Keys(["a", "b"])
    assert keys.tenant(b"Bearer a") != keys.tenant(b"Bearer b")
    assert len(keys.tenant(b"Bearer a")) == 32
    assert keys.tenant(b"Bearer a") == Keys(["b", "c", "a"]).tenant(b"Bearer a")
    assert keys.tenant(b"Bearer c") is None and keys.tenant(None) is None
    assert Keys([]).tenant(None) == Keys([]).tenant(b"Bearer x") == ""


def test_every_job_carries_its_tenant(server, monkeypatch):
    sent = []
    send = server.engine._send
    monkeypatch.setattr(server.engine, "_send", lambda message: (sent.append(message), send(message)))
    for key in ("first-key", "schlüssel", "first-key"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    tenants = [message["submit"]["tenant"] for message in sent if "submit" in message]
    assert tenants[0] == tenants[2] != tenants[1] and "" not in tenants
    assert not any(key in str(sent) for key in ("first-key", "schlüssel"))


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  \none\n")
    assert read_keys(None) == ()
    monkeypatch.setenv("DRAFTGRAPH_API_KEYS", "three, two,")
    assert read_keys(str(file)) == ("three", "two", "one")
    monkeypatch.setenv("DRAFTGRAPH_API_KEYS", " , ")
    assert read_keys(None) == ()


def test_a_file_without_keys_lets_nobody_in_by_mistake(tmp_path):
    file = tmp_path / "keys"
    for content in (b"", b"\n# nothing\n", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="one key a line"):
            read_keys(str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))


class TestReload:
    """On SIGHUP."""

    @pytest.fixture
    def file(self, tmp_path):
        file = tmp_path / "keys"
        file.write_text("old\nkept\n")
        return file

    @pytest.fixture
    def server(self, file):
        with LiveServer(api_keys=read_keys(str(file)), key_file=str(file)) as server:
            yield server

    def let_in(self, server) -> list[str]:
        return [key for key in ("old", "kept", "new") if get(server, "/v1/models", f"Bearer {key}").status_code == 200]

    def test_keys_are_those_that_the_file_has_now(self, server, file):
        assert self.let_in(server) == ["old", "kept"]
        file.write_text("kept\nnew\n")
        server.server.reload()
        assert self.let_in(server) == ["kept", "new"]

    def test_streams_go_on(self, server, file):
        asked = {"model": "fake", "prompt": f"the cat {SLOW}", "temperature": 0, "max_tokens": 30}
        stream = server.client(api_key="old").completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        text = next(chunks := iter(stream)).choices[0].text
        file.write_text("new\n")
        server.server.reload()
        assert self.let_in(server) == ["new"]
        text += "".join(chunk.choices[0].text for chunk in chunks)
        assert len(text.split()) > 8

    @pytest.mark.parametrize("content", [None, b"", b"# none\n", b"\xff"])
    def test_a_bad_file_changes_nothing(self, server, file, content, caplog):
        file.unlink() if content is None else file.write_bytes(content)
        server.server.reload()
        assert self.let_in(server) == ["old", "kept"]
        assert any("not read again" in line and str(file) in line for line in caplog.messages)


def test_settings_do_not_show_keys():
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))
