"""``tandem health``: whether a server is ready, and what it serves."""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from specdec.errors import Unauthenticated, Unavailable
from specdec.settings.listening import TlsFiles
from tandem.cli.flags import add_key_flag, client_key
from tandem.rest_client import RestClient

#: What gRPC says of a peer that accepted the connection and closed it, as a server with TLS does without a handshake.
_SIGNS_OF_TLS: Final = ("Socket closed", "Connection reset by peer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem health``."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", metavar="URL", default="http://127.0.0.1:8000", help="a gateway")
    where.add_argument("--grpc", metavar="HOST:PORT", help="any of the services, by the standard gRPC health check")
    add_key_flag(parser)
    group = parser.add_argument_group("TLS of --grpc")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="PEM file of the CAs of the server; it enables TLS")
    group.add_argument("--ssl-certfile", metavar="FILE", help="PEM file of a certificate to show to the server")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="PEM file of its private key")
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="X", help="seconds to wait for an answer")


def run(args: argparse.Namespace) -> int:
    """Print one line; 0 when the server is ready."""
    if args.grpc:
        tls = TlsFiles(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
        print(asyncio.run(_check_grpc(args.grpc, args.timeout_s, tls)))
    else:
        print(_check_rest(RestClient(args.url, api_key=client_key(args), timeout_s=args.timeout_s)))
    return 0


def _check_rest(server: RestClient) -> str:
    server.get("/health")
    try:
        models = ", ".join(str(model["id"]) for model in server.get("/v1/models")["data"])
    except Unauthenticated:  # health needs no key, everything else does
        return f"{server.url} is ready; give --api-key to see what it serves"
    return f"{server.url} is ready and serves {models}"


async def _check_grpc(address: str, timeout_s: float, tls: TlsFiles) -> str:
    import grpc.aio  # noqa: PLC0415 (`tandem --help` needs none)
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    from specdec.rpc.certificates import Certificates  # noqa: PLC0415
    from specdec.rpc.channel import open_channel  # noqa: PLC0415

    async with open_channel(address, certificates=Certificates(tls) if tls else None) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            may_speak_tls = not tls and any(sign in str(error.details()) for sign in _SIGNS_OF_TLS)
            remedy = "; if it speaks TLS, give --ssl-ca-certs" if may_speak_tls else ""
            raise Unavailable(f"{address} does not answer: {error.details()}{remedy}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise Unavailable(f"{address} is {state}: it is loading or stopping")
    return f"{address} is SERVING"
