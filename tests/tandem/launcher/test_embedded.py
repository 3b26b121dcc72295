"""The services in one process end with either of their cores."""

import asyncio
from types import SimpleNamespace

import pytest

from specdec.errors import InternalError
from tandem.launcher import embedded


class Core:
    def __init__(self):
        self.failure = None
        self.failed = asyncio.Event()
        self.is_closed = False

    async def close(self):
        self.is_closed = True


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_core_that_fails_ends_the_process(monkeypatch, name):
    cores = {}

    async def start(deployment):
        cores.update(target=Core(), draft=Core())
        return embedded.LocalCores(None, cores["target"], cores["draft"])

    async def serve(gateway, *, stop, on_ready):
        cores[name].failure = InternalError(f"the {name} broke")
        cores[name].failed.set()
        async with asyncio.timeout(30):
            await stop.wait()

    monkeypatch.setattr(embedded.LocalCores, "start", start)
    monkeypatch.setattr(embedded, "Gateway", lambda settings, *, router: None)
    monkeypatch.setattr(embedded, "serve", serve)
    with pytest.raises(InternalError, match=f"the {name} broke"):
        embedded.serve_embedded(SimpleNamespace(gateway=SimpleNamespace(log_level="info", log_format="text")))
    assert all(core.is_closed for core in cores.values())
