"""Addresses that are listed, resolved and read from files."""

import asyncio
import contextlib
import socket

import pytest

from gateway.backends import fleet as fleets
from gateway.backends.discovery import Discovery, DnsName, Endpoint, source_of
from gateway.backends.fleet import Fleet
from gateway.decoding.context import DecodingContext
from gateway.decoding.loop import Decoding
from gateway.decoding.request import DecodingRequest
from specdec.errors import InvalidRequest
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.v1 import target_service_pb2_grpc as target_grpc
from target_service.servicer import TargetServicer
from tests.gateway.fakes import FakeTarget, params, reference
from tests.until import until


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(fleets, "CHECK_INTERVAL_S", 0.05)


@contextlib.asynccontextmanager
async def served(*targets):
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for target in targets:
            server = RpcServer(ServerSettings(port=0))
            server.add(target_grpc.add_TargetServiceServicer_to_server, TargetServicer(target), "target")
            await server.start()
            stack.push_async_callback(server.stop)
            await server.set_serving(True)
            servers.append(server)
        yield servers


@contextlib.asynccontextmanager
async def running(fleet):
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:1x", "host:70000", "file:", "dns:///host", "dns://host:1", "http://a:1", "a:1:2",
     "::1:50061"],
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(InvalidRequest, match="write host:port"):
        source_of(text)


async def test_listed_addresses_need_no_search():
    discovery = Discovery(["a:1", "[::1]:2", "unix:/d", "a:1"])
    assert discovery.is_fixed
    assert discovery.endpoints == [Endpoint("a:1"), Endpoint("[::1]:2"), Endpoint("unix:/d")]
    await discovery.update()
    assert len(discovery.endpoints) == 3


async def test_every_address_of_a_name_is_a_server(monkeypatch):
    answers = []

    async def resolve(host, port, *, type):
        assert (host, port, type) == ("pods.example", 50061, socket.SOCK_STREAM)
        if not answers:
            raise socket.gaierror("no such name")
        return [(family, type, 6, "", (address, port)) for family, address in answers]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    discovery = Discovery(["dns:///pods.example:50061"])
    assert not discovery.is_fixed
    await discovery.update()
    assert discovery.endpoints == []
    answers += [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET6, "fd00::1")]
    await discovery.update()
    found = [Endpoint(f"10.0.0.{i}:50061", "pods.example") for i in (1, 2)]
    assert discovery.endpoints == found
    answers.clear()
    await discovery.update()
    assert discovery.endpoints == found
    answers.append((socket.AF_INET6, "fd00::1"))
    await discovery.update()
    assert discovery.endpoints == [Endpoint("[fd00::1]:50061", "pods.example")]


async def test_engines_by_name(monkeypatch):
    async def resolve(host, port, *, type):
        return [(socket.AF_INET, type, 6, "", ("10.0.0.1", port)), (socket.AF_INET, type, 6, "", ("10.0.0.2", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    discovery = Discovery(["openai+dns:///vllm.example:8000"])
    assert not discovery.is_fixed
    await discovery.update()
    assert [each.address for each in discovery.endpoints] == [f"openai+http://10.0.0.{i}:8000" for i in (1, 2)]


@pytest.mark.parametrize("text", ["openai+dns:///a", "openai+dns:///a:8000/v1", "openai+dns:///:1"])
def test_engines_behind_what_is_no_name(text):
    with pytest.raises(InvalidRequest, match="is no address"):
        source_of(text)


async def test_engines_in_a_file(tmp_path, caplog):
    path = tmp_path / "engines"
    path.write_text("http://a:1  # first\nhttps://b/vllm\n")
    discovery = Discovery([f"openai+file:{path}"])
    await discovery.update()
    found = ["openai+http://a:1", "openai+https://b/vllm"]
    assert [each.address for each in discovery.endpoints] == found
    for mistake, shown in (
        ("a:1", "a:1"),
        ("user:secret@a:1", "a:1"),
        ("ftp://a:1", "ftp://a:1"),
        ("http://secret@a:1", "http://a:1"),
        ("dns:///a:1", "dns:///a:1"),
        ("file:a", "file:a"),
    ):
        path.write_text(mistake)
        await discovery.update()
        assert [each.address for each in discovery.endpoints] == found
        with pytest.raises(InvalidRequest) as caught:
            await source_of(f"openai+file:{path}").find()
        form = "http://host:port without a user name"
        assert str(caught.value) == f"{path} holds '{shown}'; write each address as {form}"
    path.write_text("openai+https://b/vllm")
    await discovery.update()
    assert [each.address for each in discovery.endpoints] == found[1:]
    own = Discovery([f"file:{path}"])
    await own.update()
    assert own.endpoints == []
    assert "write each address as host:port" in caplog.text
    assert "secret" not in caplog.text


async def test_a_name_of_this_machine():
    found = await DnsName("localhost", 1).find()
    assert {each.address for each in found} <= {"127.0.0.1:1", "[::1]:1"}
    assert [each.host_name for each in found] == ["localhost"] * len(found) != []


async def test_a_file_may_change(tmp_path, caplog):
    path = tmp_path / "targets"
    discovery = Discovery([f"file:{path}", "c:3"])
    await discovery.update()
    await discovery.update()
    assert [each.address for each in discovery.endpoints] == ["c:3"]
    assert caplog.text.count("No such file") == 1
    path.write_text("# ours\na:1  # first\n\nb:2\nc:3\n")
    await discovery.update()
    assert sorted(each.address for each in discovery.endpoints) == ["a:1", "b:2", "c:3"]
    for mistake in ("", "# ours\n", "a:1\nnonsense\n", "dns:///a:1\n"):
        path.write_text(mistake)
        await discovery.update()
        assert len(discovery.endpoints) == 3
    path.write_text("b:2")
    await discovery.update()
    assert [each.address for each in discovery.endpoints] == ["b:2", "c:3"]


@pytest.mark.parametrize("failing", ["_check_members", "_check_loads"])
async def test_a_check_that_fails_is_not_the_last_one(tmp_path, monkeypatch, caplog, failing):
    path = tmp_path / "targets"
    path.touch()
    checks, check = [], getattr(Fleet, failing)

    async def fail_first(fleet):
        checks.append(fleet)
        if len(checks) == 1:
            raise ZeroDivisionError
        await check(fleet)

    monkeypatch.setattr(Fleet, failing, fail_first)
    async with running(Fleet([f"file:{path}"])):
        await until(lambda: len(checks) > 2)
    assert "ZeroDivisionError" in caplog.text


async def test_replicas_join_and_leave_under_load(tmp_path):
    path = tmp_path / "targets"
    targets = [FakeTarget(latency_s=0.005) for _ in range(3)]
    async with served(*targets) as servers:
        path.write_text(servers[0].address)
        async with running(Fleet([f"file:{path}"])) as fleet:
            router = fleet.router
            await until(lambda: len(router.targets.usable) == 1)
            context = DecodingContext(router)

            async def generate(index):
                request = DecodingRequest(
                    prompt=(5, 6, 7), params=params(max_tokens=200), session_id=f"s{index}", num_speculative_tokens=0
                )
                decoding, out = Decoding(context, request), []
                async with contextlib.aclosing(decoding.verdicts()) as verdicts:
                    async for verdict in verdicts:
                        out += verdict.token_ids
                assert out == reference(request.prompt, request.params)
                return decoding.metrics

            streams = [asyncio.create_task(generate(index)) for index in range(20)]
            await until(lambda: len(targets[0].open_sessions) == 20)
            path.write_text("\n".join(server.address for server in servers))
            await until(lambda: len(router.targets.usable) == 3)
            # Only a share of the names moves, and none of the open streams.
            moved = [i for i in range(20) if router.pick_target(f"s{i}").name != servers[0].address]
            assert 5 < len(moved) < 20
            assert len(targets[0].open_sessions) == 20
            path.write_text("\n".join(server.address for server in servers[1:]))
            await until(lambda: len(router.targets.usable) == 2)
            assert targets[0].open_sessions, "the test was too slow to say anything"
            assert all(router.pick_target(f"s{i}").name != servers[0].address for i in range(20))
            streams += [asyncio.create_task(generate(index)) for index in range(20, 30)]
            for metrics in await asyncio.gather(*streams):
                assert not metrics.num_target_failures
            assert targets[1].num_opened + targets[2].num_opened == 10


async def test_sessions_without_a_name_go_where_there_is_room():
    targets = [FakeTarget(), FakeTarget()]
    async with served(*targets) as servers, running(Fleet([server.address for server in servers])) as fleet:
        router = fleet.router
        await until(lambda: len(router.targets.usable) == 2)
        full, free = router.targets.replicas
        for target, used in zip(targets, (90, 10), strict=True):
            target.blocks = used, 100
        await until(lambda: full.kv_use > 0.8 and 0 < free.kv_use < 0.2)
        assert {router.pick_target(f"s{i}", is_bound=False).name for i in range(5)} == {free.name}
        assert len({router.pick_target(f"s{i}").name for i in range(20)}) == 2
