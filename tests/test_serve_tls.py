"""HTTPS: with a certificate of one's own, under the same limits; bad files are refused, new ones read on SIGHUP."""

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest
from cryptography import x509
from serve_tools import SERVE, TLSServer, write_pair

from draftgraph.errors import UsageError
from draftgraph.serve.connections import tls_context
from draftgraph.serve.settings import ServerSettings


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path, "first")


def certificate_of(port) -> str:
    return x509.load_pem_x509_certificate(
        ssl.get_server_certificate(("127.0.0.1", port)).encode()
    ).subject.rfc4514_string()


def test_answers_come_over_https(pair):
    with TLSServer(**pair) as server:
        verify = ssl.create_default_context(cafile=pair["tls_cert"])
        body = {"prompt": "hello there", "temperature": 0, "stream": True}
        with httpx.Client(verify=verify) as client:
            assert client.post(f"{server.url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            assert client.get(f"{server.url}/health").status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        assert server.get("/health").status_code == 200


def test_half_a_handshake_is_closed_in_time_and_counts_as_a_connection(pair):
    with TLSServer(**pair, header_seconds=1.0, max_connections=8) as server:
        half_open = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        assert server.get("/health").status_code == 200  # the oldest had to go
        for connection in half_open:
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            connection.close()
        assert server.get("/health").status_code == 200


def test_a_client_that_takes_no_leave_does_not_hold_up_the_end(pair):
    with TLSServer(**pair) as server:
        context = ssl.create_default_context(cafile=pair["tls_cert"])
        idle = context.wrap_socket(socket.create_connection(("127.0.0.1", server.port)), server_hostname="127.0.0.1")
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        started, server.server.should_exit = time.monotonic(), True
        server.thread.join(20)
        assert time.monotonic() - started < 10
        idle.close()


def test_a_renewed_certificate_is_read_on_sighup(tmp_path, pair):
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    settings = pair | {"api_keys": ["old"], "key_file": str(keys)}
    process = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(settings)], stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        port = int(next(lines).split("https://127.0.0.1:")[1].split()[0])
        assert any("the model is ready" in line for line in lines)
        assert certificate_of(port) == "CN=first"
        write_pair(tmp_path, "second")
        keys.write_text("new\n")
        process.send_signal(signal.SIGHUP)
        assert any(f"the certificate in {pair['tls_cert']} was read again" in line for line in lines)
        assert certificate_of(port) == "CN=second"
        verify = ssl.create_default_context(cafile=pair["tls_cert"])
        for key, status in (("old", 401), ("new", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"https://127.0.0.1:{port}/v1/models", headers=headers, verify=verify)
            assert answer.status_code == status
    finally:
        process.kill()
        process.communicate()


def test_a_bad_certificate_leaves_the_one_in_use(tmp_path, pair, caplog):
    with TLSServer(**pair) as server:
        good = (tmp_path / "cert.pem").read_bytes()
        key = (tmp_path / "key.pem").read_bytes()
        write_pair(tmp_path, "other")
        (tmp_path / "key.pem").write_bytes(key)  # not that of the new certificate
        server.server.reload()
        assert any("not read again" in line for line in caplog.messages)
        (tmp_path / "cert.pem").write_bytes(good)
        assert server.get("/health").status_code == 200 and certificate_of(server.port) == "CN=first"


def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, pair):
    locked = tmp_path / "locked"
    locked.mkdir()
    wrong = [
        pair | {"tls_cert": str(tmp_path / "missing")},
        pair | {"tls_key": pair["tls_cert"]},
        {"tls_cert": pair["tls_cert"]},
        {"tls_key": pair["tls_key"]},
        write_pair(locked, "locked", password=b"secret"),
    ]
    for settings in wrong:
        with pytest.raises(UsageError) as refused:
            tls_context(ServerSettings(**settings))
        assert "\n" not in str(refused.value) and "tls" in str(refused.value).lower()
