"""Target, draft and generation in one process, without gRPC between them."""

from __future__ import annotations

import asyncio
from typing import Self

from transformers.utils import logging as transformers_logging

from draft_service.core import DraftCore
from gateway.app import Gateway, serve
from gateway.generation import Generation
from gateway.placement.routing import Router
from gateway.text.tokenizer import TextTokenizer
from specdec.errors import InvalidRequest
from specdec.process.lifecycle import run_main
from tandem.launcher.deployment import Deployment
from target_service.core import TargetCore


class LocalCores:
    """The services' cores on the running event loop, and the router to them."""

    def __init__(self, router: Router, target: TargetCore, draft: DraftCore | None) -> None:
        self.router = router
        self.target = target
        self.draft = draft

    @classmethod
    async def start(cls, deployment: Deployment) -> Self:
        """Load and warm up the models.

        Raises:
            ModelNotSupported: a checkpoint cannot be run correctly, or the draft's vocabulary is not the target's.
            InvalidRequest: a setting does not fit a model or the machine.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        target = await TargetCore.start(deployment.target)
        draft: DraftCore | None = None
        try:
            if deployment.draft is not None:
                draft = await DraftCore.start(deployment.draft)
            router = await Router.local(target, draft, state_width=target.engine.hidden_size)
            return cls(router, target, draft)
        except BaseException:
            if draft is not None:
                await draft.close()
            await target.close()
            raise

    async def close(self) -> None:
        """Drop the models."""
        if self.draft is not None:
            await self.draft.close()
        await self.target.close()


class Embedded:
    """The cores and the gateway's generation module, for callers that need no server."""

    def __init__(self, cores: LocalCores, generation: Generation) -> None:
        self.cores = cores
        self.generation = generation

    @classmethod
    async def start(cls, deployment: Deployment) -> Self:
        """Load and warm up the models; raises what :meth:`LocalCores.start` does, and for a chat template that cannot
        be read.
        """
        tokenizer = _load_tokenizer(deployment.gateway.tokenizer)
        cores = await LocalCores.start(deployment)
        try:
            return cls(cores, Generation(cores.router, deployment.gateway, tokenizer))
        except BaseException:
            await cores.close()
            raise

    async def close(self) -> None:
        """Drop the models."""
        await self.cores.close()


def _load_tokenizer(folder: str | None) -> TextTokenizer | None:
    """The tokenizer; a checkpoint without one serves token ids."""
    if folder is None:
        return None
    try:
        return TextTokenizer.load(folder)
    except InvalidRequest:
        return None


def serve_embedded(deployment: Deployment) -> int:
    """Serve the gateway's REST and gRPC faces over the cores of this process, until SIGINT or SIGTERM."""
    gateway = deployment.gateway
    run_main(lambda: _serve(deployment), log_level=gateway.log_level, log_format=gateway.log_format)
    return 0


async def _serve(deployment: Deployment) -> None:
    local = await LocalCores.start(deployment)
    stop = asyncio.Event()
    cores = [core for core in (local.target, local.draft) if core is not None]
    watches = [asyncio.create_task(_stop_after_failure(core, stop)) for core in cores]
    try:
        gateway = Gateway(deployment.gateway, router=local.router)
        await serve(gateway, stop=stop, on_ready=lambda: print(deployment.ready_line({}), flush=True))
        for core in cores:
            if core.failure is not None:
                raise core.failure
    finally:
        for watch in watches:
            watch.cancel()
        await local.close()


async def _stop_after_failure(core: TargetCore | DraftCore, stop: asyncio.Event) -> None:
    await core.failed.wait()
    stop.set()
