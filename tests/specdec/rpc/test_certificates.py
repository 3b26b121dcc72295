"""TLS between services over real sockets: who gets in, and certificates that are replaced while the server runs."""

import asyncio
import os
import shutil
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.errors import InvalidRequest
from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.settings.listening import TlsFiles
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as pb
from tandem.certificates import write_certificates


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_certificates(tmp_path)
    return tmp_path


def files(folder: Path, service: str) -> TlsFiles:
    return TlsFiles(*(str(folder / service / name) for name in ("cert.pem", "key.pem", "ca.pem")))


@asynccontextmanager
async def serving(folder: Path, service: str = "target", host: str = "127.0.0.1"):
    tls = files(folder, service)
    settings = ServerSettings(host=host, ssl_certfile=tls.certfile, ssl_keyfile=tls.keyfile, ssl_ca_certs=tls.ca_certs)
    server = RpcServer(settings)
    await server.start()
    await server.set_serving(True)
    try:
        yield server.address
    finally:
        await server.stop()


async def ask(address: str, certificates: Certificates | None, role: str = "") -> str:
    """ "SERVING", or the name of the error."""
    async with open_channel(address, certificates=certificates, role=role) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def replace_files(folder: Path, source: Path) -> None:
    """Put the services' files of another CA in place, as a tool for certificates would."""
    for path in source.glob("*/*.pem"):
        shutil.copy(path, folder / "new.pem")
        (folder / "new.pem").replace(folder / path.relative_to(source))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_roles_are_told_at_every_address(folder: Path, host: str) -> None:
    async with serving(folder, host=host) as address:
        port = address.rpartition(":")[2]
        at = f"[::1]:{port}" if host == "::1" else address
        gateway = Certificates(files(folder, "gateway"))
        assert await ask(at, gateway, "target") == "SERVING"
        assert await ask(at, gateway, "draft") == "UNAVAILABLE"


async def test_health_has_a_port_in_plain_text_where_nothing_else_is(folder: Path) -> None:
    tls = files(folder, "target")
    server = RpcServer(
        ServerSettings(
            ssl_certfile=tls.certfile, ssl_keyfile=tls.keyfile, ssl_ca_certs=tls.ca_certs, health_port=0, drain_s=0
        )
    )
    servicer = target_grpc.TargetServiceServicer()
    server.add(target_grpc.add_TargetServiceServicer_to_server, servicer, "specdec.v1.TargetService")
    await server.start()
    try:
        address = f"127.0.0.1:{server.health_port}"
        assert await ask(address, None) == "NOT_SERVING"
        await server.set_serving(True)
        assert await ask(address, None) == "SERVING"
        assert await ask(server.address, None) == "UNAVAILABLE"
        async with open_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await target_grpc.TargetServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.drain()
        assert await ask(address, None) == "NOT_SERVING"
    finally:
        await server.stop()
    assert await ask(address, None) == "UNAVAILABLE"


async def test_the_gateway_gets_in_and_nobody_else(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_certificates(other)
    async with serving(folder) as address:
        assert await ask(address, Certificates(files(folder, "gateway"))) == "SERVING"
        assert await ask(address, None) == "UNAVAILABLE"  # plain text
        for client in (
            TlsFiles(ca_certs=str(folder / "gateway" / "ca.pem")),  # no certificate
            files(folder, "draft"),  # it may be called, but not call
            files(other, "gateway"),  # of another CA
        ):
            assert await ask(address, Certificates(client)) == "UNAVAILABLE"


async def test_a_server_with_the_certificate_of_another_name_is_not_believed(folder: Path) -> None:
    async with serving(folder) as address:
        port = address.split(":")[1]
        assert await ask(f"127.0.0.2:{port}", Certificates(files(folder, "gateway"))) == "UNAVAILABLE"


async def test_new_certificates_are_used_without_a_restart(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    write_certificates(other)
    new_client = Certificates(files(other, "gateway"))
    client = Certificates(files(folder, "gateway"))
    async with serving(folder) as address:
        assert await ask(address, client) == "SERVING"
        assert await ask(address, new_client) == "UNAVAILABLE"
        assert not client.renew()
        replace_files(folder, other)
        assert await ask(address, new_client) == "SERVING"
        assert await ask(address, client) == "UNAVAILABLE"
        assert client.renew()
        assert await ask(address, client) == "SERVING"


async def test_while_new_files_do_not_fit_the_old_ones_stay_in_use(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path_factory.mktemp("other")
    write_certificates(other)
    client = Certificates(files(folder, "gateway"))
    async with serving(folder) as address:
        for damage in (b"-----BEGIN CERTIFICATE-----\nMIIB", (other / "target" / "cert.pem").read_bytes(), b""):
            (folder / "target" / "cert.pem").write_bytes(damage)
            assert await ask(address, client) == "SERVING"
        (folder / "target" / "cert.pem").unlink()
        assert await ask(address, client) == "SERVING"
    assert "new certificates are not used: ssl_certfile is " in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ssl_certfile": "c"}, "ssl_certfile is given without ssl_keyfile; give both"),
        ({"ssl_keyfile": "k"}, "ssl_keyfile is given without ssl_certfile; give both"),
        ({"ssl_ca_certs": "ca"}, "ssl_ca_certs is given without ssl_certfile"),
    ],
)
def test_half_of_what_tls_needs_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ServerSettings(**given)


@pytest.mark.parametrize("broken", ["certfile", "keyfile", "ca_certs"])
def test_files_that_cannot_be_used_are_named_before_anything_starts(folder: Path, broken: str) -> None:
    tls = files(folder, "target")
    path = Path(getattr(tls, broken))
    for content in (b"no certificate", None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(
            InvalidRequest, match=f"ssl_(certfile|{broken}) is '.*', which cannot be used: .+; give PEM"
        ):
            Certificates(tls)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s

    path = folder / "target" / "key.pem"
    key = s.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret")))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Certificates(files(folder, "target"))


async def test_the_http_context_asks_for_certificates_and_takes_new_files(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    write_certificates(other)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    async def call(client: Path | None, ca: Path, service: str = "gateway") -> bytes:
        context = ssl.create_default_context(cafile=str(ca / "ca" / "ca.pem"))
        if client is not None:
            context.load_cert_chain(client / service / "cert.pem", client / service / "key.pem")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        except ssl.SSLError:
            return b"refused"
        try:
            return await asyncio.wait_for(reader.read(), 5) or b"refused"
        except (ssl.SSLError, ConnectionError):  # in TLS 1.3 a client learns late that its certificate is wanted
            return b"refused"
        finally:
            writer.close()

    context = Certificates(files(folder, "target")).server_context()
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await call(folder, folder) == b"hello"
        assert await call(None, folder) == b"refused"
        assert await call(other, folder) == b"refused"
        assert await call(folder, other) == b"refused"
        assert await call(folder, folder, "draft") == b"refused", "it may be called, but not call"
        old = tmp_path_factory.mktemp("old")
        shutil.copytree(folder, old, dirs_exist_ok=True)
        replace_files(folder, other)
        assert await call(old, other) == b"refused"
        assert await call(other, other) == b"hello"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "", "example.org"])
def test_a_service_without_client_certificates_stays_on_this_machine(host: str, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"host is '{host}'.*--insecure"):
        ServerSettings(host=host)
    tls = files(folder, "target")
    with pytest.raises(InvalidRequest):  # TLS alone tells clients not apart
        ServerSettings(host=host, ssl_certfile=tls.certfile, ssl_keyfile=tls.keyfile)
    ServerSettings(host=host, ssl_certfile=tls.certfile, ssl_keyfile=tls.keyfile, ssl_ca_certs=tls.ca_certs)
    ServerSettings(host=host, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    ServerSettings(host=host)


async def test_a_service_with_a_socket_alone_opens_no_port_and_only_its_user_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    before = os.umask(0)
    try:
        server = RpcServer(ServerSettings(socket=f"unix:{path}"))
        await server.start()
    finally:
        os.umask(before)
    await server.set_serving(True)
    assert server.port == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert await ask(f"unix:{path}", None) == "SERVING"
    await server.stop()
