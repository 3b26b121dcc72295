"""The gateway as a process: no torch, a ready line, draining on SIGTERM, flags."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway import app
from gateway.app import Gateway, serve
from gateway.main import add_arguments, main, settings_of
from specdec.errors import InvalidRequest
from specdec.flags import Parser
from specdec.rules import Rule
from specdec.settings import GatewaySettings
from tests.gateway.conftest import router_of
from tests.gateway.conftest import serve as stand_of
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import FakeTarget
from tests.gateway.grpc.test_grpc import Service, all_closed
from tests.until import until

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = """
import asyncio, sys
import httpx
import gateway.main, gateway.backends.fleet
from gateway.app import Gateway
from gateway.placement.routing import Replica, Router
from specdec.settings import GatewaySettings
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import FakeTarget, target_info

async def main(folder):
    target, draft = FakeTarget(info=target_info(vocab_size=400, tokenizer_size=400)), FakeDraft()
    draft.model = target.model
    gateway = Gateway(GatewaySettings(port=0, grpc_port=0, tokenizer=folder), router=await Router.local(target, draft))
    await gateway.start()
    await gateway.wait_ready()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as http:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "a", "stop": "x"})).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    await gateway.stop()

asyncio.run(main(sys.argv[1]))
loaded = {name.split(".")[0] for name in sys.modules} & {"torch", "transformers"}
assert not loaded, loaded
print("served without torch")
"""


def test_serving_never_loads_torch(tokenizer_folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(tokenizer_folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "served without torch"


@contextlib.asynccontextmanager
async def process_of(*flags):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--port", "0", "--grpc-port", "0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_a_process_serves_and_drains(tokenizer_folder):
    target, draft = FakeTarget(latency_s=0.01), FakeDraft(quality=0.9)
    services = [await Service(backend).start() for backend in (target, draft)]
    addresses = ["--targets", services[0].address, "--drafts", services[1].address]
    try:
        flags = [*addresses, "--tokenizer", str(tokenizer_folder), "--drain-s", "5", "--fixed-draft-length"]
        async with process_of(*flags) as process:
            ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
            assert (ready["event"], ready["service"], ready["pid"]) == ("ready", "gateway", process.pid)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ready['port']}", timeout=60) as http:
                assert (await http.get("/health")).status_code == 200
                body = {"prompt": [5], "max_tokens": 100, "temperature": 0, "stream": True}
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    lines = response.aiter_lines()
                    await anext(lines)
                    process.send_signal(signal.SIGTERM)
                    rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
                assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
            # A connection of its own: one that is kept alive may break while the request is being sent.
            with pytest.raises(httpx.ConnectError):
                await httpx.AsyncClient().get(f"http://127.0.0.1:{ready['port']}/health")
            assert await asyncio.wait_for(process.wait(), 60) == 0
            assert draft.num_proposals > 10
        await all_closed(target, draft)
    finally:
        for service in services:
            await service.stop()


@pytest.mark.parametrize("drain_s", [0.3])
async def test_requests_that_outlast_the_drain_are_cancelled(backends, info, script, drain_s):
    backends[0][0].latency_s = 0.05
    async with stand_of(backends, info, script, drain_s=drain_s) as stand:
        body = {"prompt": [5], "max_tokens": 400, "stream": True}
        call = asyncio.create_task(stand.http.post("/v1/completions", json=body))
        await until(lambda: stand.targets[0].open_sessions)
        await stand.gateway.drain()
        await stand.gateway.stop()
        await asyncio.wait((call,))
        assert call.exception() is not None or "[DONE]" not in call.result().text
        await all_closed(*stand.targets, *stand.drafts)


async def test_stop_ends_a_gateway_in_process(backends, info):
    gateway = Gateway(GatewaySettings(port=0, grpc_port=0), router=router_of(*backends, info))
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(gateway, stop=stop, on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 30)
    stop.set()
    await asyncio.wait_for(task, 30)
    for port in (gateway.port, gateway.grpc_port):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("is_own", [False, True])
async def test_what_was_loaded_is_no_work_for_garbage_collection(backends, info, monkeypatch, is_own):
    """Whoever prints the ready line."""
    stop, counts = asyncio.Event(), []
    gateway = Gateway(GatewaySettings(port=0, grpc_port=0), router=router_of(*backends, info))

    def ready(*given, **named):
        counts.append(gc.get_freeze_count())
        gc.unfreeze()
        stop.set()

    monkeypatch.setattr("gateway.app.print_ready", ready)
    before = len(gc.get_objects())
    await asyncio.wait_for(serve(gateway, stop=stop, on_ready=ready if is_own else None), 30)
    assert counts[0] > before / 2


async def test_a_start_without_targets_says_what_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr("gateway.app.FIRST_REPORT_S", 0.01)
    caplog.set_level(logging.INFO)
    stop = asyncio.Event()
    gateway = Gateway(GatewaySettings(port=0, grpc_port=0, targets=("unix:/none/target",)))
    task = asyncio.create_task(serve(gateway, stop=stop, on_ready=lambda: None))
    await until(lambda: "waiting for a target: unix:/none/target: it has not answered yet" in caplog.text)
    stop.set()
    await asyncio.wait_for(task, 30)


def parse(*argv):
    parser = Parser()
    add_arguments(parser)
    return settings_of(parser.parse_args(argv))


def test_flags():
    assert parse() == GatewaySettings()
    given = parse(
        "--targets", "a:1,b:2", "--targets", "c:3", "--drafts", "[::1]:4,unix:/d,unix-abstract:d",
        "--served-model-name", "m", "--verification", "coupled", "--num-speculative-tokens", "7",
        "--request-timeout-s", "2.5", "--seed", "1", "--chat-template", "x",
    )  # fmt: skip
    assert given.targets == ("a:1", "b:2", "c:3")
    assert given.drafts == ("[::1]:4", "unix:/d", "unix-abstract:d")
    assert given.served_model_name == ("m",)
    assert given.verification is Rule.COUPLED
    assert (given.num_speculative_tokens, given.request_timeout_s, given.seed) == (7, 2.5, 1)
    with pytest.raises(InvalidRequest, match="write host:port"):
        parse("--targets", "nowhere")


@pytest.mark.parametrize(
    ("targets", "drafts", "num_files"),
    [
        (("unix:/a", "unix:/b"), ("unix:/c",), 20),
        (("unix:/a",), ("host:1",), 10),
        (("host:1",), (), 0),
    ],
)
async def test_framed_sessions_are_files_that_connections_leave(monkeypatch, targets, drafts, num_files):
    given = []

    def cap(wanted, *, num_other_files):
        given.append((wanted, num_other_files))
        return wanted

    monkeypatch.setattr(app, "cap_connections", cap)
    Gateway(GatewaySettings(targets=targets, drafts=drafts, max_concurrent_sequences=10, max_connections=50))
    assert given == [(50, num_files)] * 2


def test_mistakes_in_the_call(capsys, tmp_path):
    for argv in (["--targets", "x"], [], ["--targets", "a:1", "--tokenizer", str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
    assert "does not exist" in capsys.readouterr().err
