"""Which drafts a target is told to ask itself."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gateway.decoding.context import DecodingContext
from gateway.decoding.round import DirectRound
from gateway.pacing.pace import FixedPace
from gateway.placement.routing import Replica, Router
from specdec.errors import Unavailable
from specdec.settings import GatewaySettings
from specdec.types import DraftedRound, RoundTimings, Verdict
from tests.gateway.decoding.decodings import PROMPT, request_of, run
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import FakeTarget, FakeTargetSession, params, reference

LOCAL, REMOTE = "unix:/run/tandem", "10.0.0.1:50062"


class AskingTarget(FakeTarget):
    """A target that is ready to ask drafts, and then does not reach them: the gateway asks."""

    def __init__(self, *, remote):
        super().__init__(latency_s=0.0001)
        self.remote = remote
        self.asked = []
        #: Drafts that the openings named.
        self.named = []

    async def open(self, spec, on_states=None, on_admitted=None):
        self.named.append(spec.draft and (spec.draft.address, spec.draft.num_draft_tokens))
        session = AskingSession(self, spec)
        session.opened = replace(session.opened, asks_drafts=True, asks_remote_drafts=self.remote)
        return session


class AskingSession(FakeTargetSession):
    draft = None

    async def open_draft(self, opening, relay=None):
        self.backend.asked.append(opening.address)
        raise Unavailable("not reached")


@pytest.mark.parametrize(
    ("names", "remote", "tls", "is_named", "is_asked"),
    [
        ((LOCAL, LOCAL), False, False, True, True),
        ((LOCAL, LOCAL), False, True, True, True),
        ((LOCAL, REMOTE), True, False, True, True),
        ((LOCAL, REMOTE), False, False, True, False),  # an older target
        ((LOCAL, REMOTE), True, True, False, False),  # which has no certificates for it
        ((REMOTE, REMOTE), True, False, False, False),
    ],
)
async def test_who_asks_the_draft(names, remote, tls, is_named, is_asked):
    """The opening names it; a target that does not open it then is asked to."""
    target, draft, (target_name, draft_name) = AskingTarget(remote=remote), FakeDraft(), names
    router = Router([Replica(target_name, target, info=target.model)], [Replica(draft_name, draft, info=draft.model)])
    router.target_up(router.targets.replicas[0], target.model)
    settings = GatewaySettings(fixed_draft_length=True, **({"backend_ssl_ca_certs": "ca.pem"} if tls else {}))
    out, decoding = await run(DecodingContext(router, settings), request_of(4, max_tokens=60))
    assert out == reference(PROMPT, params(max_tokens=60))
    assert target.asked == [draft_name] * is_asked
    assert target.named == [(draft_name, 4) if is_named else None]
    assert decoding.metrics.num_spec_steps > 0


async def test_verdicts_that_come_together_were_not_committed_together(monkeypatch):
    """Pacing is told when the target committed them, not when they came."""
    target, draft = FakeTarget(latency_s=0.0001), FakeDraft()
    router = Router([Replica(LOCAL, target, info=target.model)], [Replica(LOCAL, draft, info=draft.model)])
    router.target_up(router.targets.replicas[0], target.model)
    receive, seen, told = FakeTargetSession.receive, [], []

    async def dated(session):
        verdict = replace(await receive(session), committed_ns=10**6 * (len(seen) + 2))
        seen.append(verdict)
        return verdict

    class Watched(FixedPace):
        def record(self, verdict, num_asked, now_ns, *, tree_depth=None, is_stream=False):
            told.append(now_ns)

        def record_plain(self, num_verdicts, num_tokens, timings, now_ns):
            told.append(now_ns)

    monkeypatch.setattr(FakeTargetSession, "receive", dated)
    monkeypatch.setattr(DecodingContext, "pace", lambda self, replica, limit, drafter="": Watched(limit))
    await run(DecodingContext(router, GatewaySettings()), request_of(4, max_tokens=20))
    steps = [after - before for before, after in pairwise(told[1:])]
    assert len(steps) > 3
    assert set(steps) == {10**6}


@pytest.mark.parametrize(("is_stream", "depth"), [(True, 4), (False, None)])
def test_a_stream_is_drafted_whole_or_not_at_all(is_stream, depth):
    """For pacing; and what it verified was a chain."""
    round_ = DirectRound.of(DraftedRound(num_tokens=0, num_asked=4, is_stream=is_stream), RoundTimings(), 0)
    verdict = Verdict(epoch=1, base_len=5, token_ids=(7,))
    assert (round_.whole_depth(verdict), round_.tree_depth(verdict)) == (depth, None)
