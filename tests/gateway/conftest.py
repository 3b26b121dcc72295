"""A gateway over fake backends whose target writes a known text, served on free ports."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from gateway.placement.routing import Replica, Router
from gateway.text.tokenizer import TextTokenizer
from specdec.settings import GatewaySettings
from tests.draft_first import draft_first
from tests.gateway.fake_draft import FakeDraft, draft_info
from tests.gateway.fakes import FakeTarget, target_info
from tests.gateway.text import vocabularies

if TYPE_CHECKING:  # most tests do without the servers
    import httpx

    from gateway.app import Gateway


@pytest.fixture
def short_pauses(monkeypatch):
    """Before what was lost is opened again."""
    monkeypatch.setattr("gateway.decoding.target_client.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("gateway.decoding.draft_client.FIRST_BACKOFF_S", 0.001)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return vocabularies.save(vocabularies.byte_level(), folder, chat_template=vocabularies.CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return TextTokenizer.load(tokenizer_folder)


class Script:
    """A next-token function that writes one text over and over; seeds start at different places of it."""

    def __init__(self, tokenizer, text=vocabularies.TEXT):
        self.ids = tokenizer.encode(text, add_special_tokens=False)
        self.stop_at = None

    def __call__(self, context, params):
        if self.stop_at is not None and len(context) >= self.stop_at:
            return 0
        start = 0 if params.greedy else params.seed % len(self.ids)
        return self.ids[(len(context) + start) % len(self.ids)]

    def expect(self, prompt_len, max_tokens, seed=None):
        """Token ids of a request; greedy without a seed."""
        start = prompt_len + (0 if seed is None else seed % len(self.ids))
        return [self.ids[(start + i) % len(self.ids)] for i in range(max_tokens)]


@pytest.fixture
def script(tokenizer):
    return Script(tokenizer)


@dataclass
class Stand:
    """A served gateway and everything behind it."""

    gateway: Gateway
    targets: list
    drafts: list
    script: Script
    http: httpx.AsyncClient

    @property
    def url(self):
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def generation(self):
        return self.gateway.generation

    def assert_all_closed(self):
        for backend in (*self.targets, *self.drafts):
            assert not backend.open_sessions
            assert backend.num_opened == backend.num_closed


@pytest.fixture
def info():
    return target_info(vocab_size=400, tokenizer_size=400, eos_token_ids=(0,), name="toy-model")


@pytest.fixture
def backends(script, info):
    """A fast target and a good draft, which is open first."""
    target = FakeTarget(next_token=script, info=info)
    draft = FakeDraft(next_token=script, info=draft_info(vocab_size=400, tokenizer_size=400))
    draft_first(target, draft)
    return [target], [draft]


def router_of(targets, drafts, info):
    router = Router(
        [Replica(f"target{i}", target, healthy=False) for i, target in enumerate(targets)],
        [Replica(f"draft{i}", draft, healthy=False) for i, draft in enumerate(drafts)],
    )
    for replica in router.targets.replicas:
        router.target_up(replica, replica.backend.model)
    for replica in router.drafts.replicas:
        router.draft_up(replica, replica.backend.model)
    return router


@pytest.fixture
def make_generation(backends, info, tokenizer):
    from gateway.generation import Generation

    def make(**settings):
        settings = {"fixed_draft_length": True} | settings
        return Generation(router_of(*backends, info), GatewaySettings(**settings), tokenizer)

    return make


@pytest.fixture
async def stand(backends, info, script, tokenizer_folder, request):
    """The default stand; ``@pytest.mark.parametrize("stand", [{...}], indirect=True)`` changes settings."""
    given = getattr(request, "param", {})
    async with serve(backends, info, script, **({"tokenizer": str(tokenizer_folder)} | given)) as running:
        yield running


@contextlib.asynccontextmanager
async def serve(backends, info, script, **settings):
    import httpx

    from gateway.app import Gateway
    from tests.gateway.quick_stops import quick_stops

    settings = {"port": 0, "grpc_port": 0, "drain_s": 2.0, "fixed_draft_length": True} | settings
    with quick_stops():
        gateway = Gateway(GatewaySettings(**settings), router=router_of(*backends, info))
        try:
            await gateway.start()
            await gateway.wait_ready()
            # Without TLS: certificates take 40 ms to read.
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60, verify=False) as http:
                yield Stand(gateway, *backends, script, http)
        finally:
            await gateway.stop()
