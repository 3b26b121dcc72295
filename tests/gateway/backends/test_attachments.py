"""The registry of drafts that clients bring: who may use which, and when one is ended."""

import gc
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from gateway.access.caller import Caller
from gateway.access.usage import Clients
from gateway.backends import attachments as module
from gateway.backends.attachments import Attachments
from gateway.placement.routing import Replica, Router
from specdec.errors import InvalidRequest, ModelNotSupported, Overloaded, StaleSession, Unavailable
from specdec.settings import ClientLimits
from specdec.types import DraftedRound, ModelInfo, Verdict
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2

TARGET = ModelInfo(name="target", vocab_size=64, tokenizer_size=64, tokenizer_fingerprint="f")
DRAFT = ModelInfo(name="draft" * 100, vocab_size=64, tokenizer_size=64, tokenizer_fingerprint="f", eos_token_ids=(1,))
ALICE, BOB = Caller("alice", "alice"), Caller("bob", "bob")
TOKEN = "t" * 32


@pytest.fixture
def refusals():
    return []


@pytest.fixture
def registry(refusals):
    router = Router([Replica("target", None)])
    router.target_up(router.targets.replicas[0], TARGET)
    return Attachments(Clients(lambda caller, limit: refusals.append((caller.key, limit))), router, 2**24)


class Client:
    """What one call was sent, and why it was ended."""

    def __init__(self, registry, caller=ALICE, token=TOKEN, info=DRAFT):
        self.sent, self.ends, self.answers = [], [], []
        self.joining = registry.join(caller, token, info, self.sent.append, self.ends.append)

    def __enter__(self):
        self.attachment = self.joining.__enter__()
        return self

    def __exit__(self, *error):
        self.joining.__exit__(*error)

    def open(self):
        return self.attachment.open_relayed(self.answers.append)

    def say(self, num_bytes=100, **fields):
        self.attachment.take(pb.AttachDraftRequest(**fields), num_bytes)


def verdict(num_drafted, num_accepted, *, is_drafted=True):
    drafted = DraftedRound(num_drafted, num_drafted) if is_drafted else None
    return Verdict(1, 5, (1,), num_accepted, num_drafted, drafted=drafted)


def test_only_the_key_that_brought_it_finds_it(registry):
    with Client(registry) as client:
        attachment, router = registry.find(ALICE, TOKEN)
        assert attachment is client.attachment
        assert router.pick_draft("any").backend is attachment
        assert router.draft_model() == ModelInfo(
            name=DRAFT.name[: module.MAX_TEXT_LENGTH],
            method="attached by alice",
            vocab_size=64,
            tokenizer_size=64,
            tokenizer_fingerprint="f",
        )
        assert registry.find(BOB, TOKEN) is registry.find(ALICE, "other") is registry.find(ALICE, "") is None
    assert registry.find(ALICE, TOKEN) is None
    assert router.pick_draft("any") is None


def test_requests_that_run_find_one_that_came_back(registry):
    with Client(registry):
        _, held = registry.find(ALICE, TOKEN)
    with Client(registry) as later:
        assert held.pick_draft("any").backend is later.attachment
    del held, later
    gc.collect()
    assert (len(registry), registry.num_routers) == (0, 0)


def test_the_newest_with_a_token_counts(registry):
    with Client(registry) as older, Client(registry) as newer:
        assert [type(error) for error in older.ends] == [StaleSession]
        assert registry.find(ALICE, TOKEN)[0] is newer.attachment
        older.__exit__(None, None, None)
        assert registry.find(ALICE, TOKEN)[1].pick_draft("any").backend is newer.attachment
        older.joining = ExitStack()


def test_messages_of_sessions_are_told_apart_and_end_with_the_call(registry):
    with Client(registry) as client:
        first, second = client.open(), client.open()
        first.post(draft_pb.DraftRequest())
        second.close()
        second.close()
        second.post(draft_pb.DraftRequest())
        assert [(each.relayed.session, each.relayed.HasField("request")) for each in client.sent] == [
            (1, True),
            (2, False),
        ]
        client.say(relayed=draft_pb.RelayedResponse(session=2))
        client.say(relayed=draft_pb.RelayedResponse(session=77))
        assert client.answers == []
        client.say(relayed=draft_pb.RelayedResponse(session=1, error="\x1b[2J" + "x" * 10_000))
        assert len(client.answers[0].error) < 200
        assert client.answers[0].error.isprintable()
    assert client.answers[1].error == "the client that brought it has left"
    first.post(draft_pb.DraftRequest())
    assert len(client.sent) == 2


def test_times_that_would_overflow_are_cut(registry):
    proposals = [types_pb2.Proposal(draft_ns=2**64 - 1, queue_ns=2**64 - 1, token_ids=[3])] * 2
    response = draft_pb.DraftResponse(proposal=proposals[0], more_proposals=proposals[1:])
    opened = draft_pb.DraftResponse(opened=draft_pb.DraftSessionOpened(epoch=4))
    with Client(registry) as client:
        client.open()
        for each in (response, opened):
            client.say(relayed=draft_pb.RelayedResponse(session=1, response=each))
        found, unchanged = (answer.response for answer in client.answers)
        for proposal in (found.proposal, *found.more_proposals):
            assert proposal.draft_ns == proposal.queue_ns == module.MAX_DRAFT_NS
            assert proposal.token_ids == [3]
        assert unchanged == opened


@pytest.mark.parametrize(
    ("fields", "num_bytes", "text"),
    [
        ({"relayed": draft_pb.RelayedResponse(session=1)}, module.MAX_ANSWER_BYTES + 1, "16385 bytes"),
        ({"prediction": "x"}, module.MAX_PREDICTION_BYTES + 1, "above the limit of 1048576 for prediction"),
        ({"attach": pb.Attachment()}, 10, "only the first message"),
        ({}, 10, "only the first message"),
    ],
)
def test_messages_that_end_the_call(registry, fields, num_bytes, text):
    with Client(registry) as client, pytest.raises(InvalidRequest, match=text):
        client.say(num_bytes, **fields)


def test_predictions_replace_each_other(registry):
    with Client(registry, info=None) as client:
        assert registry.find(ALICE, TOKEN) == (client.attachment, None)
        client.say(prediction="first")
        client.say(prediction="second")
        assert client.attachment.prediction == "second"


def test_rejected_tokens_are_bounded_by_client(registry, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(module, "time", clock)
    with Client(registry) as client:
        session = client.open()
        for _ in range(10):  # a fifth is accepted
            session.note(verdict(module.MAX_REJECTED // 2, module.MAX_REJECTED // 10))
            session.note(verdict(module.MAX_REJECTED, 0, is_drafted=False))  # of another draft
        assert client.ends == []
        while not client.ends:
            session.note(verdict(0, 0))
        assert [type(error) for error in client.ends] == [Overloaded]
        assert client.ends[0].retry_after_s == pytest.approx(module.REJECTED_PER_ROUND / 100)
    with Client(registry, token="u" * 32) as client:  # another attachment gives no other budget
        client.open().note(verdict(100, 0))
        assert len(client.ends) == 1
        clock.now += 2.0
        client.open().note(verdict(100, 0))
        assert len(client.ends) == 1
    with Client(registry, BOB) as client:
        client.open().note(verdict(100, 0))
        assert client.ends == []


def test_numbers_are_limited_by_client_and_in_all(registry, refusals):
    with ExitStack() as exits:
        for i in range(module.MAX_ATTACHMENTS):
            exits.enter_context(Client(registry, token=f"{i}" * 32))
        with pytest.raises(Overloaded, match="max_client_attachments of the key 'alice' is reached: 4 drafts of 4"):
            exits.enter_context(Client(registry))
        exits.enter_context(Client(registry, token="1" * 32))  # it takes the place of one
        none = Caller("none", "none", ClientLimits(max_client_attachments=0))
        with pytest.raises(Overloaded):
            exits.enter_context(Client(registry, none))
        assert refusals == [("alice", "max_client_attachments"), ("none", "max_client_attachments")]
        for i in range(12):
            exits.enter_context(Client(registry, Caller(f"{i}", f"{i}")))
        with pytest.raises(Overloaded, match="16 drafts are attached here"):
            exits.enter_context(Client(registry, BOB))
    with Client(registry, BOB):
        assert len(registry) == 1


@pytest.mark.parametrize("token", ["", "short", "t" * 129, "ä" * 32, "t" * 31 + "\n", "a b" * 20])
def test_tokens_that_may_be_guessed(registry, token):
    with pytest.raises(InvalidRequest, match="token needs 32 to 128"), Client(registry, token=token):
        pass


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (ModelInfo(name="other", vocab_size=64, tokenizer_size=64, tokenizer_fingerprint="g"), ModelNotSupported),
        (ModelInfo(name="head", hidden_state_layers=(-1,)), InvalidRequest),
    ],
)
def test_drafts_that_are_refused(registry, info, error):
    with pytest.raises(error), Client(registry, info=info):
        pass
    assert len(registry) == 0


def test_attachments_end_when_the_gateway_drains(registry):
    with Client(registry) as client:
        registry.end(StaleSession("over"))
        assert len(client.ends) == 1


def test_an_attachment_that_has_left_is_asked_nothing(registry):
    with Client(registry):
        found, router = registry.find(ALICE, TOKEN)
        assert router is not None
    with pytest.raises(Unavailable, match="has left"):
        found.open_relayed(lambda answer: None)
