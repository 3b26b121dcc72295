"""``tandem serve`` with real processes."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.cli import main as cli
from tandem.launcher import deployment
from tandem.launcher.deployment import free_port
from tandem.launcher.supervisor import ServiceSpec
from tandem.rest_client import RestClient

pytestmark = pytest.mark.e2e

TIMEOUT_S = 90


class Launcher:
    """A running ``tandem serve`` and its output, line by line."""

    def __init__(self, *argv: str) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "serve", "--num-threads", "1", *self._ports(), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.server = RestClient(f"http://127.0.0.1:{self.port}", timeout_s=30)

    def _ports(self) -> list[str]:
        return ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                line = self._queue.get(timeout=1)
            except queue.Empty:
                assert self.process.poll() is None, f"it ended: {self.lines}"
                continue
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in {self.lines}")

    def children(self) -> dict[str, psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return {line[5]: child for child in children if len(line := child.cmdline()) > 5}

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        while not self._queue.empty():
            self.lines.append(self._queue.get())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))


@pytest.fixture
def launch() -> Iterator[type[Launcher]]:
    made: list[Launcher] = []

    class Recorded(Launcher):
        def __init__(self, *argv: str) -> None:
            made.append(self)
            super().__init__(*argv)

    yield Recorded
    for launcher in made:
        launcher.close()


def complete(server: RestClient, prompt: str = "def f(", **options: object) -> str:
    body = {"model": server.model(), "prompt": prompt, "max_tokens": 16, "temperature": 0, **options}
    return "".join(choice["text"] for event in server.stream("/v1/completions", body) for choice in event["choices"])


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=15)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def check_reach(ready: str, children: dict[str, psutil.Process]) -> None:
    """Other users of this machine reach the gateway's ports and nothing else."""
    sockets = [Path(path) for path in re.findall(r"unix:(\S+\.sock)", ready)]
    assert [path.name for path in sockets] == ["target.sock", "draft.sock"]
    assert all(path.is_socket() for path in sockets)
    assert {path.stat().st_mode & 0o777 for path in sockets} == {0o600}
    assert sockets[0].parent.stat().st_mode & 0o777 == 0o700
    for name, child in children.items():
        listening = [each.laddr for each in child.net_connections("all") if each.status == psutil.CONN_LISTEN]
        assert len(listening) == (2 if name == "gateway" else 0), listening
        assert not [each for each in child.net_connections("unix") if str(each.laddr).startswith(("@", "\0"))]


def test_a_whole_life(launch: type[Launcher], capsys: pytest.CaptureFixture[str]) -> None:
    log = ("--log-format", "json", "--log-requests")
    launcher = launch("--dtype", "float32", "--drain-s", "5", "--fixed-draft-length", *log)
    ready = launcher.wait_for("ready:")
    assert re.fullmatch(
        rf"ready: http://127\.0\.0\.1:{launcher.port}/v1, gRPC 127\.0\.0\.1:{launcher.grpc_port}"
        r" \| python-12m, drafted by python-1m, k = 4 \| target unix:(.+)/target\.sock, draft unix:\1/draft\.sock",
        ready,
    )
    children = launcher.children()
    assert set(children) == {"target_service", "draft_service", "gateway"}
    check_reach(ready, children)
    if sys.platform == "linux":
        interrupting = {name for name, child in children.items() if os.sched_getscheduler(child.pid) != os.SCHED_BATCH}
        assert interrupting == {"target_service"}
    text = complete(launcher.server)
    assert text
    request = json.loads(launcher.wait_for('"tokens_per_s"'))
    assert (request["service"], request["outcome"], request["tokens"]) == ("gateway", "length", 16)

    assert cli.main(["generate", "def f(", "--url", launcher.server.url, "--max-tokens", "16"]) == 0
    assert capsys.readouterr().out == text + "\n"
    for _ in range(20):  # a text may end before the draft is there
        assert cli.main(["generate", "def f(", "--url", launcher.server.url, "--max-tokens", "256"]) == 0
        if "acceptance length" in (said := capsys.readouterr().err):
            break
    assert re.fullmatch(r"\d+ tokens in [\d.]+ s, [\d.]+ tokens/s, acceptance length .*\n", said)
    assert cli.main(["chat", "--url", launcher.server.url, "--message", "hello", "--max-tokens", "4"]) == 0

    children["draft_service"].kill()
    assert complete(launcher.server) == text
    launcher.wait_for("draft was ended by SIGKILL; starting it again")
    launcher.wait_for("draft is back")
    children["target_service"].kill()
    launcher.wait_for("target is back")
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # the gateway looks for the target a few times a second
        try:
            assert complete(launcher.server) == text
            break
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    children = launcher.children()
    assert launcher.end(signal.SIGINT) == 0
    assert gone(list(children.values()))
    assert not Path(re.findall(r"unix:(\S+)/target", ready)[0]).exists()
    launcher.close()
    lines = [json.loads(line) for line in launcher.lines if not line.startswith("ready:")]
    assert len(lines) == len(launcher.lines) - 1
    assert {line["service"] for line in lines} == {"target", "draft", "gateway", "tandem"}
    news = "; ".join(line["message"] for line in lines if line["service"] == "tandem")
    assert all(f"{name} is ready after " in news for name in ("target", "draft", "gateway"))
    assert not [line for line in launcher.lines if "Traceback" in line]


def test_sigterm_while_starting(launch: type[Launcher]) -> None:
    launcher = launch("python-12m")
    launcher.wait_for("listening")
    children = list(launcher.children().values())
    assert launcher.end(signal.SIGTERM) == 0
    assert gone(children)


def test_a_service_that_cannot_start_ends_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("import sys; print('the weights are missing'); sys.exit(1)")
    (tmp_path / "loading.py").write_text("import time; time.sleep(3600)")
    services_of = deployment.services_of

    def stubs(*args: Any) -> list[ServiceSpec]:
        environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        modules = {"target": "broken", "draft": "loading", "gateway": "loading"}
        services = services_of(*args)
        assert [service.name for service in services] == list(modules)
        return [replace(service, module=modules[service.name], environment=environment) for service in services]

    monkeypatch.setattr(deployment, "services_of", stubs)
    before = psutil.Process().children()  # services that other tests share
    assert cli.main(["serve", "--port", "0", "--grpc-port", "0"]) == 1
    words = "tandem: error: target exited with code 1 before it was ready: the weights are missing"
    assert capfd.readouterr().err.splitlines()[-1] == words
    assert gone([child for child in psutil.Process().children() if child not in before])


def test_a_taken_port_is_named(launch: type[Launcher]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch("python-12m", "--port", str(port))
        assert launcher.process.wait(TIMEOUT_S) == 2
    launcher.close()
    remedy = "Address already in use; choose another --port (0 takes a free one)"
    assert launcher.lines == [f"tandem: error: cannot listen on 127.0.0.1:{port}: {remedy}"]


def test_embedded(launch: type[Launcher]) -> None:
    vllms = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--load-format", "auto")
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"  # which warns
    launcher = launch("--embedded", "--dtype", "float32", "--allow-credentials", "--chat-template", endless, *vllms)
    assert launcher.wait_for("ready:").endswith("| python-12m, drafted by python-1m, k = 4")
    flags, reasons = zip(*(line.split(": ", 1) for line in launcher.lines if line.startswith("[serve] ")), strict=True)
    assert flags == (
        "[serve] --enable-auto-tool-choice, --tool-call-parser hermes",
        "[serve] --load-format auto",
        "[serve] --allow-credentials",
    )
    assert all(reasons)
    warnings = [line for line in launcher.lines if " WARNING " in line]
    assert len(warnings) == 1, warnings
    assert "an example conversation cannot be rendered" in warnings[0]
    # What it does is said before torch is imported.
    assert launcher.lines[len(flags)].startswith("[tandem] starting in this process: python-12m, drafted by python-1m")
    assert launcher.children() == {}
    assert complete(launcher.server)
    assert launcher.end(signal.SIGTERM) == 0


def test_generate_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["def f(", "--max-tokens", "8", "--speculative-model", "[ngram]", "--model", "python-12m"]
    assert cli.main(["generate", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    loading, speed = printed.err.splitlines()
    assert loading.startswith("loading python-12m, drafted by ngram, k = ")
    assert speed.startswith("8 tokens in ")


@pytest.mark.exhaustive  # CI runs `make demo`
def test_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "demo"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout.count("the texts are equal") == 3
    assert "draft is ready after" in done.stdout
    assert "draft failures: 1" in done.stdout
    assert "the three texts are equal" in done.stdout
