"""A draft that its client brings to a gateway: the draft service's own sessions, over a call that the client makes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import grpc.aio

from draft_service.core import DraftCore
from draft_service.servicer import DraftServicer
from specdec import codec
from specdec.backoff import backoff_s
from specdec.errors import Cancelled, InternalError, Overloaded, TandemError, Unavailable, text_of
from specdec.rpc.channel import MAX_PREDICTION_BYTES
from specdec.rpc.session_stream import SessionStream
from specdec.rpc.status import RETRY_AFTER_KEY, rebuild_error
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import generation_service_pb2 as pb

logger = logging.getLogger(__name__)

#: Seconds before the gateway is dialed again; doubled with every failure in a row.
FIRST_BACKOFF_S: Final = 0.5
LAST_BACKOFF_S: Final = 10.0
#: Errors after which the gateway may take the same draft later; others would come again.
_PASSING: Final = (Unavailable, Overloaded, Cancelled, InternalError)
#: Seconds between two looks at the predicted file, and bytes of it that fit into a message.
LOOK_S: Final = 0.2
MAX_TEXT_BYTES: Final = MAX_PREDICTION_BYTES - 64


class AttachedDraft:
    """Serves a draft, a prediction or both to one gateway, over one call after the other."""

    def __init__(
        self,
        dial: Callable[[], Any],
        address: str,
        token: str,
        *,
        core: DraftCore | None = None,
        prediction: Path | None = None,
    ) -> None:
        """``dial`` begins a call of ``GenerationService.AttachDraft`` at ``address``. ``core`` drafts; the text of the
        file ``prediction`` is sent now and whenever it changes.
        """
        self._dial = dial
        self._address = address
        self._token = token
        self._core = core
        self._prediction = prediction
        self._num_failures = 0
        #: Set while the gateway has accepted the attachment.
        self.attached = asyncio.Event()

    async def run(self) -> None:
        """Serve for ever; a lost call is made again.

        Raises:
            TandemError: the gateway refuses the attachment.
        """
        while True:
            try:
                await self._serve()
            except _PASSING as error:
                self._num_failures += 1
                pause_s = backoff_s(self._num_failures, first_s=FIRST_BACKOFF_S, last_s=LAST_BACKOFF_S)
                if isinstance(error, Overloaded):
                    pause_s = max(pause_s, error.retry_after_s)
                logger.warning("not attached to %s: %s; trying again in %.1f s", self._address, error, pause_s)
                await asyncio.sleep(pause_s)

    async def _serve(self) -> None:
        stream: SessionStream[pb.AttachDraftRequest, pb.AttachDraftResponse] = SessionStream(self._dial)
        calls: dict[int, RelayedCall] = {}
        tasks: set[asyncio.Task[None]] = set()
        try:
            draft = None if self._core is None else codec.encode_model_info(await self._core.info())
            await stream.exchange(pb.AttachDraftRequest(attach=pb.Attachment(token=self._token, draft=draft)))
            logger.info("attached to %s", self._address)
            self._num_failures = 0
            self.attached.set()
            if self._prediction is not None:
                tasks.add(asyncio.create_task(self._follow(self._prediction, stream)))
            while True:
                message = await stream.receive()
                if message.HasField("ended"):
                    ended = message.ended
                    raise rebuild_error(ended.code, ended.text, {RETRY_AFTER_KEY: str(ended.retry_after_s)})
                relayed = message.relayed
                number = relayed.session
                if number not in calls and relayed.request.WhichOneof("kind") == "open":
                    calls[number] = RelayedCall(number, stream.post)
                    tasks.add(asyncio.create_task(self._draft(calls[number])))
                if call := calls.get(number):
                    call.take(relayed)
                    if not relayed.HasField("request"):
                        del calls[number]
                tasks = {task for task in tasks if not task.done()}
        finally:
            self.attached.clear()
            await stream.close()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _draft(self, call: RelayedCall) -> None:
        """Serve one session, as the draft service does."""
        error: Exception | None = None
        try:
            await DraftServicer(self._core).Draft(cast("Any", None), cast("Any", call))  # it reads by the context
        except TandemError as caught:
            error = caught
        except Exception as caught:
            logger.exception("a session failed unexpectedly")
            error = caught
        if error is not None:
            lost = draft_pb.RelayedResponse(session=call.number, error=text_of(error))
            call.send(pb.AttachDraftRequest(relayed=lost))

    async def _follow(self, path: Path, stream: SessionStream[pb.AttachDraftRequest, pb.AttachDraftResponse]) -> None:
        """Send the text of a file whenever it changes."""
        sent: str | None = None
        while True:
            text = await asyncio.to_thread(_read, path)
            if text != sent:
                stream.post(pb.AttachDraftRequest(prediction=text))
                sent = text
            await asyncio.sleep(LOOK_S)


def _read(path: Path) -> str:
    """The text of a file, as much as may be sent; empty where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode(errors="ignore")
    except OSError:
        return ""


class RelayedCall:
    """The context of one session's call, for :class:`DraftServicer`."""

    def __init__(self, number: int, send: Callable[[pb.AttachDraftRequest], None]) -> None:
        """``number`` of the session; ``send`` sends a message of the client's call."""
        self.number = number
        self.send = send
        self._arrived: asyncio.Queue[draft_pb.DraftRequest | None] = asyncio.Queue()

    def take(self, relayed: draft_pb.RelayedRequest) -> None:
        """A message of the session came."""
        self._arrived.put_nowait(relayed.request if relayed.HasField("request") else None)

    async def read(self) -> Any:
        """The next message, or ``grpc.aio.EOF``."""
        message = await self._arrived.get()
        return grpc.aio.EOF if message is None else message

    async def write(self, response: draft_pb.DraftResponse) -> None:
        """Send a message."""
        relayed = draft_pb.RelayedResponse(session=self.number, response=response)
        self.send(pb.AttachDraftRequest(relayed=relayed))
