"""Drafts that clients bring for their own requests: the client dials, and drafts when the target asks.

Nobody vouches for such a draft. It drafts for requests of the same API key that name its token, whose text no draft
changes; the target asks it through the gateway, never waits for it, and checks what comes.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn
from weakref import WeakValueDictionary

from gateway.access.caller import Caller
from gateway.access.usage import Clients
from gateway.placement.routing import Replica, Router
from specdec.backends import DraftBackend
from specdec.errors import InvalidRequest, Overloaded, StaleSession, TandemError, Unavailable, quote
from specdec.lookup.prediction import PredictionLookup
from specdec.rpc.channel import MAX_PREDICTION_BYTES
from specdec.types import ModelInfo, ServerLoad, SessionSpec, Verdict
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import generation_service_pb2 as generation_pb
from specdec.vocabulary import check_compatible

logger = logging.getLogger(__name__)

#: Attachments of one client at once, where its limits do not say.
MAX_ATTACHMENTS: Final = 4
#: Bytes of the messages that all attachments may be sending at once.
MAX_RECEIVING_BYTES: Final = 2**28
#: Bytes of a proposal's message: 1,024 tokens take five.
MAX_ANSWER_BYTES: Final = 2**14
#: Drafted tokens of one client that the target may reject in a minute, and how many more each accepted one allows. A
#: draft of which a fifth is accepted never gets there. Pacing gives up a worse one long before, but for each text anew.
MAX_REJECTED: Final = 6000
REJECTED_PER_ACCEPTED: Final = 4
#: Rejected tokens that a round without an accepted one counts as, at least: one without any token costs messages, and
#: pacing cannot tell its price from that of a plain step.
REJECTED_PER_ROUND: Final = 4
#: Nanoseconds of drafting that are believed: the times are added up.
MAX_DRAFT_NS: Final = 10**10
#: Characters of a client's words in the log.
MAX_TEXT_LENGTH: Final = 120
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{32,128}")


class Attachment:
    """One call of a client. Implements :class:`specdec.backends.DraftRelay`."""

    def __init__(
        self,
        info: ModelInfo | None,
        send: Callable[[generation_pb.AttachDraftResponse], None],
        end: Callable[[TandemError], None],
        note: Callable[[Verdict], None],
    ) -> None:
        """``info``: of its draft; None: it brings predictions alone. ``end`` ends the call from outside, ``note`` gets
        the verdicts of its proposals.
        """
        self._info = info
        self._send = send
        self.end = end
        self.note = note
        #: What gets the answers of each session.
        self._answers: dict[int, Callable[[pb.RelayedResponse], None]] = {}
        self._num_opened = 0
        self._is_over = False
        #: What its requests are expected to answer, as text, or ready once a request has needed it.
        self.prediction: str | PredictionLookup = ""

    @property
    def brings_draft(self) -> bool:
        """Whether it drafts; else it brings predictions alone."""
        return self._info is not None

    def open_relayed(self, answer: Callable[[pb.RelayedResponse], None]) -> AttachedSession:
        """Begin a session of the draft.

        Raises:
            Unavailable: the call is over.
        """
        if self._is_over:
            raise Unavailable("the client that brought the draft has left")
        self._num_opened += 1
        self._answers[self._num_opened] = answer
        return AttachedSession(self, self._num_opened)

    def post(self, session: int, request: pb.DraftRequest | None) -> None:
        """Ask the draft; None: the session is over."""
        if self._answers.get(session) is not None:
            if request is None:
                del self._answers[session]
            relayed = pb.RelayedRequest(session=session, request=request)
            self._send(generation_pb.AttachDraftResponse(relayed=relayed))

    def take(self, message: generation_pb.AttachDraftRequest, num_bytes: int) -> None:
        """A message of the client came, of so many bytes.

        Raises:
            InvalidRequest: it is too large, or may not come.
        """
        kind = message.WhichOneof("kind")
        limit = MAX_ANSWER_BYTES if kind == "relayed" else MAX_PREDICTION_BYTES
        if num_bytes > limit:
            raise InvalidRequest(f"a message has {num_bytes} bytes, above the limit of {limit} for {kind}; send less")
        if kind == "prediction":
            self.prediction = message.prediction
        elif kind != "relayed":
            raise InvalidRequest("only the first message of a call is attach; then send relayed or prediction")
        elif answer := self._answers.get(message.relayed.session):
            answer(_checked(message.relayed))

    def keep(self, text: str, prediction: PredictionLookup) -> None:
        """Keep the prediction that was made of ``text``, if it still begins with that."""
        if isinstance(self.prediction, str) and self.prediction.startswith(text):
            self.prediction = prediction

    def close(self) -> None:
        """The call is over, and with it every session."""
        self._is_over = True
        answers, self._answers = self._answers, {}
        for session, answer in answers.items():
            answer(pb.RelayedResponse(session=session, error="the client that brought it has left"))

    # --- specdec.backends.DraftBackend, as far as a replica needs it ---

    async def open(self, spec: SessionSpec) -> NoReturn:
        """Refuse: nobody but a target asks such a draft."""
        raise InvalidRequest("the target asks no drafts through the gateway; use one of this version, or tandem serve")

    async def info(self) -> ModelInfo:
        """Describe the model."""
        assert self._info is not None
        return self._info

    async def load(self) -> ServerLoad:
        """Nothing is known of it."""
        return ServerLoad()


class AttachedSession:
    """One session of a client's draft. Implements :class:`specdec.backends.RelayedDraft`."""

    def __init__(self, attachment: Attachment, number: int) -> None:
        self._attachment = attachment
        self._number = number

    def post(self, request: pb.DraftRequest) -> None:
        """Pass on what the target asks."""
        self._attachment.post(self._number, request)

    def note(self, verdict: Verdict) -> None:
        """Count what became of its tokens."""
        if verdict.drafted is not None:
            self._attachment.note(verdict)

    def close(self) -> None:
        """The session is over. Idempotent."""
        self._attachment.post(self._number, None)


class Attachments:
    """Those of one gateway, by the name of the API key and the token."""

    def __init__(self, clients: Clients, router: Router, max_message_bytes: int) -> None:
        """``router``: its model is the target's."""
        self._clients = clients
        self._router = router
        self._max_attachments = max(1, MAX_RECEIVING_BYTES // max_message_bytes)
        self._open: dict[tuple[str, str], tuple[Caller, Attachment]] = {}
        #: What the requests hold that name an attachment: one that comes back drafts for them again.
        self._routers: WeakValueDictionary[tuple[str, str], Router] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_routers(self) -> int:
        """Attachments that calls or requests know."""
        return len(self._routers)

    def find(self, caller: Caller, token: str) -> tuple[Attachment, Router | None] | None:
        """The attachment of this token, and the router of its draft, if it brings one; None: it is not there."""
        if not token or (found := self._open.get((caller.key, token))) is None:
            return None
        return found[1], self._routers.get((caller.key, token)) if found[1].brings_draft else None

    @contextmanager
    def join(
        self,
        caller: Caller,
        token: str,
        info: ModelInfo | None,
        send: Callable[[generation_pb.AttachDraftResponse], None],
        end: Callable[[TandemError], None],
    ) -> Iterator[Attachment]:
        """An attachment, as long as its call; see :class:`Attachment`. It takes the place of one with the same token.

        Raises:
            InvalidRequest: the token may be guessed, or the draft reads what no client gets.
            ModelNotSupported: the draft's tokens are not the target's.
            Overloaded: there are too many, of this client or in all.
        """
        name = (caller.key, token)
        self._check(caller, name)
        if _TOKEN.fullmatch(token) is None:
            raise InvalidRequest("token needs 32 to 128 letters, digits, - or _, drawn at random", param="token")
        info = None if info is None else self._checked(info, caller)
        if name in self._open:
            text = "another draft with this token has taken the place of this one; draw a token for each"
            self._open[name][1].end(StaleSession(text))
        attachment, router = Attachment(info, send, end, partial(self._note, caller, end)), Router()
        self._open[name] = caller, attachment
        if info is not None:
            router = self._routers.setdefault(name, router)
            replica: Replica[DraftBackend] = Replica(info.method, attachment, info=info)
            router.drafts.replicas[:] = [replica]
        logger.debug("%s is attached: %s", caller.client, info)
        try:
            yield attachment
        finally:
            if self._open.get(name) == (caller, attachment):
                del self._open[name]
            if info is not None:
                replica.healthy = False
            attachment.close()

    def end(self, error: TandemError) -> None:
        """End all of them."""
        for _, attachment in self._open.values():
            attachment.end(error)

    def _note(self, caller: Caller, end: Callable[[TandemError], None], verdict: Verdict) -> None:
        """Take rejected tokens from the client's budget; end the attachment that exceeds it."""
        budget, num_accepted = self._clients.usage_of(caller).rejected, verdict.num_accepted
        num_rejected = max(verdict.num_draft_tokens - num_accepted, 0 if num_accepted else REJECTED_PER_ROUND)
        budget.give_back(REJECTED_PER_ACCEPTED * num_accepted)
        if wait_s := budget.take(num_rejected, MAX_REJECTED, time.monotonic()):
            text = f"its drafts bring too little ({MAX_REJECTED} rejected tokens a minute); attach one that fits better"
            end(Overloaded(text, retry_after_s=wait_s))

    def _check(self, caller: Caller, name: tuple[str, str]) -> None:
        with self._clients.request(caller, 0):  # by the minute it counts as one
            pass
        others = [client for other, (client, _) in self._open.items() if other != name]
        if len(others) >= self._max_attachments:
            raise Overloaded(f"{len(others)} drafts are attached here, which is the limit; try again later")
        most, count = caller.limits.max_client_attachments, sum(other.client == caller.client for other in others)
        if count >= (most := MAX_ATTACHMENTS if most is None else most):
            self._clients.refuse(caller, "max_client_attachments", f"{count} drafts of {most} are attached")

    def _checked(self, info: ModelInfo, caller: Caller) -> ModelInfo:
        """What is used of a client's description."""
        if info.hidden_state_layers:
            raise InvalidRequest("the draft reads hidden states, which no client gets; attach a draft model")
        known = ModelInfo(
            name=info.name[:MAX_TEXT_LENGTH],
            # Prices are learned by method: nobody else's depend on this draft.
            method=f"attached by {caller.client}",
            vocab_size=info.vocab_size,
            tokenizer_size=info.tokenizer_size,
            tokenizer_fingerprint=info.tokenizer_fingerprint[:MAX_TEXT_LENGTH],
            num_speculative_tokens=info.num_speculative_tokens,
        )
        check_compatible(self._router.model(), known)
        return known


def _checked(answer: pb.RelayedResponse) -> pb.RelayedResponse:
    """What a target gets of an answer."""
    if answer.error:
        return pb.RelayedResponse(error=quote(answer.error[:MAX_TEXT_LENGTH]))
    for proposal in (answer.response.proposal, *answer.response.more_proposals):
        for name in ("draft_ns", "queue_ns"):
            if getattr(proposal, name) > MAX_DRAFT_NS:
                setattr(proposal, name, MAX_DRAFT_NS)
    return answer
