"""Clients that connect and send or read nothing: real sockets, and a real process with few files."""

import asyncio
import contextlib
import json
import socket
import sys
import time

import httpx
import pytest
from uvicorn.protocols.websockets import auto

from tests.e2e.servers import ROOT
from tests.gateway.conftest import serve
from tests.gateway.fakes import FakeTarget
from tests.gateway.grpc.test_grpc import Service, all_closed
from tests.until import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def connect(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def healthy(port):
    async with httpx.AsyncClient(timeout=20) as http:
        return (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200


async def answer_of(reader):
    """What a client is told before its connection is closed."""
    async with asyncio.timeout(20):
        return await reader.read()


@pytest.fixture
async def impatient(backends, info, script):
    times = {"header_timeout_s": 0.3, "body_timeout_s": 0.4, "write_timeout_s": 0.5, "keep_alive_s": 0.6}
    async with serve(backends, info, script, **times) as stand:
        yield stand


async def test_a_connection_without_a_request_is_closed(impatient):
    begun = time.monotonic()
    reader, writer = await connect(impatient.gateway.port)
    assert await answer_of(reader) == b""
    assert time.monotonic() - begun > 0.2
    writer.close()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"POST /v1", "the headers"),
        (HEAD, "the headers"),
        (HEAD + b"Content-Length: 100\r\n\r\n", "the body"),
        (HEAD + b'Content-Length: 100\r\n\r\n{"prompt"', "the body"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{", "the body"),
    ],
)
async def test_half_a_request_is_given_up(impatient, data, what):
    reader, writer = await connect(impatient.gateway.port, data)
    head, _, body = (await answer_of(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"].startswith(f"{what} did not come within 0.")
    writer.close()


async def test_a_client_that_leaves_within_its_body_is_no_error_of_ours(impatient, caplog):
    _, writer = await connect(impatient.gateway.port, HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')
    assert await healthy(impatient.gateway.port)  # a later connection is served: what the first sent is read
    writer.close()
    await writer.wait_closed()
    assert await healthy(impatient.gateway.port)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_drop_at_a_time_does_not_help(impatient):
    loop = asyncio.get_running_loop()
    # A stream of asyncio would drop the answer where a reset follows it: the drops meet a closed connection.
    with socket.create_connection(("127.0.0.1", impatient.gateway.port)) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, HEAD)

        async def drip():
            with contextlib.suppress(ConnectionError):
                while True:
                    await loop.sock_sendall(client, b"X-A: b\r\n")
                    await asyncio.sleep(0.02)  # the client's pace

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(20):
            assert (await loop.sock_recv(client, 2**16)).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        await asyncio.wait([dripping])


async def test_a_connection_is_kept_between_requests_and_not_for_ever(impatient):
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await connect(impatient.gateway.port, request)
    async with asyncio.timeout(20):
        await reader.readuntil(b"}")
        begun = time.monotonic()
        writer.write(request)
        await reader.readuntil(b"}")
        assert await reader.read() == b""  # no 408: nothing of a request was there
    assert time.monotonic() - begun > 0.5, "longer than headers may take"
    writer.close()


async def test_a_long_answer_is_not_cut(impatient):
    """The deadlines are those of the client: the gateway may take as long as it likes."""
    (target,) = impatient.targets
    target.latency_s = 0.1
    body = {"prompt": [5], "max_tokens": 40, "temperature": 0, "stream": True}
    answer = await impatient.http.post("/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.elapsed.total_seconds() > 1


async def test_who_never_reads_loses_the_session(impatient):
    body = json.dumps({"prompt": [5], "max_tokens": 400, "stream": True, "logprobs": 20, "n": 64}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", impatient.gateway.port))
        client.sendall(request)
        (target,) = impatient.targets
        await until(lambda: len(target.open_sessions) == 64)
        target.latency_s = 0.0
        await until(lambda: not target.open_sessions)
        await until(lambda: not impatient.generation.num_requests)
    assert await healthy(impatient.gateway.port)
    await all_closed(*impatient.targets, *impatient.drafts)


async def test_who_reads_slowly_is_served(impatient):
    """Slower than the buffers become free, for several times the time for writing."""
    body = json.dumps({"prompt": [5], "max_tokens": 400, "stream": True, "logprobs": 20, "n": 64}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    (target,) = impatient.targets
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", impatient.gateway.port))
        client.sendall(request)
        client.setblocking(False)
        await until(lambda: target.open_sessions)
        begun = time.monotonic()
        while time.monotonic() - begun < 2:  # the buffers on the way are full long before
            with contextlib.suppress(BlockingIOError):
                assert client.recv(4000)
            await asyncio.sleep(0.05)  # the client's pace
        assert len(target.open_sessions) == 64
        assert sum(session.num_output for session in target.open_sessions) < 64 * 400
    await all_closed(*impatient.targets, *impatient.drafts)


async def test_idle_connections_make_room_for_new_ones(backends, info, script):
    async with serve(backends, info, script, max_connections=20) as stand:
        port = stand.gateway.port
        backends[0][0].latency_s = 0.05
        body = {"prompt": [5], "max_tokens": 40, "temperature": 0, "stream": True}
        working = asyncio.create_task(stand.http.post("/v1/completions", json=body))
        await until(lambda: stand.targets[0].open_sessions)
        halves = (b"", b"POST /v1", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{")
        held = [await connect(port, halves[i % 4]) for i in range(60)]
        for _ in range(3):
            assert await healthy(port)
        gone = [await answer_of(reader) for reader, _ in held[:30]]
        assert not any(gone), "the oldest are closed without a word"
        answer = await working
        assert answer.text.endswith("data: [DONE]\n\n"), "a request in progress is not one of them"
        for _, writer in held:
            writer.close()


async def test_one_address_cannot_have_all(backends, info, script):
    async with serve(backends, info, script, max_connections=100, max_client_connections=10) as stand:
        held = [await connect(stand.gateway.port) for _ in range(30)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in held]
        await until(lambda: sum(task.done() for task in closed) >= 20)
        assert await healthy(stand.gateway.port)
        for task in closed:
            task.cancel()
        await asyncio.wait(closed)
        for _, writer in held:
            writer.close()


async def test_a_process_with_few_files_is_not_locked():
    """More connections than the process may have files, idle and half-sent, over HTTP and gRPC."""
    service = await Service(FakeTarget()).start()
    # A shell sets the limit: Python code between fork and exec may die of gRPC's threads.
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", 'ulimit -n 256; exec "$0" -m gateway "$@"',
        sys.executable, "--port", "0", "--grpc-port", "0", "--targets", service.address,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    held = []
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        for i in range(300):
            with contextlib.suppress(OSError):
                held.append(await connect(ready["port"], (b"", HEAD)[i % 2]))
            with contextlib.suppress(OSError):
                held.append(await connect(ready["grpc_port"]))
        for _ in range(3):
            assert await healthy(ready["port"])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ready['port']}", timeout=20) as http:
            body = {"prompt": [5], "max_tokens": 3, "temperature": 0}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
    finally:
        for _, writer in held:
            writer.close()
        process.kill()
        await process.wait()
        await service.stop()


async def test_an_upgrade_stays_a_counted_http_request(backends, info, script, monkeypatch):
    class WebSockets(asyncio.Protocol):
        """What uvicorn would find where a library for WebSockets is installed."""

        def __init__(self, **_):
            pass

    monkeypatch.setattr(auto, "AutoWebSocketsProtocol", WebSockets)
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with serve(backends, info, script, api_key=("sk-1",)) as stand:
        reader, writer = await connect(stand.gateway.port, upgrade)
        async with asyncio.timeout(20):
            assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        writer.close()
