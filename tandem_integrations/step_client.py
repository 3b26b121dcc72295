"""One stream to a draft service, for code that is not asynchronous: a step's request out, its answer in."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import grpc

from specdec.backoff import backoff_s
from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import CHANNEL_OPTIONS
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import draft_service_pb2_grpc as pb_grpc
from tandem_integrations.settings import RemoteDraftSettings

logger = logging.getLogger(__name__)

#: Milliseconds that the answer of a step may be delayed, above the time the service gets for it: a round trip between
#: machines of one site takes one or two, a busy event loop some more.
NETWORK_MS: Final = 20
#: Steps in a row that may use up their time for nothing. Each makes a step of the engine as much longer, so a draft
#: that is never in time costs four such steps, then nothing until it is tried again.
MAX_LATE_STEPS: Final = 4
#: Seconds before a service that had nothing in time is asked again, doubled with each such failure after the first.
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 64.0
#: Seconds after which one that was lost or refused the stream is called again: it costs a step nothing, because gRPC
#: connects beside the steps.
CALL_S: Final = 0.5
#: What a service that is there answers to a stream it does not take. A call may look taken for a moment before that.
REFUSED: Final = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class Lost(Exception):
    """The stream is over, and its sessions with it."""


class StepClient:
    """The stream is opened at the first step, because engines fork and spawn, and again after a failure."""

    def __init__(self, settings: RemoteDraftSettings) -> None:
        """Read the certificates.

        Raises:
            InvalidRequest: a file cannot be used.
        """
        self.address = settings.draft
        self._certificates = Certificates(settings.tls) if settings.tls else None
        self._timeout_ms = settings.timeout_ms
        self._channel: grpc.Channel | None = None
        #: Whether the service has taken the stream; set by the thread that receives.
        self._is_taken = threading.Event()
        self._is_open = False
        #: Why the last stream was not taken.
        self._refusal = ""
        self._requests: queue.SimpleQueue[pb.DraftStepRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.DraftStepResponse | None] = queue.SimpleQueue()
        self._step = 0
        #: Late steps in a row, and how often a stream was given up for them since the last proposal.
        self._num_late = 0
        self._num_times_late = 0
        self._was_lost = False
        self._retry_at = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open."""
        return self._is_open

    def connect(self) -> bool:
        """Open the stream if it is not open and the service can be reached; whether it is open. The first call waits
        for the service as long as a step does, later ones do not wait.
        """
        now = time.monotonic()
        if self._channel is None and now >= self._retry_at:
            is_first, self._retry_at = not self._retry_at, now + CALL_S
            self._channel, self._is_taken = self._open_channel(), threading.Event()
            self._requests, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            call = pb_grpc.DraftServiceStub(self._channel).DraftSteps(_sent(self._requests), wait_for_ready=True)
            given = call, self._answers, self._is_taken
            threading.Thread(target=self._receive, args=given, name="tandem-draft", daemon=True).start()
            if is_first and not self._is_taken.wait(self._timeout_ms / 1000):
                logger.warning("the draft service %s is not there yet; nothing is drafted until then", self.address)
        if self._channel is not None and not self._is_open:
            if self._is_taken.is_set():
                # An engine's log shows warnings of others; who read of the loss reads of the end of it.
                level = logging.WARNING if self._was_lost else logging.INFO
                logger.log(level, "the draft service %s is connected", self.address)
                self._is_open = True
            elif not self._answers.empty():  # it has ended
                self.close()
        return self._is_open

    def step(self, request: pb.DraftStepRequest) -> pb.DraftStepResponse | None:
        """The answer to one step; None where none came in time. The stream is open.

        Raises:
            Lost: the stream is over, or the last steps used up their time and brought no proposal.
        """
        self._step += 1
        request.step, request.timeout_ms = self._step, self._timeout_ms
        start = time.monotonic()
        self._requests.put(request)
        answer = self._answer(start + (self._timeout_ms + NETWORK_MS) / 1000)
        has_proposals = answer is not None and bool(answer.proposals)
        if has_proposals:
            self._num_times_late = 0
        if has_proposals or time.monotonic() - start < self._timeout_ms / 1000:
            self._num_late = 0
        else:
            self._note_late()
        return answer

    def _note_late(self) -> None:
        self._num_late += 1
        if self._num_late >= MAX_LATE_STEPS:
            self._num_times_late += 1
            pause_s = backoff_s(self._num_times_late, first_s=RETRY_S, last_s=MAX_RETRY_S)
            logger.warning(
                "the draft service %s had nothing within %d ms; it is asked again in %g s",
                self.address, self._timeout_ms, pause_s,
            )  # fmt: skip
            self._lose(pause_s)

    def close(self) -> None:
        """End the stream. The next step opens another one."""
        if self._channel is not None:
            self._requests.put(None)
            self._channel.close()
            self._channel, self._is_open = None, False

    def _open_channel(self) -> grpc.Channel:
        options = list(CHANNEL_OPTIONS)
        if self._certificates is None or self.address.startswith("unix"):
            return grpc.insecure_channel(self.address, options=options)
        self._certificates.renew()
        return grpc.secure_channel(self.address, self._certificates.channel_credentials(), options=options)

    def _answer(self, deadline: float) -> pb.DraftStepResponse | None:
        """The answer to the last step, by ``deadline`` in seconds of ``time.monotonic()``."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                break
            if answer is None:
                self._lose(CALL_S)
            elif answer.step == self._step:
                return answer
        return None

    def _lose(self, pause_s: float) -> NoReturn:
        self.close()
        self._num_late, self._was_lost = 0, True
        self._retry_at = time.monotonic() + pause_s
        raise Lost

    def _receive(
        self, call: Any, answers: queue.SimpleQueue[pb.DraftStepResponse | None], is_taken: threading.Event
    ) -> None:
        try:
            call.initial_metadata()  # comes when the service takes the stream, or when the call has failed
            if call.is_active():
                is_taken.set()
            for answer in call:
                self._refusal = ""
                answers.put(answer)
        except grpc.RpcError as error:
            details = _details(error)
            if error.code() is grpc.StatusCode.CANCELLED:  # by this side
                logger.debug("the stream to %s was closed", self.address)
            elif is_taken.is_set() and error.code() not in REFUSED:
                logger.warning("the draft service %s was lost, nothing is drafted: %s", self.address, details)
            elif details != self._refusal:  # said once, though it is called again and again
                self._refusal = details
                logger.warning("the draft service %s does not draft: %s", self.address, details)
        finally:
            answers.put(None)


def _sent(requests: queue.SimpleQueue[pb.DraftStepRequest | None]) -> Iterator[pb.DraftStepRequest]:
    while (request := requests.get()) is not None:
        yield request


def _details(error: grpc.RpcError) -> str:
    details = error.details() if isinstance(error, grpc.Call) else None
    return str(details or error)
