"""``tandem chat`` in a real terminal, against a small real server."""

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main as cli

TIMEOUT_S = 30
#: Makes standard input the terminal whose Ctrl-C reaches the program, then becomes the program.
OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class ChatServer(ThreadingHTTPServer):
    """Answers "you said MESSAGE"; an answer to "slow" never ends, and one to "bad" is an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[list[dict[str, str]]] = []
        self.left = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._start(200)
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        self.server.asked.append(messages)
        text = messages[-1]["content"]
        if text == "bad":
            self._start(400)
            self.wfile.write(b'{"error": {"message": "no such luck"}}')
            return
        self._start(200)
        if text == "think":
            for piece in ("let me ", "see"):
                self._send({"choices": [{"delta": {"reasoning_content": piece}}]})
        self._send({"choices": [{"delta": {"content": f"you said {text}"}}]})
        if text == "slow":
            self.connection.settimeout(TIMEOUT_S)
            self.connection.recv(1)  # returns when the client leaves
            self.server.left.set()
            return
        speculation = {"no_speculation_reason": "pacing"}
        usage = {"completion_tokens": 3}
        self._send({"choices": [], "usage": usage, "metrics": {"speculative_decoding": speculation}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _start(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, url: str, state: Path, *argv: str) -> None:
        self._terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "tandem", "chat", "--url", url, *argv],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm"},
        )
        os.close(inner)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, text: str) -> str:
        """The output up to a text."""
        seen, deadline = "", time.monotonic() + TIMEOUT_S
        while text not in seen:
            assert time.monotonic() < deadline, f"no {text!r} in {seen!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                seen += os.read(self._terminal, 1).decode(errors="replace")
        return seen

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until a text comes: CPython's readline misses a signal that comes while it handles a key."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.type("\x03")
            if select.select([self._terminal], [], [], 1.0)[0]:
                break
        self.wait_for(text)

    def ask(self, keys: str, text: str) -> str:
        """Type a line, and the output from the text up to the next prompt."""
        self.type(keys + "\n")
        return self.wait_for(text) + self.wait_for("you> ")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def chat(server: ChatServer, tmp_path: Path) -> Iterator[Any]:
    made: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        made.append(Terminal(f"http://127.0.0.1:{server.server_address[1]}", tmp_path, *argv))
        made[-1].wait_for("you> ")
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


def test_a_chat_with_its_commands(chat: Any, server: ChatServer) -> None:
    terminal = chat("--system", "Be brief.")
    assert "drafting does not pay off" in terminal.ask("one", "you said one")
    terminal.ask("two", "you said two")
    assert [message["content"] for message in server.asked[-1]] == ["Be brief.", "one", "you said one", "two"]
    assert "/system TEXT" in terminal.ask("/help", "/quit")
    assert "2 answers: 6 tokens" in terminal.ask("/stats", "last answer: 3 tokens")
    terminal.ask("/system Be long.", "(instruction: Be long.)")
    terminal.ask("/reset", "(a new conversation)")
    terminal.ask("/rest", "/rest is no command")
    terminal.ask("bad", "error: no such luck")
    terminal.ask("three", "you said three")
    assert [message["content"] for message in server.asked[-1]] == ["Be long.", "three"]
    terminal.type("/quit\n")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_thoughts_are_printed_beside_the_answer(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["chat", "--url", f"http://127.0.0.1:{server.server_address[1]}", "--message", "think"]
    assert cli.main(asked) == 0
    printed = capsys.readouterr()
    assert printed.out == "you said think\n"
    assert printed.err.startswith("let me see\n\n3 tokens")
    assert cli.main([*asked, "--quiet"]) == 0
    assert capsys.readouterr() == ("you said think\n", "")


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: Any, server: ChatServer) -> None:
    terminal = chat()
    terminal.type("slow\n")
    terminal.wait_for("you said slow")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    assert server.left.wait(TIMEOUT_S)
    terminal.wait_for("you> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt_until("you> ")
    terminal.ask("more", "you said more")
    assert [message["content"] for message in server.asked[-1]] == ["slow", "you said slow", "more"]
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_lines_are_edited_and_kept_for_later_chats(chat: Any, server: ChatServer, tmp_path: Path) -> None:
    first = chat()
    first.ask("onX\x7fe", "you said one")
    first.type("\x04")
    assert first.process.wait(TIMEOUT_S) == 0
    history = tmp_path / "tandem" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    second = chat()
    second.ask("\x1b[A", "you said one")
    assert [messages[-1]["content"] for messages in server.asked] == ["one", "one"]
