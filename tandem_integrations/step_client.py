"""One stream to a draft service, for code that is not asynchronous: a step's request out, its answer in."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import grpc

from specdec.rpc.channel import CHANNEL_OPTIONS
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import draft_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

#: Seconds after a failure before the service is tried again.
RETRY_S: Final = 1.0
#: Milliseconds that the answer of a step may be delayed, above the time the service gets for it.
NETWORK_MS: Final = 20


class Lost(Exception):
    """The stream is over, and its sessions with it."""


class StepClient:
    """The stream is opened at the first step, because engines fork and spawn, and again after a failure."""

    def __init__(self, address: str, timeout_ms: int) -> None:
        self.address = address
        self._timeout_ms = timeout_ms
        self._channel: grpc.Channel | None = None
        self._requests: queue.SimpleQueue[pb.DraftStepRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.DraftStepResponse | None] = queue.SimpleQueue()
        self._step = 0
        self._retry_at = 0.0

    def connect(self) -> bool:
        """Open the stream, if it is not open; False for a moment after a failure."""
        if self._channel is None and time.monotonic() >= self._retry_at:
            self._channel = grpc.insecure_channel(self.address, options=list(CHANNEL_OPTIONS))
            self._requests, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            call = pb_grpc.DraftServiceStub(self._channel).DraftSteps(_sent(self._requests))
            threading.Thread(target=self._receive, args=(call, self._answers), name="tandem-draft", daemon=True).start()
        return self._channel is not None

    def step(self, request: pb.DraftStepRequest) -> pb.DraftStepResponse | None:
        """The answer to one step; None where none came in time. The stream is open.

        Raises:
            Lost: the stream is over.
        """
        self._step += 1
        request.step, request.timeout_ms = self._step, self._timeout_ms
        self._requests.put(request)
        deadline = time.monotonic() + (self._timeout_ms + NETWORK_MS) / 1000
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                break
            if answer is None:
                self.close()
                self._retry_at = time.monotonic() + RETRY_S
                raise Lost
            if answer.step == self._step:
                return answer
        return None

    def close(self) -> None:
        """End the stream. The next step opens another one."""
        if self._channel is not None:
            self._requests.put(None)
            self._channel.close()
            self._channel = None

    def _receive(self, call: Any, answers: queue.SimpleQueue[pb.DraftStepResponse | None]) -> None:
        try:
            for answer in call:
                answers.put(answer)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                logger.warning("the draft service %s was lost: %s", self.address, _details(error))
        answers.put(None)


def _sent(requests: queue.SimpleQueue[pb.DraftStepRequest | None]) -> Iterator[pb.DraftStepRequest]:
    while (request := requests.get()) is not None:
        yield request


def _details(error: grpc.RpcError) -> str:
    details = error.details() if isinstance(error, grpc.Call) else None
    return str(details or error)
