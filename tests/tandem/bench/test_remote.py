"""``tandem bench --url``: our own server over both of its APIs, and a stranger's."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from specdec.errors import InvalidRequest, Unavailable
from specdec.params import SamplingParams
from specdec.rules import Rule
from tandem.bench.answers import collect
from tandem.bench.remote import connect
from tandem.cli import main as cli
from tests.e2e.servers import Stack, fake_draft, fake_target
from tests.http_server import serving

TINY = ["--num-prompts", "1", "--max-tokens", "12", "--prompt-tokens", "8", "--fixed-draft-length"]


class Stranger(BaseHTTPRequestHandler):
    """An OpenAI-style server that knows nothing of ours: text only, usage in an event of its own."""

    bodies: ClassVar[list[dict[str, object]]] = []

    def log_message(self, *_: object) -> None: ...

    def send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send(b'{"data": [{"id": "theirs", "owned_by": "them"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body["prompt"] == "odd":
            self.send(b'data: {"choices": 5}\n\n')
            return
        events = [{"choices": [{"text": text, "token_ids": None}], "usage": None} for text in ("a", "", "bc")]
        events.append({"choices": [], "usage": {"completion_tokens": 5}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.send("".join([*lines, "data: [DONE]\n\n"]).encode())


@pytest.fixture
def stranger() -> Iterator[str]:
    Stranger.bodies = []
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Stranger)) as url:
        yield url


async def test_a_stranger_is_asked_in_plain_openai(stranger: str) -> None:
    async with connect(stranger, None) as remote:
        assert (remote.name, remote.is_tandem) == ("theirs", False)
        params = SamplingParams(temperature=0.0, max_tokens=5)
        answer = await collect(remote.system.stream("x", params, None, None))
        assert (answer.text, answer.num_tokens, len(answer.pieces)) == ("abc", 5, 2)
        assert set(Stranger.bodies[0]) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
        with pytest.raises(Unavailable, match="no completion"):
            await collect(remote.system.stream("odd", params, None, None))
    with pytest.raises(InvalidRequest, match="serves theirs, not ours"):
        async with connect(stranger, "ours"):
            pass


def test_measuring_a_stranger(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", stranger, "--batch-size", "1,2", *TINY]) == 0
    printed = capsys.readouterr().out
    assert "theirs" in printed
    assert "count as one token each" in printed
    assert "│ plain" not in printed
    plain = ["--plain-url", stranger, "--extra-body", '{"ignore_eos": true}']
    assert cli.main(["bench", "--url", stranger, *plain, "--text", "code,maths", "--batch-size", "1,2", *TINY]) == 0
    printed = capsys.readouterr().out
    for text in ("│ plain", "break-even", "≈2.50", "maths", f"plain: theirs at {stranger}"):
        assert text in printed
    assert Stranger.bodies[-1]["ignore_eos"] is True
    assert cli.main(["bench", "--url", stranger, "--k", "2"]) == 2
    assert "a server of ours" in capsys.readouterr().err


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    running = Stack.start([fake_target()], [fake_draft()])
    yield running
    running.close()


@pytest.mark.e2e
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_measuring_our_own(scheme: str, stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    url = stack.base_url if scheme == "http" else f"grpc://{stack.grpc_address}"
    rules = ["--temperature", "1", "--rules", "block,coupled"]
    assert cli.main(["bench", "--url", url, "--batch-size", "1,2", *TINY, *rules]) == 0
    printed = capsys.readouterr().out
    for text in ("toy", "plain", "server, block", "server, coupled", "acceptance per token"):
        assert text in printed
    assert "decode(1)" not in printed, "a client cannot see it"


@pytest.mark.e2e
@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_both_apis_tell_the_same(scheme: str, stack: Stack) -> None:
    url = stack.base_url if scheme == "http" else f"grpc://{stack.grpc_address}"
    async with connect(url, None) as remote:
        assert remote.is_tandem
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        plain = await collect(remote.system.stream("import os\n", params, None, 0))
        drafted = await collect(remote.system.stream("import os\n", params, Rule.BLOCK, 4))
        assert plain.text == drafted.text
        assert plain.num_tokens == drafted.num_tokens == 24
        assert plain.num_steps == 23
        assert drafted.num_steps is not None
        assert drafted.num_steps < 23
        assert not plain.speculation["num_spec_steps"]
        assert drafted.speculation["num_spec_steps"]
