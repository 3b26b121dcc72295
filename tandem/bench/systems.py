"""What is measured: processes over loopback, as ``tandem serve`` runs them, or everything in one process.

Several drafters are measured side by side on one target: each has a draft service and a gateway of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, replace
from secrets import token_hex
from typing import Any, Final, Protocol

import grpc.aio

from gateway.backends.fleet import Fleet
from gateway.generation import Generation
from gateway.placement.routing import Router
from gateway.requests.types import GenerationRequest
from specdec import codec
from specdec.errors import Unavailable, error_from_status
from specdec.params import SamplingParams
from specdec.rpc.channel import open_channel
from specdec.rules import Rule
from specdec.settings import DraftSettings
from specdec.types import ModelInfo
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.bench.answers import Piece
from tandem.launcher.deployment import Deployment, services_of
from tandem.launcher.socket_folder import socket_folder
from tandem.launcher.supervisor import ServiceSpec, Supervisor

#: Seconds to connect to services that are ready.
_CONNECT_S: Final = 10.0


class System(Protocol):
    """Something that answers prompts."""

    @property
    def router(self) -> Router | None:
        """The target and the draft behind it; None where only the front can be reached."""
        ...

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, rule: Rule | None, k: int | None
    ) -> AsyncGenerator[Piece, None]:
        """Generate with k drafted tokens a round at most (None: the server's own). Use it within ``aclosing``."""
        ...


class LocalSystem(System, Protocol):
    """One that runs here: of every request it takes all that speculation can be told."""

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        rule: Rule | None,
        k: int | None,
        *,
        method: str = "",
        prediction: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """The same with a method of drafting and a prediction; empty: the server's own method, and none."""
        ...


@asynccontextmanager
async def start_system(kind: str, deployment: Deployment) -> AsyncIterator[LocalSystem]:
    """Start the services of one deployment, ``"grpc"`` or ``"embedded"``, and stop them at the end."""
    async with start_systems(kind, {"": deployment}) as systems:
        yield systems[""]


@asynccontextmanager
async def start_systems(
    kind: str, deployments: Mapping[str, Deployment], pretended: float | None = None
) -> AsyncIterator[Mapping[str, LocalSystem]]:
    """Start deployments that differ in their drafters alone; they share the target of the first, and processes the
    draft of one with the same drafter. ``pretended``: the tokens a round commits on average, whatever is drafted (of
    kind "grpc" alone).

    Where they cannot be used, during the measurement too, the error (:class:`Unavailable`) ends with what they logged.
    """
    lines: list[str] = []
    maps = {folder: None for each in deployments.values() for folder in each.target.hidden_state_maps}
    deployments = {
        name: replace(each, target=replace(each.target, hidden_state_maps=tuple(maps)))
        for name, each in deployments.items()
    }
    try:
        async with AsyncExitStack() as stack:
            if kind == "embedded":
                yield await _start_embedded(deployments, stack)
            else:
                yield await _start_processes(deployments, stack, lines, pretended)
    except Unavailable as error:
        raise Unavailable("\n".join([str(error), *lines[-20:]])) from error


async def _start_embedded(deployments: Mapping[str, Deployment], stack: AsyncExitStack) -> Mapping[str, LocalSystem]:
    from draft_service.core import DraftCore  # noqa: PLC0415 (torch: seconds that services as processes do not need)
    from tandem.launcher.embedded import Embedded  # noqa: PLC0415

    systems: dict[str, LocalSystem] = {}
    first: Embedded | None = None
    for name, deployment in deployments.items():
        if first is None:
            first = await Embedded.start(deployment)
            stack.push_async_callback(first.close)
            generation = first.generation
        else:
            draft = None
            if deployment.draft is not None:
                draft = await DraftCore.start(deployment.draft)
                stack.push_async_callback(draft.close)
            router = await Router.local(first.cores.target, draft, state_width=first.cores.target.engine.hidden_size)
            generation = Generation(router, deployment.gateway, first.generation.tokenizer)
        systems[name] = EmbeddedSystem(generation)
    return systems


async def _start_processes(
    deployments: Mapping[str, Deployment], stack: AsyncExitStack, lines: list[str], pretended: float | None
) -> Mapping[str, LocalSystem]:
    services: list[ServiceSpec] = []
    gateways: dict[str, tuple[str, str, list[str]]] = {}
    target = ""
    shared: list[tuple[DraftSettings | None, str | None]] = []
    for name, deployment in deployments.items():
        free = replace(deployment, gateway=replace(deployment.gateway, port=0, grpc_port=0)).with_ports()
        draft = next((address for settings, address in shared if settings == deployment.draft), None)
        added = services_of(free, stack.enter_context(socket_folder()), target=target or None, draft=draft)
        if not target:
            target = added[0].address
            if pretended is not None:
                arguments = (f"{pretended:g}", *added[0].arguments)
                added[0] = replace(added[0], module="target_service.synthetic_target", arguments=arguments)
        draft = next((service.address for service in added if service.name == "draft"), draft)
        shared.append((deployment.draft, draft))
        host, port, grpc_port = free.gateway.host, free.gateway.port, free.gateway.grpc_port
        gateways[name] = f"{host}:{grpc_port}", f"http://{host}:{port}", [draft] if draft else []
        services += added if len(deployments) == 1 else [_named(service, name) for service in added]
    supervisor = Supervisor(services, drain_s=2.0, log=lambda name, line: lines.append(f"[{name}] {line}"))
    await stack.enter_async_context(supervisor)
    systems: dict[str, LocalSystem] = {}
    for name, (address, url, addresses) in gateways.items():
        channel = open_channel(address)
        stack.push_async_callback(channel.close)
        systems[name] = GrpcSystem(channel, await _connect(target, addresses, stack), url)
    return systems


def _named(service: ServiceSpec, drafter: str) -> ServiceSpec:
    return service if service.name == "target" else replace(service, name=f"{service.name} {drafter}")


async def _connect(target: str, drafts: Sequence[str], stack: AsyncExitStack) -> Router:
    """A router of our own to the services behind a gateway, over connections like the gateway's."""
    fleet = Fleet([target], drafts)
    await fleet.start()
    stack.push_async_callback(fleet.stop)
    async with asyncio.timeout(_CONNECT_S):
        while not (fleet.router.ready and len(fleet.router.drafts.usable) == len(drafts)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return fleet.router


class GrpcSystem:
    """The gateway's gRPC API. No mode finds in the target's cache what another one has computed."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        router: Router | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """``url`` is where the gateway's HTTP can be reached, its metrics for one."""
        self._stub, self._salt = GenerationServiceStub(channel), token_hex(8)
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self.router = router
        self.url = url

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        rule: Rule | None,
        k: int | None,
        *,
        method: str = "",
        prediction: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """One streamed call; leaving it early cancels it."""
        given: dict[str, Any] = (
            {"text": prompt} if isinstance(prompt, str) else {"token_ids": types_pb.TokenIds(ids=prompt)}
        )
        language = params.structured_outputs
        call = self._stub.Generate(
            pb.GenerateRequest(
                **given,
                sampling=types_pb.SamplingParams(temperature=params.temperature, top_p=params.top_p),
                max_tokens=params.max_tokens,
                ignore_eos=params.ignore_eos,
                seed=params.seed,
                structured_outputs=None if language is None else types_pb.StructuredOutputs(json=str(language.json)),
                speculation=pb.SpeculationOptions(
                    num_speculative_tokens=k, verification=codec.encode_rule(rule), method=method
                ),
                prediction=prediction,
                cache_salt=f"{self._salt} {k} {rule}",
            ),
            metadata=self._metadata,
        )
        try:
            async for response in call:
                ended = response.HasField("usage")
                metrics = metrics_of(response.speculation) if ended else None
                yield Piece(time.perf_counter(), len(response.token_ids), response.text, metrics)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code().name, error.details() or "") from None
        finally:
            call.cancel()

    async def models(self) -> tuple[ModelInfo, ModelInfo | None]:
        """The target behind the gateway and the draft, where there is one."""
        try:
            answer = await self._stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code().name, error.details() or "") from None
        model = answer.models[0]
        draft = codec.decode_model_info(model.draft) if model.HasField("draft") else None
        return codec.decode_model_info(model.target), draft


class EmbeddedSystem:
    """The generation module in this process."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._salt = generation, token_hex(8)
        self.router: Router | None = generation.router

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        rule: Rule | None,
        k: int | None,
        *,
        method: str = "",
        prediction: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """One streamed request."""
        drafts: dict[str, Any] = {"num_speculative_tokens": k, "method": method, "prediction": prediction}
        salt = f"{self._salt} {k} {rule}"
        request = GenerationRequest(prompt=prompt, params=params, rule=rule, cache_salt=salt, **drafts)
        async with aclosing(self._generation.stream(request)) as chunks:
            async for chunk in chunks:
                metrics = None if chunk.final is None else asdict(chunk.final.speculation)
                yield Piece(time.perf_counter(), len(chunk.token_ids), chunk.text, metrics)


def metrics_of(message: pb.SpeculationMetrics) -> dict[str, Any]:
    """The metrics by name; repeated fields as lists."""
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return {name: value if isinstance(value, int | float | str) else list(value) for name, value in values.items()}
