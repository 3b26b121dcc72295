"""A target that asks a draft itself, over real sockets: the text is the same whatever the draft does."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from specdec import codec
from specdec.errors import InvalidRequest, Unavailable
from specdec.rpc.framed.address import framed_path
from specdec.rpc.framed.stream import FramedStream
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.types import DraftedRound, DraftOpening, FinishReason, SessionSpec
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import draft_service_pb2_grpc as draft_grpc
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from target_service import core as core_module
from target_service import servicer as servicer_module
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, until_clean
from tests.target_service.test_servicer import Client
from tests.until import until

K = 3
NUM_TOKENS = 40


class ScriptedDraft(draft_grpc.DraftServiceServicer):
    """A draft service that answers as a test says."""

    def __init__(self, answer):
        """``answer``: of the committed tokens and the number asked for, the proposals that are sent."""
        self.answer = answer
        self.opened = self.ended = self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.known = None
        self.tasks = []

    async def Draft(self, request_iterator, context):
        opening = (await context.read()).open
        self.opened += 1
        self.tasks.append(asyncio.current_task())
        self.known = [*opening.token_ids]
        try:
            assert opening.prompt_len <= len(self.known)
            opened = draft_pb.DraftSessionOpened(epoch=opening.epoch, num_speculative_tokens=K)
            await context.write(draft_pb.DraftResponse(opened=opened))
            while (request := await context.read()) is not grpc.aio.EOF:
                advance = request.advance
                assert advance.base_len == len(self.known)
                self.known += advance.token_ids
                self.num_asked += 1
                await self.may_answer.wait()
                for proposal in self.answer(self.known, advance.num_draft_tokens):
                    proposal.epoch = opening.epoch
                    await context.write(draft_pb.DraftResponse(proposal=proposal))
        finally:
            self.ended += 1


@asynccontextmanager
async def serving_draft(draft, folder):
    server = RpcServer(ServerSettings(port=0, socket=f"unix:{folder}/draft"))
    server.add(draft_grpc.add_DraftServiceServicer_to_server, draft, "specdec.v1.DraftService")
    await server.start()
    await server.set_serving(True)
    try:
        yield f"unix:{folder}/draft"
    finally:
        await server.stop()


def opening_of(spec, address, *, epoch=7, timeout_s=5.0, num_draft_tokens=0):
    draft = SessionSpec(session_id="draft", epoch=epoch, token_ids=(), prompt_len=spec.prompt_len, params=spec.params)
    return DraftOpening(address, draft, timeout_s, num_draft_tokens)


class DirectClient(Client):
    """A session over a socket, whose draft the target asks."""

    def __init__(self, stream, spec):
        self.spec = spec
        self.stream = stream
        #: What came besides verdicts.
        self.told = []

    async def open(self):
        while (answer := await self.stream.receive()).WhichOneof("kind") != "opened":
            self.told.append(answer)
        self.opened = codec.decode_target_opened(answer.opened)
        self.first = await self.verdict()

    async def __aenter__(self):
        self.stream.post(codec.encode_open_target(self.spec))
        return self

    async def open_draft(self, address, *, timeout_ms=5000, epoch=7):
        opening = opening_of(self.spec, address, epoch=epoch, timeout_s=timeout_ms / 1e3)
        self.stream.post(pb.VerifyRequest(open_draft=codec.encode_draft_opening(1, opening)))

    def draft(self, num_draft_tokens):
        self.stream.post(pb.VerifyRequest(draft_length=pb.DraftLength(epoch=1, num_draft_tokens=num_draft_tokens)))

    async def use_draft(self, address):
        """Open a draft, and ask for K tokens in each round."""
        await self.open_draft(address)
        await self.until_told("draft_opened")
        self.draft(K)

    def decode(self, num_tokens):
        """Decode in multi-step after the first token."""
        asked = pb.MultiStepDecode(epoch=1, committed_len=self.first.committed_len, num_tokens=num_tokens)
        self.stream.post(pb.VerifyRequest(multi_step_decode=asked))

    async def verdict(self):
        while (answer := await self.stream.receive()).WhichOneof("kind") != "verdict":
            self.told.append(answer)
        return codec.decode_verdict(answer.verdict)

    async def until_told(self, kind):
        """The message about the draft; no verdict comes before it."""
        answer = await self.stream.receive()
        assert answer.WhichOneof("kind") == kind
        return getattr(answer, kind)

    async def rest(self, act=lambda verdict: None):
        """All verdicts up to the end; ``act`` is called with each."""
        verdicts = [await self.verdict()]
        while verdicts[-1].finish_reason is None:
            act(verdicts[-1])
            verdicts.append(await self.verdict())
        return verdicts


@asynccontextmanager
async def session(serve, core, folder, prompt, **changes):
    address = f"unix:{folder}/target"
    async with serve(core, port=0, socket=address) as (_, server):
        stream = await FramedStream.open(
            framed_path(address), "/specdec.v1.TargetService/Verify", pb.VerifyResponse.FromString
        )
        async with DirectClient(stream, make_spec(prompt, **({"max_tokens": NUM_TOKENS} | changes))) as client:
            await client.open()
            yield client
        await until(lambda: server.num_active_calls == 0)


def tokens_of(first, verdicts):
    return tuple(token for verdict in (first, *verdicts) for token in verdict.token_ids)


def unlimited(prompt, verdicts):
    """Those that the limit of the answer did not cut."""
    return [verdict for verdict in verdicts if verdict.base_len + K < len(prompt) + NUM_TOKENS]


def drafts(text, prompt, *, wrong=()):
    """Answers with the text itself, but for wrong tokens at some places of each proposal."""

    def answer(known, count):
        done = len(known) - len(prompt)
        right = text[done : done + count]
        token_ids = [(token + 1) % VOCAB if i in wrong else token for i, token in enumerate(right)]
        return [types_pb.Proposal(base_len=len(known), token_ids=token_ids, draft_ns=5)]

    return answer


@pytest.mark.parametrize("wrong", [(), (0,), (2,), (0, 1, 2)])
async def test_rounds_without_messages_of_the_gateway(start_core, serve, plain, tmp_path, wrong):
    prompt = make_prompt(1)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt, wrong=wrong))
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            assert client.opened.asks_drafts
            await client.open_draft(address)
            opened = await client.until_told("draft_opened")
            assert (opened.epoch, opened.num_speculative_tokens) == (7, K)
            client.draft(K + 5)  # more than it drafts
            verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == text
        assert verdicts[-1].finish_reason is FinishReason.LENGTH
        num_accepted = wrong[0] if wrong else K
        for verdict in unlimited(prompt, verdicts):
            assert (verdict.num_draft_tokens, verdict.num_accepted) == (K, num_accepted)
            drafted = verdict.drafted
            assert drafted == DraftedRound(K, K, 5, drafted.wait_ns)
            assert drafted.wait_ns > 0
        await until(lambda: draft.ended == draft.opened == 1)
        await until_clean(core)


async def test_verdicts_leave_together(start_core, serve, plain, tmp_path, monkeypatch):
    """Nobody waits for them: the gateway chose their lengths before."""
    for name in ("MIN_ROUNDS_GATHER_S", "MAX_GATHER_S"):
        monkeypatch.setattr(servicer_module, name, 20.0)  # the end of the text does not wait
    prompt = make_prompt(1)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt, wrong=(1,)))
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            async with asyncio.timeout(10.0):
                verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == text
        groups = sum(not verdict.is_followed for verdict in verdicts)
        assert groups <= 3 < len(verdicts)
        assert not verdicts[-1].is_followed
        await until_clean(core)


async def test_lengths_change_while_rounds_run(start_core, serve, plain, tmp_path, monkeypatch):
    for name in ("MIN_GATHER_S", "MIN_ROUNDS_GATHER_S"):
        monkeypatch.setattr(servicer_module, name, 0.0)  # each verdict is answered before the next round
    prompt = make_prompt(2)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt, wrong=(1,)))
    lengths = iter([0, 2, 1, 0, 3, 0, 2] + [1] * NUM_TOKENS)
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.open_draft(address)
            client.draft(1)  # before it is open: from then on
            await client.until_told("draft_opened")
            client.draft(2)
            verdicts = await client.rest(lambda _: client.draft(next(lengths)))
        assert tokens_of(client.first, verdicts) == text
        assert {verdict.drafted is None for verdict in verdicts} == {True, False}
        await until_clean(core)


async def test_without_drafted_tokens_the_target_decodes_to_the_end(start_core, serve, plain, tmp_path):
    """Also where a proposal is asked for at that moment: it is verified first."""
    prompt = make_prompt(3)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt))
    answer = draft.answer

    def noted(known, count):
        client.draft(0)
        return answer(known, count)

    draft.answer = noted
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == text
        assert [verdict.num_draft_tokens for verdict in verdicts if verdict.drafted] == [K]


async def test_a_session_that_is_told_to_decode_while_the_draft_works(start_core, serve, plain, tmp_path):
    """The proposal comes too late then. It is no failure of the draft, which is asked again."""
    prompt = make_prompt(13)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt))
    draft.may_answer.clear()
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            await until(lambda: draft.num_asked == 1)
            length = client.first.committed_len
            client.decode(5)
            verdicts = [await client.verdict()]
            while verdicts[-1].committed_len < length + 5:
                verdicts.append(await client.verdict())
            draft.may_answer.set()
            verdicts += await client.rest()
        assert tokens_of(client.first, verdicts) == text
        assert not client.told
        assert verdicts[-2].drafted is not None


async def test_a_proposal_that_comes_while_the_session_decodes_is_dropped(
    start_core, serve, plain, tmp_path, monkeypatch
):
    """Its round would be nobody's: the gateway asked for none, and the target tells of its own rounds alone."""
    run_steps, begun = core_module.run_steps, threading.Event()

    def slow(*args, **kwargs):
        begun.set()
        time.sleep(0.05)  # on the device thread: the proposal comes during the step
        return run_steps(*args, **kwargs)

    prompt = make_prompt(13)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt))
    draft.may_answer.clear()
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            await until(lambda: draft.num_asked == 1)
            monkeypatch.setattr(core_module, "run_steps", slow)
            client.decode(3)
            await until(begun.is_set)
            draft.may_answer.set()
            verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == text
        assert all(verdict.drafted is not None for verdict in verdicts if verdict.num_draft_tokens)
        assert any(verdict.num_accepted for verdict in verdicts), "the draft is asked again"


def silent(known, count):
    return []


def unknown_token(known, count):
    return [types_pb.Proposal(base_len=len(known), token_ids=[VOCAB])]


def too_many(known, count):
    return [types_pb.Proposal(base_len=len(known), token_ids=[1] * 60)]


def broken(known, count):
    return [types_pb.Proposal(base_len=len(known), token_ids=[1, 2], parents=[-1])]


def failing(known, count):
    raise Unavailable("the draft goes down")


@pytest.mark.parametrize(("answer", "code", "text"), [
    (silent, "UNAVAILABLE", "no proposal came within 0.2 s"),
    (unknown_token, "INVALID_ARGUMENT", f"tokens {VOCAB} to {VOCAB}"),
    (too_many, "INVALID_ARGUMENT", "60 tokens"),
    (broken, "INVALID_ARGUMENT", "2 tokens has 1 parents"),
    (failing, "UNAVAILABLE", "the draft goes down"),
])  # fmt: skip
@pytest.mark.parametrize("num_good", [0, 2])
async def test_a_draft_that_fails_costs_no_token(  # noqa: PLR0917 (fixtures and parameters)
    start_core, serve, plain, tmp_path, answer, code, text, num_good
):
    prompt = make_prompt(4)
    wanted = plain(prompt, NUM_TOKENS)
    good, answers = drafts(wanted, prompt), []

    def answering(known, count):
        answers.append(count)
        return (good if len(answers) <= num_good else answer)(known, count)

    async with start_core() as core, serving_draft(ScriptedDraft(answering), tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.open_draft(address, timeout_ms=200)
            await client.until_told("draft_opened")
            client.draft(K)
            verdicts = await client.rest(lambda _: client.draft(K))  # nothing follows once it is lost
        assert tokens_of(client.first, verdicts) == wanted
        assert sum(verdict.drafted is not None for verdict in verdicts) == num_good
        (lost,) = [told.draft_lost for told in client.told]
        assert (lost.epoch, lost.code) == (7, code)
        assert text in lost.text
        await until_clean(core)


async def test_proposals_that_nobody_asked_for_are_dropped(start_core, serve, plain, tmp_path):
    prompt = make_prompt(5)
    text = plain(prompt, NUM_TOKENS)
    good = drafts(text, prompt)

    def answer(known, count):
        length = len(known)
        return [
            types_pb.Proposal(base_len=length - 1, token_ids=[1]),
            types_pb.Proposal(base_len=length + 1, token_ids=[1]),
            *good(known, count),
            *good(known, count),
        ]

    async with start_core() as core, serving_draft(ScriptedDraft(answer), tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == text
        assert all(verdict.num_accepted == K for verdict in unlimited(prompt, verdicts))
        assert not client.told


async def test_a_draft_without_proposals_leaves_plain_steps(start_core, serve, plain, tmp_path):
    prompt = make_prompt(6)
    draft = ScriptedDraft(lambda known, count: [types_pb.Proposal(base_len=len(known))])
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == plain(prompt, NUM_TOKENS)
        assert {len(verdict.token_ids) for verdict in verdicts} == {1}


async def test_trees(start_core, serve, plain, tmp_path):
    """Two branches, of which one is right."""
    prompt = make_prompt(7)
    text = plain(prompt, NUM_TOKENS)

    def answer(known, count):
        right = text[len(known) - len(prompt) :][:2]
        wrong = [(token + 1) % VOCAB for token in right]
        if len(right) < 2:
            return [types_pb.Proposal(base_len=len(known), token_ids=right)]
        return [types_pb.Proposal(base_len=len(known), token_ids=[wrong[0], *right], parents=[-1, -1, 1])]

    async with start_core() as core, serving_draft(ScriptedDraft(answer), tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.use_draft(address)
            verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == text
        for verdict in unlimited(prompt, verdicts):
            assert (verdict.num_draft_tokens, verdict.drafted.depth, verdict.num_accepted) == (3, 2, 2)


async def test_a_draft_that_cannot_be_reached(start_core, serve, plain, tmp_path):
    prompt = make_prompt(8)
    async with start_core() as core, session(serve, core, tmp_path, prompt) as client:
        await client.open_draft(f"unix:{tmp_path}/nobody")
        assert (await client.until_told("draft_lost")).code == "UNAVAILABLE"
        client.draft(K)  # has no effect
        client.decode(NUM_TOKENS)
        verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == plain(prompt, NUM_TOKENS)


async def test_a_second_draft_replaces_the_first(start_core, serve, plain, tmp_path):
    prompt = make_prompt(9)
    text = plain(prompt, NUM_TOKENS)
    draft = ScriptedDraft(drafts(text, prompt))
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.open_draft(address, epoch=7)
            await client.until_told("draft_opened")
            await client.open_draft(address, epoch=8)
            assert (await client.until_told("draft_opened")).epoch == 8
            await until(lambda: (draft.opened, draft.ended) == (2, 1))
            client.draft(K)
            assert tokens_of(client.first, await client.rest()) == text
        await until(lambda: draft.ended == 2)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_draft_is_opened_beside_the_prompt(start_core, serve, plain, tmp_path, is_late):
    """Rounds begin once it is open, without a message; until then the target decodes."""
    prompt, num_tokens = make_prompt(12), 200 if is_late else NUM_TOKENS
    text = plain(prompt, num_tokens)
    draft = ScriptedDraft(drafts(text, prompt))
    may_open, answer = asyncio.Event(), draft.Draft
    if not is_late:
        may_open.set()

    async def opening(request_iterator, context):
        await may_open.wait()
        await answer(request_iterator, context)

    draft.Draft = opening
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        asked = opening_of(make_spec(prompt), address, num_draft_tokens=K)
        async with session(serve, core, tmp_path, prompt, draft=asked, max_tokens=num_tokens) as client:
            assert client.opened.opens_draft
            verdicts = await client.rest(lambda _: may_open.set())
        assert tokens_of(client.first, verdicts) == text
        is_round = [verdict.drafted is not None for verdict in verdicts]
        assert is_round == sorted(is_round)  # first it decodes
        assert is_round[-1]
        assert is_late or is_round.index(True) < 20
        await until(lambda: draft.ended == draft.opened == 1)
        await until_clean(core)


@pytest.mark.parametrize("address", ["unix:{}/nobody", "unix-abstract:draft"])
async def test_a_draft_of_the_opening_that_cannot_be_reached(start_core, serve, plain, tmp_path, address):
    prompt = make_prompt(13)
    asked = opening_of(make_spec(prompt), address.format(tmp_path), num_draft_tokens=K)
    async with start_core() as core, session(serve, core, tmp_path, prompt, draft=asked) as client:
        if not client.opened.opens_draft:  # nobody listens at such an address: the gateway asks for tokens
            assert address.startswith("unix-abstract")
            client.decode(NUM_TOKENS)
        verdicts = await client.rest()
        assert tokens_of(client.first, verdicts) == plain(prompt, NUM_TOKENS)
        assert [told.draft_lost.code for told in client.told] == ["UNAVAILABLE"] * client.opened.opens_draft


async def test_a_session_that_ends_in_its_prompt_ends_the_draft(start_core, serve, tmp_path, monkeypatch):
    prompt = make_prompt(14)
    draft = ScriptedDraft(silent)
    stuck = asyncio.Event()

    async def never(session):
        await stuck.wait()

    monkeypatch.setattr(core_module.Session, "start", never)
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        asked = opening_of(make_spec(prompt), address, num_draft_tokens=K)
        target = f"unix:{tmp_path}/target"
        async with serve(core, port=0, socket=target):
            stream = await FramedStream.open(
                framed_path(target), "/specdec.v1.TargetService/Verify", pb.VerifyResponse.FromString
            )
            stream.post(codec.encode_open_target(make_spec(prompt, draft=asked)))
            await until(lambda: draft.opened == 1)
            await stream.close()
            await until(lambda: draft.ended == 1)
            await until_clean(core)


@pytest.mark.parametrize("is_open", [True, False])
async def test_the_end_of_the_stream_ends_the_draft(start_core, serve, tmp_path, is_open):
    """In a round, and while it is being opened."""
    prompt = make_prompt(10)
    draft = ScriptedDraft(silent)
    if not is_open:

        async def slow(request_iterator, context):
            draft.opened += 1
            try:
                await asyncio.Event().wait()
            finally:
                draft.ended += 1

        draft.Draft = slow
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt) as client:
            await client.open_draft(address)
            if is_open:
                await client.until_told("draft_opened")
                client.draft(K)
            await until(lambda: draft.opened == 1)
        await until(lambda: draft.ended == 1)
        await until_clean(core)


async def test_of_a_gateway_over_a_network_no_draft_is_asked(start_core, serve, tmp_path):
    """A target connects to drafts only for those who may use its own socket."""
    prompt = make_prompt(11)
    async with start_core() as core, serve(core) as (stub, _), Client(stub, make_spec(prompt, 8)) as client:
        await client.open()
        assert (client.opened.asks_drafts, client.opened.asks_remote_drafts) == (False, False)
        await client.stream.send(pb.VerifyRequest(open_draft=pb.OpenDraft(epoch=1, address=f"unix:{tmp_path}/draft")))
        with pytest.raises(InvalidRequest, match="the target must be reached over a Unix socket"):
            await client.verdict()
    async with start_core() as core, session(serve, core, tmp_path, prompt) as client:
        await client.open_draft("unix-abstract:draft")
        with pytest.raises(InvalidRequest, match="'unix-abstract:draft' cannot be asked"):
            await client.verdict()
