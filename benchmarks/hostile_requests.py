"""What single hostile requests cost everybody else.

``python -m benchmarks.hostile_requests`` starts ``tandem serve`` with the bundled pair and keeps eight streams running.
It sends one attack after the other, each five times a second for some seconds. The table has the inter-token latency of
the streams, and the memory of the gateway with its workers above that at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import grpc
import grpc.aio
import psutil

from benchmarks.attacker import Attacker
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub

NUM_STREAMS: Final = 8
ATTACKS_PER_S: Final = 5
MB: Final = 10**6


@dataclass(frozen=True, slots=True)
class Attack:
    """One request: raw bytes for the REST port, or a message for a method of the gRPC API."""

    make: Callable[[], bytes]
    method: str = ""


def _post(path: str, body: str) -> bytes:
    content = body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content


def _completion(**fields: Any) -> bytes:
    return _post("/v1/completions", json.dumps({"prompt": "def", "max_tokens": 4} | fields))


def _chat(content: Any) -> bytes:
    return _post("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": content}]}))


def _generate(**fields: Any) -> bytes:
    given: dict[str, Any] = {"text": "def", "max_tokens": 4} | fields
    return pb.GenerateRequest(**given).SerializeToString()


def _sampling(**fields: Any) -> bytes:
    return _generate(sampling=types_pb2.SamplingParams(**fields))


def _nested(levels: int) -> bytes:
    return _post("/v1/completions", '{"prompt": ' + "[" * levels + "]" * levels + "}")


_PART: Final = {"type": "text", "text": "a"}
#: REST first, then gRPC.
ATTACKS: Final[Mapping[str, Attack]] = {
    "3.3 M negative ids as prompt": Attack(lambda: _completion(prompt=[-1] * 3_300_000)),
    "0.8 M negative ids as prompt": Attack(lambda: _completion(prompt=[-1] * 800_000)),
    "0.8 M prompts": Attack(lambda: _completion(prompt=["a"] * 800_000)),
    "100,000 stop strings": Attack(lambda: _completion(stop=[f"stop {i}" for i in range(100_000)])),
    "one stop string of 3 MB": Attack(lambda: _completion(stop="a" * 3 * MB)),
    "30,000 bad words": Attack(lambda: _completion(bad_words=[f"bad {i}" for i in range(30_000)])),
    "one bad word of 3 MB": Attack(lambda: _completion(bad_words=["a" * 3 * MB])),
    "300,000 logit biases": Attack(lambda: _completion(logit_bias={str(i): 1 for i in range(300_000)})),
    "800,000 unknown fields": Attack(lambda: _completion(**{f"field{i}": 1 for i in range(800_000)})),
    "prompt of one word of 10 MB": Attack(lambda: _completion(prompt="a" * 10 * MB)),
    "5 MB of empty lists": Attack(lambda: _post("/v1/completions", '{"prompt": [' + "[]," * 1_600_000 + "[]]}")),
    "JSON of 900 levels": Attack(lambda: _nested(900)),
    "JSON of 1 M levels": Attack(lambda: _nested(MB)),
    "300,000 text parts": Attack(lambda: _chat([_PART] * 300_000)),
    "100,000 messages": Attack(
        lambda: _post("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "a"}] * 100_000}))
    ),
    "chat of 9 MB": Attack(lambda: _chat("a b " * 2_250_000)),
    "/tokenize 9 MB with token strings": Attack(
        lambda: _post("/tokenize", json.dumps({"prompt": "a b " * 2_250_000, "return_token_strs": True}))
    ),
    "/detokenize 3 M ids": Attack(lambda: _post("/detokenize", json.dumps({"tokens": [5] * 3 * MB}))),
    "/detokenize 1 M ids, allowed": Attack(lambda: _post("/detokenize", json.dumps({"tokens": [5] * MB}))),
    "header of 60 MB": Attack(lambda: b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60 * MB + b"\r\n\r\n"),
    "body of 60 MB": Attack(lambda: _completion(prompt="a" * 60 * MB)),
    "prompt of 200 KB, allowed": Attack(lambda: _completion(prompt="a b " * 50_000)),
    "gRPC: 3.3 M ids as prompt": Attack(
        lambda: _generate(token_ids=types_pb2.TokenIds(ids=[5] * 3_300_000)), "Generate"
    ),
    "gRPC: 100,000 stop strings": Attack(lambda: _generate(stop=[f"stop {i}" for i in range(100_000)]), "Generate"),
    "gRPC: 4 M empty stop strings": Attack(lambda: _generate() + b"\x32\x00" * 4 * MB, "Generate"),
    "gRPC: 4 M empty bad sequences": Attack(
        lambda: _generate(sampling=types_pb2.SamplingParams()) + _submessage(4, b"\x52\x00" * 4 * MB), "Generate"
    ),
    "gRPC: 300,000 logit biases": Attack(
        lambda: _sampling(logit_bias=dict.fromkeys(range(300000), 1.0)), "Generate"
    ),
    "gRPC: prompt of one word of 10 MB": Attack(lambda: _generate(text="a" * 10 * MB), "Generate"),
    "gRPC: Tokenize 9 MB": Attack(lambda: pb.TokenizeRequest(text="a b " * 2_250_000).SerializeToString(), "Tokenize"),
    "gRPC: Detokenize 3 M ids": Attack(
        lambda: pb.DetokenizeRequest(token_ids=[5] * 3 * MB).SerializeToString(), "Detokenize"
    ),
}  # fmt: skip


def _submessage(number: int, content: bytes) -> bytes:
    """A length-delimited field of a message."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


@dataclass(frozen=True, slots=True)
class Server:
    """Where a running server answers, and the process id of its gateway."""

    rest_port: int
    grpc_port: int
    gateway_pid: int

    def memory_bytes(self) -> int:
        """Resident memory of the gateway and its workers."""
        total, gateway = 0, psutil.Process(self.gateway_pid)
        for process in (gateway, *gateway.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:  # a worker that ended meanwhile
                continue
        return total


def strike(server: Server, attack: Attack, raw: bytes, timeout_s: float = 60.0) -> str:
    """Send one attack and return the status of its answer: of HTTP, or of gRPC."""
    return _call(server, attack.method, raw, timeout_s) if attack.method else _send(server, raw, timeout_s)


def _send(server: Server, raw: bytes, timeout_s: float) -> str:
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", server.rest_port), timeout=timeout_s) as connection:
            connection.sendall(raw)
            while piece := connection.recv(2**20):
                answer = answer or piece
    except ConnectionError:  # the server closes the connection of a client that sends on after its refusal
        pass
    except TimeoutError:
        return "no answer"
    return answer.split(maxsplit=2)[1].decode() if answer else "closed"


def _call(server: Server, method: str, raw: bytes, timeout_s: float) -> str:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as opened:
        channel: Any = opened
        path = f"/specdec.v1.GenerationService/{method}"
        try:
            if method == "Generate":
                for _ in channel.unary_stream(path)(raw, timeout=timeout_s):
                    pass
            else:
                channel.unary_unary(path)(raw, timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def attack(server: Server, connection: Connection) -> None:
    """Send each attack that is ordered, five times a second for some seconds; answer when its bytes are built, and then
    with its answers.
    """
    while True:
        name, seconds = connection.recv()
        raw, answers, threads = ATTACKS[name].make(), Counter[str](), []
        connection.send("begun")
        begun = time.monotonic()
        for number in itertools.count():
            time.sleep(max(0.0, begun + number / ATTACKS_PER_S - time.monotonic()))
            if time.monotonic() >= begun + seconds:
                break
            send = threading.Thread(target=lambda a=ATTACKS[name], r=raw, n=answers: n.update([strike(server, a, r)]))
            send.start()
            threads.append(send)
        for thread in threads:
            thread.join()
        connection.send(dict(answers))


@dataclass(slots=True)
class Streams:
    """Eight streams that never end: when each piece came after the one before, and its tokens."""

    waits: list[tuple[float, int]] = field(default_factory=list)

    async def run(self, server: Server, number: int) -> None:
        """Keep one stream open."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = GenerationServiceStub(channel)
            for seed in itertools.count(number * 1000):
                request = pb.GenerateRequest(
                    text="import os\n\n\ndef", max_tokens=1000, ignore_eos=True, seed=seed,
                    sampling=types_pb2.SamplingParams(temperature=1.0),
                )  # fmt: skip
                last = 0.0
                async for piece in stub.Generate(request):
                    now = time.perf_counter()
                    if last and piece.token_ids:
                        self.waits.append((now - last, len(piece.token_ids)))
                    last = now

    def take(self) -> tuple[float, float, int]:
        """Inter-token latency since the last call: p99 over tokens and the longest wait, in ms, and the tokens."""
        waits, self.waits = self.waits, []
        latencies = [1e3 * wait / count for wait, count in waits for _ in range(count)]
        p99 = statistics.quantiles(latencies, n=100)[98] if len(latencies) > 1 else float("nan")
        return p99, 1e3 * max((wait for wait, _ in waits), default=float("nan")), len(latencies)


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """``tandem serve`` on the bundled pair."""
    command = [sys.executable, "-m", "tandem", "serve", "--port", "0", "--grpc-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("ready")), "")
        ports = re.search(r"http://127\.0\.0\.1:(\d+)/v1, gRPC 127\.0\.0\.1:(\d+)", line)
        if ports is None:
            raise RuntimeError("tandem serve did not become ready")
        children = psutil.Process(process.pid).children(recursive=True)
        gateway = next(child for child in children if "gateway" in child.cmdline())
        yield Server(int(ports[1]), int(ports[2]), gateway.pid)
    finally:
        process.terminate()
        process.wait(60)


async def measure(server: Server, names: list[str], seconds: float, attacker: Attacker) -> list[dict[str, Any]]:
    """A row for no attack, then one for each attack."""
    streams = Streams()
    tasks = [asyncio.create_task(streams.run(server, number)) for number in range(NUM_STREAMS)]
    rows = []
    try:
        await asyncio.sleep(3)
        start = server.memory_bytes()
        for name in ["", *names, ""]:
            if name:
                attacker.tell((name, seconds))
                await attacker.answer()
            streams.take()
            begun, most = time.monotonic(), 0
            while time.monotonic() < begun + seconds:
                await asyncio.sleep(0.05)
                most = max(most, server.memory_bytes())
            p99, longest, count = streams.take()
            answers = await attacker.answer() if name else {}
            row = {"attack": name or "none", "p99_ms": p99, "longest_ms": longest, "tokens_per_s": count / seconds}
            rows.append(row | {"memory_mb": (most - start) / MB, "answers": answers})
            _show(rows[-1])
            if any(task.done() for task in tasks):
                raise RuntimeError("a stream ended")
            await asyncio.sleep(0.5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rows


def _show(row: dict[str, Any]) -> None:
    answers = ", ".join(f"{count} x {status}" for status, count in row["answers"].items())
    print(
        f"| {row['attack']} | {row['p99_ms']:.1f} | {row['longest_ms']:.0f} | {row['tokens_per_s']:.0f} |"
        f" {row['memory_mb']:+.0f} | {answers} |",
        flush=True,
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", default="", help="regular expression of the attacks to send")
    args = parser.parse_args()
    names = [name for name in ATTACKS if re.search(args.only, name)]
    print("| attack, 5 a second | ITL p99 ms | longest wait ms | tokens/s | memory MB | answers |")
    print("| --- | --- | --- | --- | --- | --- |")
    with serving() as server:
        attacker = Attacker(attack, server)
        try:
            asyncio.run(measure(server, names, args.seconds, attacker))
        finally:
            attacker.close()


if __name__ == "__main__":
    main()
