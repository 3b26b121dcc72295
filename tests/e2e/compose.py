"""Try the image and docker-compose.yml as a user would: ``make compose``. Needs Docker, docker-compose and free ports.

Builds the image, starts the services, asks with the openai client, looks at what the containers may do and what the
network sees of them, takes the draft away and back. With ``--rolling`` two of each service run instead, and all are
restarted under load, one after the other: no request may fail, and no text may change.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import httpx
from openai import OpenAI

from tests.reliability.rolling import JOIN_S, LEAVE_S, roll, until_used

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final = "tandem-check"
#: What plain text gets from a service behind the gateway: a connection that ends.
PLAIN_CALL: Final = """
import grpc, sys
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    try:
        print(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5))
    except grpc.RpcError as error:
        print(error.code().name)
"""
SERVICES: Final = ("target", "draft", "gateway")
#: Of the host, one for each gateway.
PORTS: Final = {"TANDEM_HTTP_PORT": "8000-8001", "TANDEM_GRPC_PORT": "50051-50052"}
TLS: Final = [f"--ssl-{name}=/certs/{file}" for name, file in (("certfile", "cert.pem"), ("keyfile", "key.pem"))]


def run(*command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, check=check, text=True, capture_output=True
    )


def compose(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    return run(*command, "-p", PROJECT, *arguments, **options)


def say(text: str) -> None:
    print(text, flush=True)


def inside(service: str, *command: str) -> str:
    """What a command prints in a container of a service."""
    done = compose("exec", "-T", service, *command, check=False)
    return (done.stdout + done.stderr).strip()


def wait_for(url: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, compose("logs", "--tail", "50", check=False).stdout
        time.sleep(1)


def check_answers(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt="def fibonacci(n):\n", max_tokens=48, temperature=0)
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    say(f"openai client: {model} wrote {answer.choices[0].text[:40]!r}…")
    deadline = time.monotonic() + 60
    while metrics["num_draft_tokens"] == 0:  # the draft may come a little later than the target
        assert time.monotonic() < deadline, metrics
        again = client.completions.create(model=model, prompt="def fibonacci(n):\n", max_tokens=48, temperature=0)
        assert again.choices[0].text == answer.choices[0].text
        metrics = again.model_extra["metrics"]["speculative_decoding"]
    say(f"drafted tokens {metrics['num_draft_tokens']}, accepted {metrics['num_accepted_draft_tokens']}")
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
    )
    assert sum(bool(chunk.choices) for chunk in chat)


def check_containers() -> None:
    for service in ("gateway", "target", "draft"):
        (described,) = json.loads(run("docker", "inspect", compose("ps", "-q", service).stdout.strip()).stdout)
        host = described["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert not host["CapAdd"], service
        assert any("no-new-privileges" in option for option in host["SecurityOpt"]), service
        status = dict(
            line.split(":\t") for line in inside(service, "cat", "/proc/1/status").splitlines() if ":\t" in line
        )
        assert "0" not in status["Uid"].split(), status["Uid"]
        assert {status[f"Cap{kind}"].strip("0") for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {""}
        assert status["NoNewPrivs"] == "1"
        written = inside(service, "sh", "-c", "touch /app/x /usr/x; touch /certs/x")
        assert written.count("Read-only file system") == 3, written
        bound = {each["HostIp"] for ports in described["NetworkSettings"]["Ports"].values() for each in ports or ()}
        assert bound == ({"127.0.0.1"} if service == "gateway" else set()), bound
        say(f"{service}: uid {status['Uid'].split()[0]}, no capabilities, read-only, published on {bound or 'no port'}")


def check_mutual_tls() -> None:
    for service, port in (("target", 50061), ("draft", 50062)):
        address = f"{service}:{port}"
        plain = inside("gateway", "python3", "-c", PLAIN_CALL, address)
        assert plain == "UNAVAILABLE", plain
        ca = ["tandem", "health", "--grpc", address, "--ssl-ca-certs=/certs/ca.pem"]
        assert "SERVING" in inside("gateway", *ca, *TLS)
        assert "does not answer" in inside("gateway", *ca)  # no certificate
        other = "draft" if service == "target" else "target"
        assert "does not answer" in inside(other, *ca, *TLS)  # a certificate that may not call
        say(f"{address}: plain text, no certificate and the {other}'s certificate are refused; the gateway's is served")


def check_refusal() -> None:
    done = compose("run", "--rm", "--no-deps", "gateway", check=False, TANDEM_PUBLISH="0.0.0.0")
    assert done.returncode == 2, done.stderr
    assert "--insecure" in done.stdout + done.stderr
    say("published on 0.0.0.0 without keys the gateway refuses to start")


class Containers:
    """Two containers of each service."""

    def __init__(self) -> None:
        compose("up", "-d", *(f"--scale={service}=2" for service in SERVICES), **PORTS)
        self._ids = {
            f"{service} {i}": container
            for service in SERVICES
            for i, container in enumerate(compose("ps", "-q", service).stdout.split())
        }
        assert len(self._ids) == 2 * len(SERVICES), self._ids
        #: REST and gRPC of the gateways that are used.
        self._urls: dict[str, str] = {}
        self._grpc_addresses: dict[str, str] = {}
        self._rng = random.Random(3)

    @property
    def names(self) -> list[str]:
        return list(self._ids)

    @property
    def base_url(self) -> str:
        return self._urls[self._choose()]

    @property
    def grpc_address(self) -> str:
        return self._grpc_addresses[self._choose()]

    async def replace(self, name: str) -> None:
        url = self._urls.pop(name, None)
        await asyncio.sleep(LEAVE_S if url else 0)
        for act in ("stop", "start"):
            await asyncio.to_thread(run, "docker", act, self._ids[name])
        await self.wait_until_used(name)

    async def wait_until_used(self, name: str) -> None:
        if "gateway" in name:
            url = self._url(name, "8000")
            await asyncio.to_thread(wait_for, url)
            self._grpc_addresses[name] = self._url(name, "50051").removeprefix("http://")
            self._urls[name] = url
            return
        (described,) = json.loads(run("docker", "inspect", self._ids[name]).stdout)
        (network,) = described["NetworkSettings"]["Networks"].values()
        address = f"{network['IPAddress']}:{50061 if 'target' in name else 50062}"
        async with asyncio.timeout(120), httpx.AsyncClient(timeout=JOIN_S) as client:
            for gateway_url in self._urls.values():
                await until_used(address, gateway_url, client)

    def _choose(self) -> str:
        return self._rng.choice(list(self._urls))

    def _url(self, name: str, port: str) -> str:
        return "http://" + run("docker", "port", self._ids[name], port).stdout.split()[0]


async def check_rolling_restart() -> None:
    containers = Containers()
    for name in reversed(containers.names):  # gateways first: they tell about the others
        await containers.wait_until_used(name)
    say(await roll(containers, num_tokens=120, rounds=1))


def check_services() -> None:
    url = f"http://127.0.0.1:{os.environ.get('TANDEM_HTTP_PORT', '8000')}"
    compose("up", "-d")
    wait_for(url)
    check_answers(url)
    check_containers()
    check_mutual_tls()
    check_refusal()
    compose("restart", "draft")
    check_answers(url)
    say("the draft was restarted")


def main() -> int:
    compose("build")
    try:
        if "--rolling" in sys.argv[1:]:
            asyncio.run(check_rolling_restart())
        else:
            check_services()
    finally:
        compose("down", "--volumes", "--timeout", "10", check=False)
    say("docker-compose works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
