"""An echo server in a process of its own: between processes, messages and ends cross each other."""

import asyncio
import multiprocessing
from contextlib import contextmanager

from specdec.rpc.framed.address import framed_path
from tests.specdec.rpc.echo import serving

_spawn = multiprocessing.get_context("spawn")


@contextmanager
def served_elsewhere(folder, **settings):
    """Its framed path."""
    with server_process(f"unix:{folder}/s", **settings):
        yield framed_path(f"unix:{folder}/s")


@contextmanager
def server_process(address, **settings):
    """The process that serves at ``address``."""
    ready = _spawn.Event()
    process = _spawn.Process(target=_serve, args=(address, settings, ready), daemon=True)
    process.start()
    try:
        assert ready.wait(60)
        yield process
    finally:
        process.kill()
        process.join()


def _serve(address, settings, ready):
    async def serve():
        async with serving(socket=address, **settings):
            ready.set()
            await asyncio.Event().wait()

    asyncio.run(serve())
