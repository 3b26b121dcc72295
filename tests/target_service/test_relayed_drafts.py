"""A draft that the target asks through the gateway's stream: it is never waited for, and changes no text."""

import time
from functools import partial

import pytest

from specdec import codec
from specdec.rules import Rule
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from target_service import core as core_module
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, until_clean
from tests.target_service.test_direct_draft import NUM_TOKENS, DirectClient, K, drafts, tokens_of
from tests.target_service.test_servicer import Client

EPOCH = 7
#: Proposals of an answer.
NUM_AHEAD = 8


def far_ahead(text, prompt, *, wrong=()):
    """Answers with a long piece of the text, but for wrong tokens at some places of each proposal."""
    answer = drafts(text, prompt, wrong=wrong)

    def answers(known, count):
        done = len(known) - len(prompt)
        texts = [[*known, *text[done : done + i * count]] for i in range(NUM_AHEAD)]
        return [proposal for each in texts for proposal in answer(each, count) if proposal.token_ids]

    return answers


class RelayingClient(DirectClient):
    """A session whose client is gateway and draft in one."""

    def __init__(self, stub, spec, answer, **opened):
        """``answer``: of the committed tokens and the number asked for, the proposals that are sent, or errors."""
        Client.__init__(self, stub, spec)
        self.told = []
        self.answer = answer
        self.opened_with = {"num_speculative_tokens": K, "streams": True} | opened
        #: What the draft was asked, by kind; None: that the session is over.
        self.asked = []
        self.known = []
        self.chain = 0

    __aenter__ = Client.__aenter__

    async def verdict(self):
        while (answer := await self.stream.receive()).WhichOneof("kind") != "verdict":
            if answer.WhichOneof("kind") == "relayed":
                self.take(answer.relayed)
            else:
                self.told.append(answer)
        return codec.decode_verdict(answer.verdict)

    def take(self, relayed):
        assert relayed.session == EPOCH
        request = relayed.request
        kind = request.WhichOneof("kind") if relayed.HasField("request") else None
        self.asked.append(kind)
        if kind == "open":
            self.known = [*request.open.token_ids]
            opened = draft_pb.DraftSessionOpened(epoch=EPOCH, **self.opened_with)
            self.say(response=draft_pb.DraftResponse(opened=opened))
        elif kind == "advance":
            advance = request.advance
            assert advance.base_len == len(self.known)
            self.known += advance.token_ids
            self.chain += 1
            for proposal in self.answer(self.known, advance.num_draft_tokens):
                if isinstance(proposal, tuple):
                    self.say(proposal[1], error=proposal[0])
                    continue
                proposal.epoch, proposal.chain = EPOCH, self.chain
                self.say(response=draft_pb.DraftResponse(proposal=proposal))

    def say(self, session=EPOCH, **fields):
        self.stream.post(pb.VerifyRequest(relayed=draft_pb.RelayedResponse(session=session, **fields)))

    def losses(self):
        return [answer.draft_lost for answer in self.told if answer.WhichOneof("kind") == "draft_lost"]

    async def decode(self):
        """Everything up to the end, with the draft as soon as it is open."""
        await self.open()
        await self.open_draft("")
        while not self.told:
            answer = await self.stream.receive()
            self.take(answer.relayed) if answer.WhichOneof("kind") == "relayed" else self.told.append(answer)
        if self.losses():
            await self.send_ahead(self.first.committed_len, NUM_TOKENS)
        else:
            self.draft(K)
        return await self.rest()


@pytest.fixture
def decoded(start_core, serve, plain, monkeypatch):
    """``await decoded(make_answer, **opened)``: the client after its session, whose text is right. Steps take 4 ms."""
    run_steps = core_module.run_steps

    def slowly(*args, **kwargs):
        time.sleep(0.004)  # on the device thread
        return run_steps(*args, **kwargs)

    monkeypatch.setattr(core_module, "run_steps", slowly)

    async def run(make_answer, changes=None, **opened):
        prompt = make_prompt(21)
        text = plain(prompt, NUM_TOKENS)
        spec = make_spec(prompt, **({"max_tokens": NUM_TOKENS} | (changes or {})))
        async with start_core() as core, serve(core) as (stub, _):
            async with RelayingClient(stub, spec, make_answer(text, prompt), **opened) as client:
                verdicts = client.verdicts = await client.decode()
            await until_clean(core)
        assert changes or tokens_of(client.first, verdicts) == text
        return client

    return run


async def test_it_streams_over_tcp(decoded):
    client = await decoded(far_ahead)
    assert client.opened.asks_relayed_drafts
    assert not client.opened.asks_drafts
    assert client.told[0].draft_opened.num_speculative_tokens == K
    assert client.asked[:2] == ["open", "advance"]
    rounds = [verdict for verdict in client.verdicts if verdict.drafted]
    assert sum(verdict.num_accepted for verdict in rounds) > 0
    assert all(verdict.drafted.wait_ns == 0 for verdict in rounds)


@pytest.mark.parametrize("wrong", [(0,), (2,), (0, 1, 2)])
async def test_wrong_tokens_change_nothing(decoded, wrong):
    client = await decoded(partial(far_ahead, wrong=wrong))
    assert "advance" in client.asked


async def test_one_that_says_nothing_is_told_of_as_rounds_without_tokens(decoded):
    """So pacing sees that it brings nothing."""
    client = await decoded(lambda text, prompt: lambda known, count: [])
    assert any(verdict.drafted is None for verdict in client.verdicts)
    assert client.verdicts[-1].drafted.num_tokens == 0
    assert client.verdicts[-1].drafted.num_asked == K


@pytest.mark.parametrize(
    ("token_ids", "text"), [([VOCAB], "tokens are 0 to 63"), ([1] * 9, "has 9 tokens; the session was opened with")]
)
async def test_what_cannot_be_verified_ends_it(decoded, token_ids, text):
    def answers(_text, _prompt):
        return lambda known, count: [types_pb.Proposal(base_len=len(known), token_ids=token_ids)]

    client = await decoded(answers)
    assert [lost.code for lost in client.losses()] == ["INVALID_ARGUMENT"]
    assert text in client.losses()[0].text
    assert client.asked[-1] is None


async def test_one_that_does_not_stream_is_not_waited_for(decoded):
    client = await decoded(far_ahead, streams=False)
    assert [lost.code for lost in client.losses()] == ["INVALID_ARGUMENT"]
    assert client.asked == ["open", None]


async def test_sessions_whose_text_a_draft_may_change_ask_none(decoded):
    client = await decoded(far_ahead, {"temperature": 1.0, "rule": Rule.TOKEN})
    assert [lost.code for lost in client.losses()] == ["INVALID_ARGUMENT"]
    assert client.asked == [None], "its session is over before it has begun"
    client = await decoded(far_ahead, {"temperature": 1.0, "rule": Rule.COUPLED})
    assert client.losses() == []


async def test_one_that_leaves(decoded):
    """What comes of another session is dropped."""

    def leaves(_text, _prompt):
        return lambda known, count: [("another one", EPOCH + 1), ("the client has left", EPOCH)]

    client = await decoded(leaves)
    assert [(lost.code, lost.text) for lost in client.losses()] == [("UNAVAILABLE", "the client has left")]
