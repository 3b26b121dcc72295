"""What is measured: three processes over loopback, as ``tandem serve`` runs them, or everything in one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, Final, Protocol

import grpc.aio

from gateway.backends.fleet import Fleet
from gateway.requests import GenerationRequest
from gateway.routing import Router
from specdec import codec
from specdec.errors import TandemError, Unavailable, error_from_status
from specdec.rpc.channel import open_channel
from specdec.sampling.params import SamplingParams
from specdec.sessions import Rule
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.bench.answers import Piece
from tandem.deployment import Deployment, services_of
from tandem.embedded import Embedded
from tandem.supervisor import Supervisor

#: Seconds to connect to services that are ready.
_CONNECT_S: Final = 10.0


class System(Protocol):
    """Something that answers prompts."""

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, rule: Rule | None, k: int
    ) -> AsyncGenerator[Piece, None]:
        """Generate with k drafted tokens a round at most; 0 decodes plainly. Use it within ``aclosing``."""
        ...

    async def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""
        ...

    def backends(self) -> AbstractAsyncContextManager[Router]:
        """A router of the caller's own over the target and the draft, for the probe."""
        ...


@asynccontextmanager
async def start_system(kind: str, deployment: Deployment) -> AsyncIterator[System]:
    """Start the services, ``"grpc"`` or ``"embedded"``, and stop them at the end."""
    if kind == "embedded":
        embedded = await Embedded.start(deployment)
        try:
            yield EmbeddedSystem(embedded)
        finally:
            await embedded.close()
        return
    free = replace(deployment, gateway=replace(deployment.gateway, port=0, grpc_port=0)).with_ports()
    services = services_of(free)
    lines: list[str] = []
    try:
        async with Supervisor(services, drain_s=2.0, log=lambda name, line: lines.append(f"[{name}] {line}")):
            channel = open_channel(f"{free.gateway.host}:{free.gateway.grpc_port}")
            try:
                yield GrpcSystem(channel, services[0].address, [service.address for service in services[1:-1]])
            finally:
                await channel.close()
    except TandemError as error:
        raise Unavailable("\n".join([str(error), *lines[-20:]])) from error


class GrpcSystem:
    """The gateway's gRPC API."""

    def __init__(self, channel: grpc.aio.Channel, target: str, drafts: Sequence[str]) -> None:
        self._stub = GenerationServiceStub(channel)
        self._target, self._drafts = target, drafts

    @asynccontextmanager
    async def backends(self) -> AsyncIterator[Router]:
        """Connect to the services behind the gateway."""
        fleet = Fleet([self._target], self._drafts)
        await fleet.start()
        try:
            async with asyncio.timeout(_CONNECT_S):
                router = fleet.router
                while not (router.ready and len(router.drafts.usable) == len(self._drafts)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield router
        finally:
            await fleet.stop()

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, rule: Rule | None, k: int
    ) -> AsyncGenerator[Piece, None]:
        """One streamed call; leaving it early cancels it."""
        request = pb.GenerateRequest(
            token_ids=types_pb.TokenIds(ids=prompt),
            sampling=types_pb.SamplingParams(temperature=params.temperature, top_p=params.top_p),
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            seed=params.seed,
            speculation=pb.SpeculationOptions(
                num_speculative_tokens=k,
                verification=codec.encode_rule(rule),
            ),
        )
        call = self._stub.Generate(request)
        try:
            async for response in call:
                ended = response.HasField("usage")
                metrics = metrics_of(response.speculation) if ended else None
                yield Piece(time.perf_counter(), len(response.token_ids), response.text, metrics)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code().name, error.details() or "") from None
        finally:
            call.cancel()

    async def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""
        return (await self._stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids


class EmbeddedSystem:
    """The generation module in this process."""

    def __init__(self, embedded: Embedded) -> None:
        self._generation = embedded.generation

    @asynccontextmanager
    async def backends(self) -> AsyncIterator[Router]:
        """The cores themselves."""
        yield self._generation.router

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, rule: Rule | None, k: int
    ) -> AsyncGenerator[Piece, None]:
        """One streamed request."""
        request = GenerationRequest(prompt=prompt, params=params, rule=rule, num_speculative_tokens=k)
        async with aclosing(self._generation.stream(request)) as chunks:
            async for chunk in chunks:
                metrics = None if chunk.final is None else asdict(chunk.final.speculation)
                yield Piece(time.perf_counter(), len(chunk.token_ids), chunk.text, metrics)

    async def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""
        return await self._generation.encode(text)


def metrics_of(message: pb.SpeculationMetrics) -> dict[str, Any]:
    """The metrics by name; repeated fields as lists."""
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return {name: value if isinstance(value, int | float) else list(value) for name, value in values.items()}
