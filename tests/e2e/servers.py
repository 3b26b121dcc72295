"""Real service processes for the end-to-end tests: started on free ports, killed, paused and started again."""

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
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.v1 import draft_service_pb2_grpc, generation_service_pb2_grpc, target_service_pb2_grpc, types_pb2

MODELS = Path(__file__).parents[2] / "tandem" / "models"
TARGET_MODEL = str(MODELS / "python-12m")
DRAFT_MODEL = str(MODELS / "python-1m")
START_TIMEOUT_S = 120


class ServerProcess:
    """``python -m MODULE ARGUMENT…`` and the line of JSON it prints once it serves."""

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
        self._process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
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

    def stop(self):
        """SIGTERM, and wait; a process that hangs is killed and fails the test."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.module} ignored SIGTERM:\n" + "".join(self.log)) from None

    def restart_on_same_port(self):
        """Start again where it listened before."""
        port = str(self.ready["port"])
        self.command = [*self.command, "--port", port]
        return self.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.ready['port']}"


def target_process(*arguments, model=TARGET_MODEL):
    return ServerProcess("target_service", "--model", model, "--num-threads", "1", *arguments)


def draft_process(*arguments, model=DRAFT_MODEL):
    return ServerProcess("draft_service", "--model", model, "--num-threads", "1", *arguments)


@dataclass
class Stack:
    """A gateway with its targets and drafts."""

    targets: list[ServerProcess]
    drafts: list[ServerProcess]
    gateway: ServerProcess
    exits: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def start(cls, *, targets=1, drafts=1, gateway_arguments=(), target_arguments=(), draft_arguments=()):
        exits = ExitStack()
        try:
            started_targets = [target_process(*target_arguments) for _ in range(targets)]
            started_drafts = [draft_process(*draft_arguments) for _ in range(drafts)]
            for process in (*started_targets, *started_drafts):
                process.launch()
                exits.callback(process.stop)
            for process in (*started_targets, *started_drafts):
                process.wait_until_ready()
            gateway = ServerProcess(
                "gateway",
                "--targets",
                ",".join(process.address for process in started_targets),
                *(["--drafts", ",".join(process.address for process in started_drafts)] if drafts else []),
                "--tokenizer",
                TARGET_MODEL,
                "--port",
                "0",
                "--grpc-port",
                "0",
                # What a test counts must not depend on how fast this machine is.
                "--fixed-draft-length",
                *gateway_arguments,
            ).start()
            exits.callback(gateway.stop)
        except BaseException:
            exits.close()
            raise
        return cls(started_targets, started_drafts, gateway, exits)

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
            return stub.GetModelInfo(types_pb2.GetModelInfoRequest(), timeout=10).load

    def load_of_draft(self, index=0):
        """Occupancy of a draft."""
        with grpc.insecure_channel(self.drafts[index].address) as channel:
            stub = draft_service_pb2_grpc.DraftServiceStub(channel)
            return stub.GetModelInfo(types_pb2.GetModelInfoRequest(), timeout=10).load


def health_of(address, service=""):
    """The standard health answer, by name."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def wait_until(condition, timeout_s=10.0, what="the condition"):
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.02)
