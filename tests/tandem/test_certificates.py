"""`tandem certs`: what is written, and what is kept."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from tandem.certificates import write_certificates
from tandem.cli import main as cli


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_ca_signs_a_certificate_for_each_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certs", str(tmp_path), "--host", "a.example", "10.0.0.7"]) == 0
    ca = read(tmp_path / "ca" / "ca.pem")
    for service in ("gateway", "target", "draft"):
        certificate = read(tmp_path / service / "cert.pem")
        certificate.verify_directly_issued_by(ca)
        assert (tmp_path / service / "ca.pem").read_bytes() == (tmp_path / "ca" / "ca.pem").read_bytes()
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        roles = [
            f"{host}.{service}.tandem" for host in ("localhost", "127.0.0.1", "--1", service, "a.example", "10.0.0.7")
        ]
        assert names.get_values_for_type(x509.DNSName) == ["localhost", service, "a.example", *roles]
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.7"]
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (ExtendedKeyUsageOID.CLIENT_AUTH in usages) is (service == "gateway")
        assert (tmp_path / service / "key.pem").stat().st_mode & 0o777 == 0o600
        assert certificate.not_valid_after_utc - datetime.now(UTC) > timedelta(days=364)
    assert (tmp_path / "ca" / "ca-key.pem").stat().st_mode & 0o777 == 0o600
    assert str(tmp_path / "target" / "key.pem") in capsys.readouterr().out


def test_what_is_valid_is_kept_and_what_is_not_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["certs", str(tmp_path), "--host", "a", "--days", "20"])  # expires soon
    ca, first = ((tmp_path / path).read_bytes() for path in ("ca/ca.pem", "target/cert.pem"))
    cli.main(["certs", str(tmp_path)])
    assert (tmp_path / "ca/ca.pem").read_bytes() == ca
    assert (tmp_path / "target/cert.pem").read_bytes() != first
    names = read(tmp_path / "target/cert.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "a" in names.get_values_for_type(x509.DNSName)  # names of before are kept
    capsys.readouterr()
    cli.main(["certs", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path} has all certificates already\n"
    cli.main(["certs", str(tmp_path), "--host", "b"])  # a new machine
    assert str(tmp_path / "target/cert.pem") in capsys.readouterr().out
    (tmp_path / "draft/key.pem").unlink()
    cli.main(["certs", str(tmp_path)])
    assert "target" not in (out := capsys.readouterr().out)
    assert str(tmp_path / "draft/key.pem") in out


async def test_health_asks_a_service_that_wants_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_certificates(tmp_path)
    files = {"certfile": "cert.pem", "keyfile": "key.pem", "ca_certs": "ca.pem"}
    server = RpcServer(
        ServerSettings(**{f"ssl_{name}": str(tmp_path / "target" / file) for name, file in files.items()})
    )
    await server.start()
    await server.set_serving(True)
    flags = [f"--ssl-{name.replace('_', '-')}={tmp_path / 'gateway' / file}" for name, file in files.items()]
    assert await asyncio.to_thread(cli.main, ["health", "--grpc", server.address, *flags]) == 0
    assert capsys.readouterr().out == f"{server.address} is SERVING\n"
    assert await asyncio.to_thread(cli.main, ["health", "--grpc", server.address, "--timeout-s", "2"]) == 1
    await server.stop()


def test_a_folder_with_other_files_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca").mkdir()
    for name in ("ca.pem", "ca-key.pem"):
        (tmp_path / "ca" / name).write_text("no certificate")
    assert cli.main(["certs", str(tmp_path)]) == 2
    assert f"certificates cannot be made in {tmp_path}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--host", "a.example", "bad host"), "host is 'bad host'; give IP addresses, or names"),
        (("--host", ""), "host is ''; give"),
        (("--host", "ä.example"), "host is 'ä.example'; give"),
        (("--days", "0"), "days is 0; it must be in [1, 36500]"),
        (("--days", "100000000"), "days is 100000000; it must be in"),
    ],
)
def test_what_no_certificate_can_hold_is_named_and_nothing_is_written(
    argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["certs", str(tmp_path / "certs"), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()
