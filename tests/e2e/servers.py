"""Service processes for the end-to-end tests: started on free ports, killed, paused and started again; and requests."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.v1 import draft_service_pb2_grpc, generation_service_pb2_grpc, target_service_pb2_grpc, types_pb2
from specdec.v1 import generation_service_pb2 as pb
from tests.e2e.fork_server import ForkedProcess

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tandem" / "models"
TARGET_MODEL = str(MODELS / "python-12m")
DRAFT_MODEL = str(MODELS / "python-1m")
START_TIMEOUT_S = 120


class ServerProcess:
    """``python -m MODULE ARGUMENT…`` and the line of JSON it prints once it serves."""

    #: Whether modules run in forks of a process that has imported them, which takes seconds.
    is_forked = False

    def __init__(self, module, *arguments):
        self.command = [sys.executable, "-m", module, *arguments]
        self.module = module
        self.ready = {}
        self.log = deque(maxlen=200)
        self._is_ready = threading.Event()
        self._process = None

    def start(self):
        """Start and wait until the process says it is ready."""
        self.launch()
        return self.wait_until_ready()

    def launch(self):
        """Start; several processes load side by side so."""
        self._is_ready.clear()
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        if self.is_forked:
            _, _, module, *arguments = self.command
            self._process = ForkedProcess(module, arguments, environment, ROOT)
        else:
            self._process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
            )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def wait_until_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready.wait(0.05):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{self.module} did not become ready:\n" + "".join(self.log))
        return self

    def _read(self, stream):
        with stream:
            for line in stream:
                self.log.append(line)
                if line.startswith("{") and '"ready"' in line:
                    self.ready = json.loads(line)
                    self._is_ready.set()

    @property
    def pid(self):
        return self._process.pid

    def signal(self, number):
        self._process.send_signal(number)

    def kill(self):
        """SIGKILL, and wait."""
        self._process.kill()
        self.wait()

    def wait(self, timeout_s=30):
        """The exit status."""
        status = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    @property
    def is_running(self):
        return self._process is not None and self._process.poll() is None

    def stop(self):
        """SIGTERM, and wait; a process that hangs or does not end with status 0 fails the test."""
        if not self.is_running:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            status = self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.module} ignored SIGTERM:\n" + "".join(self.log)) from None
        assert status == 0, f"{self.module} ended with status {status}:\n" + "".join(self.log)

    def restart_on_same_port(self):
        """Start again where it listened before."""
        self.command = [*self.command, "--port", str(self.ready["port"])]
        if "grpc_port" in self.ready:
            self.command += ["--grpc-port", str(self.ready["grpc_port"])]
        return self.start()

    @property
    def address(self):
        if "--socket" in self.command:
            return self.command[self.command.index("--socket") + 1]
        return f"127.0.0.1:{self.ready['port']}"


def target_process(*arguments, model=TARGET_MODEL):
    return ServerProcess("target_service", "--model", model, "--num-threads", "1", *arguments)


def draft_process(*arguments, model=DRAFT_MODEL):
    return ServerProcess("draft_service", "--model", model, "--num-threads", "1", *arguments)


def fake_target(*arguments):
    """A process with a toy target: no torch, the real servicer."""
    return ServerProcess("tests.e2e.fake_service", "target", *arguments)


def fake_draft(*arguments):
    """A process with a toy draft that agrees with the toy target most of the time."""
    return ServerProcess("tests.e2e.fake_service", "draft", *arguments)


@dataclass
class Stack:
    """A gateway with its targets and drafts."""

    targets: list[ServerProcess]
    drafts: list[ServerProcess]
    gateway: ServerProcess
    exits: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def start(cls, targets, drafts=(), *gateway_arguments):
        """Start a gateway, and the targets and drafts that do not run yet; ``close`` ends what was started here."""
        exits = ExitStack()
        started = [process for process in (*targets, *drafts) if not process.is_running]
        try:
            for process in started:
                process.launch()
                exits.callback(process.stop)
            for process in started:
                process.wait_until_ready()
            # What a test counts must not depend on how fast this machine is.
            gateway = ServerProcess(
                "tests.e2e.draft_first_gateway",
                *("--targets", ",".join(process.address for process in targets)),
                *(["--drafts", ",".join(process.address for process in drafts)] if drafts else []),
                *("--tokenizer", TARGET_MODEL, "--port", "0", "--grpc-port", "0"),
                "--fixed-draft-length",
                *gateway_arguments,
            ).start()
            exits.callback(gateway.stop)
        except BaseException:
            exits.close()
            raise
        return cls(list(targets), list(drafts), gateway, exits)

    def close(self):
        self.exits.close()

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self.gateway.ready['port']}"

    @property
    def grpc_address(self):
        return f"127.0.0.1:{self.gateway.ready['grpc_port']}"

    def complete(self, prompt, **body):
        """POST /v1/completions; the parsed answer."""
        answer = httpx.post(f"{self.base_url}/v1/completions", json={"prompt": prompt, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generation(self, channel):
        return generation_service_pb2_grpc.GenerationServiceStub(channel)

    def load_of_target(self, index=0):
        """Occupancy of a target."""
        with grpc.insecure_channel(self.targets[index].address) as channel:
            stub = target_service_pb2_grpc.TargetServiceStub(channel)
            return stub.GetModelInfo(types_pb2.GetModelInfoRequest(), timeout=30).load

    def load_of_draft(self, index=0):
        """Occupancy of a draft."""
        with grpc.insecure_channel(self.drafts[index].address) as channel:
            stub = draft_service_pb2_grpc.DraftServiceStub(channel)
            return stub.GetModelInfo(types_pb2.GetModelInfoRequest(), timeout=30).load


def request_of(prompt, *, max_tokens, temperature=0.0, seed=None, ignore_eos=True, **fields):
    """A request for a text, or for token ids."""
    if not isinstance(prompt, str):
        fields["token_ids"] = types_pb2.TokenIds(ids=prompt)
    else:
        fields["text"] = prompt
    return pb.GenerateRequest(
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        seed=seed,
        sampling=types_pb2.SamplingParams(temperature=temperature),
        **fields,
    )


def collect(stack, request, *, acts=None):
    """All pieces of one request; each of ``acts`` runs in the middle, once so many tokens have come."""
    pieces, count, left = [], 0, dict(acts or {})
    with grpc.insecure_channel(stack.grpc_address) as channel:
        for piece in stack.generation(channel).Generate(request, timeout=120):
            pieces.append(piece)
            count += len(piece.token_ids)
            for at_token in [at for at in left if count >= at]:
                left.pop(at_token)()
    assert not left, "the request ended before the failure was injected"
    return pieces


def collect_together(stack, requests):
    """The token ids of several requests sent at once."""

    async def run():
        async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

            async def one(request):
                return [token async for piece in stub.Generate(request, timeout=120) for token in piece.token_ids]

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())


def ids_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def speculates(stack, prompt):
    """Whether drafted tokens are accepted."""
    pieces = collect(stack, request_of(prompt, max_tokens=40))
    return pieces[-1].speculation.num_accepted_draft_tokens > 0


def is_free(stack):
    """Whether the targets hold no session and no block."""
    loads = map(stack.load_of_target, range(len(stack.targets)))
    return all(load.used_blocks == load.open_sessions == 0 for load in loads)


def health_of(address, service=""):
    """The standard health answer, by name."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def wait_until(condition, what="the condition", timeout_s=30.0):
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.02)
