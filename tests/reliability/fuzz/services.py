"""Every service in one process: tiny models of random weights behind the real servers, on one event loop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from transformers.utils import logging as transformers_logging

from draft_service.core import DraftCore
from draft_service.servicer import DraftServicer
from gateway.app import Gateway
from gateway.placement.routing import Router
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.settings import (
    DraftSettings,
    GatewaySettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
    TargetSettings,
)
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from specdec.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from target_service.core import TargetCore
from target_service.servicer import TargetServicer
from tests.engine.heads import block_files as blocks
from tests.engine.heads import checkpoints as files
from tests.gateway.text import vocabularies
from tests.llamas import build_llama

#: Methods by the number of hidden-state values they read at each position.
DRAFTERS: dict[tuple[str, ...], int] = {
    ("draft_model",): 0,
    ("eagle",): files.HIDDEN,
    ("eagle3",): 3 * files.HIDDEN,
    ("dflash2",): len(blocks.STATES) * files.HIDDEN,
    ("dspark",): len(blocks.STATES) * files.HIDDEN,
    ("medusa",): files.HIDDEN,
    ("mlp_speculator",): files.HIDDEN,
    ("ngram",): 0,
    ("suffix",): 0,
    ("none",): 0,
    ("ngram", "draft_model"): 0,
    ("suffix", "eagle"): files.HIDDEN,
}


class Complaints(logging.Handler):
    """Collects what a service should never have to log: errors, and anything with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # gRPC's client logs the bytes that a lying service sent; that is how they are told apart from an answer.
        if (record.levelno >= logging.ERROR or record.exc_info) and record.name != "grpc._common":
            self.records.append(logging.Formatter().format(record))


@asynccontextmanager
async def serving(add: Any, servicer: Any, name: str) -> AsyncIterator[grpc.aio.Channel]:
    """A servicer behind a real server, and a channel to it."""
    server = RpcServer(ServerSettings(max_concurrent_rpcs=64))
    server.add(add, servicer, name)
    await server.start()
    await server.set_serving(True)
    try:
        async with open_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop()


def model_settings(folder: Path) -> ModelSettings:
    return ModelSettings(model=str(folder), num_threads=1, device="cpu", kv_cache_memory_bytes=4 << 20)


_SCHEDULER = SchedulerSettings(max_num_seqs=16, max_wait_s=5.0)


@asynccontextmanager
async def target_core(folder: Path) -> AsyncIterator[TargetCore]:
    core = await TargetCore.start(TargetSettings(model=model_settings(folder), scheduler=_SCHEDULER))
    try:
        yield core
    finally:
        await core.close()


@asynccontextmanager
async def draft_core(methods: Sequence[str], folder: Path, target: Path) -> AsyncIterator[DraftCore]:
    speculative = SpeculativeSettings(
        method=methods[0] if len(methods) == 1 else tuple(methods), model=str(folder), num_speculative_tokens=4
    )
    settings = DraftSettings(
        speculative=speculative,
        model=model_settings(folder) if speculative.needs_model else None,
        target_model=str(target) if speculative.reads_target else None,
        scheduler=_SCHEDULER,
    )
    core = await DraftCore.start(settings)
    try:
        yield core
    finally:
        await core.close()


class Services:
    """The gateway with its own target and draft, a target service, and a draft service for every drafter."""

    gateway: Gateway
    http: httpx.AsyncClient
    public: grpc.aio.Channel
    target: TargetCore
    target_channel: grpc.aio.Channel
    drafts: dict[tuple[str, ...], DraftCore]
    draft_channels: dict[tuple[str, ...], grpc.aio.Channel]

    def __init__(self, folder: Path) -> None:
        """``folder`` takes the checkpoints."""
        self._folder = folder
        self._exits = AsyncExitStack()
        self.complaints = Complaints()

    async def start(self) -> None:
        transformers_logging.disable_progress_bar()
        logging.getLogger().addHandler(self.complaints)
        enter = self._exits.enter_async_context
        self._write_checkpoints()
        head_target = self._folder / "target"
        self.target = await enter(target_core(head_target))
        self.target_channel = await enter(
            serving(add_TargetServiceServicer_to_server, TargetServicer(self.target), "specdec.v1.TargetService")
        )
        self.drafts, self.draft_channels = {}, {}
        for methods, num_features in DRAFTERS.items():
            model = methods[-1] if num_features else "target"
            core = await enter(draft_core(methods, self._folder / model, head_target))
            servicer = DraftServicer(core)
            self.drafts[methods] = core
            self.draft_channels[methods] = await enter(
                serving(add_DraftServiceServicer_to_server, servicer, "specdec.v1.DraftService")
            )
        text = self._folder / "text"
        own = [await enter(target_core(text)), await enter(draft_core(("draft_model",), text, text))]
        settings = GatewaySettings(port=0, grpc_port=0, tokenizer=str(text), drain_s=2.0)
        self.gateway = Gateway(settings, router=await Router.local(*own))
        self._exits.push_async_callback(self.gateway.stop)
        await self.gateway.start()
        await self.gateway.wait_ready()
        base_url = f"http://127.0.0.1:{self.gateway.port}"
        self.http = await enter(httpx.AsyncClient(base_url=base_url, timeout=30))
        self.public = await enter(open_channel(f"127.0.0.1:{self.gateway.grpc_port}"))

    async def close(self) -> None:
        await self._exits.aclose()
        logging.getLogger().removeHandler(self.complaints)

    def _write_checkpoints(self) -> None:
        folder = self._folder
        files.write_target(folder / "target", files.build_target())
        spark = blocks.block_tensors(markov="rnn", own=True)
        for published in (
            (folder / "eagle", files.eagle_config(), files.eagle_tensors(), "pytorch_model.bin"),
            (folder / "eagle3", files.eagle3_config(), files.eagle3_tensors(), "model.safetensors"),
            (folder / "dflash2", blocks.dflash2_config(), blocks.block_tensors(convolved=True), "model.safetensors"),
            (folder / "dspark", blocks.dspark_config(), spark, "model.safetensors"),
            (folder / "medusa", files.medusa_config(), files.medusa_tensors(), "medusa_lm_head.pt"),
            (folder / "mlp_speculator", files.mlp_config(), files.mlp_tensors(), "model.safetensors"),
        ):
            files.write_head_files(*published)
        tokenizer = vocabularies.save(
            vocabularies.byte_level(), folder / "text", chat_template=vocabularies.CHAT_TEMPLATE
        )
        build_llama(vocab_size=400, max_position_embeddings=128).save_pretrained(tokenizer)
