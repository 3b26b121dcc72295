"""A gateway and plain targets as processes, with KV pools of a given size, for :mod:`benchmarks.memory`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc.aio

from gateway.backends.target import GrpcTarget
from gateway.text.tokenizer import TextTokenizer
from specdec.errors import InternalError, error_from_status
from specdec.rpc.channel import open_channel
from specdec.settings import ModelSettings, SchedulerSettings
from specdec.types import ServerLoad
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.checkpoints import TARGET, find_checkpoint
from tandem.launcher.deployment import make_deployment, services_of
from tandem.launcher.socket_folder import socket_folder
from tandem.launcher.supervisor import Supervisor
from tandem.speculative_config import choose_models

BLOCK_SIZE: Final = 32
CONTEXT: Final = 2048

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Reply:
    """One answer, from the call on."""

    started: float
    #: When each piece with tokens arrived, and its tokens.
    arrivals: list[tuple[float, Sequence[int]]] = field(default_factory=list)
    num_cached: int = 0

    @property
    def token_ids(self) -> Tokens:
        """All of them."""
        return tuple(token_id for _, piece in self.arrivals for token_id in piece)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.started


class MemoryServer:
    """The public gRPC API of one gateway, and the load of the targets behind it."""

    def __init__(self, channel: grpc.aio.Channel, targets: Sequence[GrpcTarget]) -> None:
        self._stub = GenerationServiceStub(channel)
        self._targets = targets
        #: Answers that are open, and those that ended.
        self.open: set[Reply] = set()
        self.ended: list[Reply] = []

    async def ask(
        self, prompt: Tokens, max_tokens: int, *, seed: int | None = None, leave_after: int | None = None
    ) -> Reply:
        """One request: greedy, or sampled with a seed. It is cancelled after ``leave_after`` tokens.

        Raises what the server answers.
        """
        request = pb.GenerateRequest(
            token_ids=types_pb.TokenIds(ids=prompt), max_tokens=max_tokens, ignore_eos=True, seed=seed,
            sampling=types_pb.SamplingParams(temperature=0.0 if seed is None else 0.8),
        )  # fmt: skip
        reply, num_tokens = Reply(time.perf_counter()), 0
        self.open.add(reply)
        call = self._stub.Generate(request)
        try:
            async for piece in call:
                if piece.token_ids:
                    reply.arrivals.append((time.perf_counter(), tuple(piece.token_ids)))
                num_tokens += len(piece.token_ids)
                if piece.HasField("usage"):
                    reply.num_cached = piece.usage.cached_tokens
                if leave_after is not None and num_tokens >= leave_after:
                    break
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code().name, error.details() or "") from None
        finally:
            call.cancel()
            self.open.discard(reply)
        self.ended.append(reply)
        return reply

    async def loads(self) -> list[ServerLoad]:
        """What each target holds."""
        return [await target.load() for target in self._targets]


def block_bytes() -> int:
    """Bytes of a block of the bundled target: keys and values in float32."""
    config: dict[str, Any] = json.loads((Path(find_checkpoint(TARGET)) / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * config["num_hidden_layers"] * width * 4 * BLOCK_SIZE)


@asynccontextmanager
async def serve(num_blocks: int, *, num_targets: int = 1, **scheduler: Any) -> AsyncIterator[MemoryServer]:
    """Start them with pools of ``num_blocks`` blocks each; ``scheduler`` are options of the targets."""
    choice = choose_models(find_checkpoint(TARGET), None)
    model = ModelSettings(
        model=choice.target, dtype="float32", block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=(num_blocks + 1) * block_bytes(),  # one is padding
    )  # fmt: skip
    given = {"max_waiting": 1024, "max_wait_s": 600.0} | scheduler
    deployment = make_deployment(choice, model, scheduler=SchedulerSettings(**given))
    deployment = replace(deployment, gateway=replace(deployment.gateway, port=0, grpc_port=0)).with_ports()
    async with AsyncExitStack() as stack:
        services, folder = [], stack.enter_context(socket_folder())
        for number in range(num_targets):
            target = services_of(deployment, stack.enter_context(socket_folder()))[0]
            services.append(replace(target, name=f"target {number}"))
        addresses = [service.address for service in services]
        (folder / "targets").write_text("\n".join(addresses))
        services += services_of(deployment, folder, target=f"file:{folder}/targets")
        await stack.enter_async_context(Supervisor(services, drain_s=2.0, log=lambda *_: None))
        channels = [
            await stack.enter_async_context(open_channel(address))
            for address in (f"{deployment.gateway.host}:{deployment.gateway.grpc_port}", *addresses)
        ]
        targets = [GrpcTarget(channel, address) for channel, address in zip(channels[1:], addresses, strict=True)]
        server = MemoryServer(channels[0], targets)
        found = {load.total_blocks for load in await server.loads()}
        if found != {num_blocks}:
            raise InternalError(f"the targets have {found} blocks in place of {num_blocks}")
        yield server


def tokenizer() -> TextTokenizer:
    """The bundled target's."""
    return TextTokenizer.load(find_checkpoint(TARGET))
