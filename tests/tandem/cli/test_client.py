"""The command line's REST client against a small real server."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from specdec.errors import InvalidRequest, NotFound, Unavailable
from tandem.certificates import write_certificates
from tandem.cli import main as cli
from tandem.rest_client import RestClient
from tests.http_server import serving


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/v1/models":
            self.answer(200, b'{"data": [{"id": "m"}]}')
        else:
            self.answer(404, b'{"error": {"message": "no such thing"}}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "bad":
            self.answer(400, b'{"error": {"message": "prompt is bad"}}')
        elif body["prompt"] == "busy":
            self.answer(429, b"slow down")
        elif body["prompt"] == "cut":
            self.answer(200, b'data: {"text": "a"}\n\n')
        elif body["prompt"] == "late":
            self.answer(200, b'data: {"text": "a"}\n\ndata: {"error": {"message": "lost", "code": 503}}\n\n')
        else:
            self.answer(200, b': comment\n\ndata: {"text": "a"}\n\ndata: {"text": "b"}\n\ndata: [DONE]\n\n')


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_streams_events(url: str, suffix: str) -> None:
    server = RestClient(url + suffix, timeout_s=5)
    assert [event["text"] for event in server.stream("/v1/completions", {"prompt": "x"})] == ["a", "b"]
    assert server.model() == "m"


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("bad", InvalidRequest, "prompt is bad"),
        ("busy", Unavailable, "HTTP status 429"),
        ("cut", Unavailable, "before it was complete"),
        ("late", Unavailable, "lost"),
    ],
)
def test_errors(url: str, prompt: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(RestClient(url, timeout_s=5).stream("/v1/completions", {"prompt": prompt}))


def test_unknown_path(url: str) -> None:
    with pytest.raises(NotFound, match="no such thing"):
        RestClient(url).get("/nowhere")


def test_health(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["health", "--url", url]) == 0
    assert capsys.readouterr().out == f"{url} is ready and serves m\n"


def test_health_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["health", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "tandem: error: http://127.0.0.1:9 does not answer: Connection refused\n"
    assert cli.main(["health", "--url", "ftp://x"]) == 2


def test_health_names_tls_where_it_may_be_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(address: str, timeout_s: float = 10.0) -> str:
        assert cli.main(["health", "--grpc", address, "--timeout-s", f"{timeout_s}"]) == 1
        return capsys.readouterr().err

    write_certificates(tmp_path)
    key, certificate = ((tmp_path / "target" / name).read_bytes() for name in ("key.pem", "cert.pem"))
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    try:
        assert "; if it speaks TLS, give --ssl-ca-certs" in error_of(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        assert "TLS" not in error_of(address, timeout_s=0.3)
    assert "TLS" not in error_of(address)  # nobody listens there any more
