"""The call of a client that brings a draft: its messages, at a bounded rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from gateway.access.caller import current_caller
from gateway.backends.attachments import MAX_ANSWER_BYTES, Attachments
from specdec import codec
from specdec.errors import InvalidRequest, Overloaded, TandemError, status_of, text_of
from specdec.rpc.call import STATUS_S, Call
from specdec.rpc.channel import MAX_PREDICTION_BYTES
from specdec.rpc.stream_writer import StreamWriter
from specdec.v1 import generation_service_pb2 as pb

#: Seconds of one attachment that a message and a byte take. What comes faster stays in the network: the loop reads a
#: message in 0.1 ms. 16 sessions that stream at 30 steps a second send 480 messages.
MESSAGE_S: Final = 1 / 500
BYTE_S: Final = 1 / 2**20
#: Seconds that may be used in advance by answers, and by messages too large for one: a prediction holds up no proposal.
BURST_S: Final = 0.2
PREDICTION_BURST_S: Final = 2 * MAX_PREDICTION_BYTES * BYTE_S
#: Questions that wait for a client which does not read.
MAX_WAITING: Final = 1024


async def serve_attachment(attachments: Attachments, call: Call) -> None:
    """Serve the call until either side ends it.

    Raises:
        InvalidRequest: a message may not come, or is too large.
        Overloaded: a limit is reached.
    """
    messages = paced(call)
    raw = await anext(messages, b"")
    first = pb.AttachDraftRequest.FromString(raw)
    if first.WhichOneof("kind") != "attach":
        raise InvalidRequest("the first message of a call must be attach", param="attach")
    info = codec.decode_model_info(first.attach.draft) if first.attach.HasField("draft") else None
    writer: StreamWriter[pb.AttachDraftResponse] = StreamWriter(call.write)

    def send(message: pb.AttachDraftResponse) -> None:
        if writer.num_waiting < MAX_WAITING:
            writer.post(message)
        else:
            call.cancel(Overloaded("the client does not read what its draft is asked"))

    try:
        with attachments.join(current_caller(), first.attach.token, info, send, call.cancel) as attachment:
            send(pb.AttachDraftResponse(attached=pb.Attached()))
            async for raw in messages:
                attachment.take(pb.AttachDraftRequest.FromString(raw), len(raw))
    except asyncio.CancelledError:
        if call.end is not None:
            await _say_why(call.end, writer)
        raise
    finally:
        await writer.close()


async def _say_why(end: TandemError, writer: StreamWriter[pb.AttachDraftResponse]) -> None:
    """Tell the client before the call ends, and let it hang up: gRPC tells one whose write fails no status."""
    retry_after_s = end.retry_after_s if isinstance(end, Overloaded) else 0.0
    ended = pb.AttachmentEnded(code=status_of(end).grpc, text=text_of(end), retry_after_s=retry_after_s)
    writer.post(pb.AttachDraftResponse(ended=ended))
    await asyncio.sleep(STATUS_S)


async def paced(call: Any) -> AsyncIterator[bytes]:
    """The messages, none of them read before its time."""
    due_s = {BURST_S: 0.0, PREDICTION_BURST_S: 0.0}
    while (raw := await call.read()) is not grpc.aio.EOF:
        burst_s = BURST_S if len(raw) <= MAX_ANSWER_BYTES else PREDICTION_BURST_S
        due_s[burst_s] = max(due_s[burst_s], time.monotonic()) + MESSAGE_S + len(raw) * BYTE_S
        yield raw
        if (wait_s := due_s[burst_s] - time.monotonic() - burst_s) > 0:
            await asyncio.sleep(wait_s)
