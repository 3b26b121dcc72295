"""The gRPC servicer of the target: message in, call, message out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from specdec import codec
from specdec.errors import InvalidRequest, TandemError, Unavailable, quote, status_of, text_of
from specdec.hidden_state_buffer import pieces
from specdec.process.cores import usable_cores
from specdec.rpc.call_span import current_span
from specdec.rpc.channel_pool import ChannelPool
from specdec.rpc.core_service import Context, CoreServicer
from specdec.rpc.draft_stream import DRAFT_METHOD, DraftStream, RemoteStream, Stream
from specdec.rpc.framed.address import framed_path
from specdec.rpc.framed.stream import FramedStream
from specdec.rpc.stream_writer import StreamWriter
from specdec.types import DraftOpened, HiddenStates, Proposal, Verdict
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import target_service_pb2_grpc as pb_grpc
from specdec.v1.types_pb2 import StateMapPart
from target_service.direct_draft import DirectDraft
from target_service.relayed_stream import RelayedStream
from target_service.trip_times import TripTimes

if TYPE_CHECKING:  # they load torch
    from specdec.tracing.spans import Span
    from target_service.core import TargetCore
    from target_service.session.session import Session


#: Seconds of one core between two messages of verdicts that nobody asked for (of multi-step decode, of rounds whose
#: draft the target asks), all sessions together. What a session decodes meanwhile leaves at once. A message costs
#: target, gateway and client about a tenth of it, on the cores that compute the model. With 4 ms instead of 2 a target
#: of 12 M parameters on two cores gives 1.15 times the tokens per second at 8 and at 32 sessions (plain decoding over
#: gRPC, medians of 5 alternating windows). Rounds that gather give 1.02 times at one session and 1.16 times at 8 (fixed
#: lengths, medians of 6), and take 90 µs of the gateway's CPU time a token in place of 131.
GATHER_CORE_S: Final = 0.004
#: Seconds between two messages of a session at most: a reader notices longer ones.
MAX_GATHER_S: Final = 0.2
#: And at least: tokens that come faster leave together. At one session a target of 12 M parameters on two cores gives
#: 1.12 times the tokens per second with 8 ms instead of 4, which is what it gives without gRPC (medians of alternating
#: windows). The 99th percentile of the time between two messages rises from 6.7 to 10.7 ms. With 16 ms right
#: predictions, of which the gateway hears later, are up to 1.4 times slower.
MIN_GATHER_S: Final = 0.008
#: The same for rounds of a draft that the target asks, in which the gateway proposes nothing. With 8 ms they take 1.4
#: to 1.7 times the CPU time of the gateway, and 1.08 times as long (bundled pair, one session, two cores; six pairs).
MIN_ROUNDS_GATHER_S: Final = 0.016
#: Drafts whose trip times are kept: a target has few, but replicas come and go.
MAX_TRIP_TIMES: Final = 64


class TargetServicer(CoreServicer["TargetCore"], pb_grpc.TargetServiceServicer):
    """Serves a :class:`TargetCore`."""

    noun = "target"

    def __init__(self, core: TargetCore | None = None) -> None:
        super().__init__(core)
        self._num_cores = usable_cores()
        #: By address.
        self._trip_times: dict[str, TripTimes] = {}
        self._channels = ChannelPool()

    async def close(self) -> None:
        """Close the connections to drafts."""
        await self._channels.close()

    async def Verify(  # type: ignore[override]  # written with context.write, which the stubs do not know
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: Context
    ) -> None:
        """One session. However the stream ends, its cache is released."""
        core = self.require_core()
        request = await context.read()
        if request is grpc.aio.EOF:
            return
        if request.WhichOneof("kind") != "open":
            raise InvalidRequest("the first message of a stream must be open", param="open")
        writer: StreamWriter[pb.VerifyResponse] = StreamWriter(context.write)
        asks_drafts = context.peer().startswith("unix:")
        requests = _Requests(core, writer, self._channels, self._trip_times if asks_drafts else None)
        draft = request.open.draft if requests.may_ask(request.open.draft.address) else None
        spec = codec.decode_open_target(request.open)
        try:
            session = await core.open(spec, partial(_pass_on, writer), partial(requests.begin, draft=draft))
        except BaseException:
            await requests.close()
            await writer.close()
            raise
        if (span := current_span()) is not None:
            _trace(span, session)
        packs = request.open.packs_logprobs
        opened = replace(
            session.opened,
            asks_drafts=asks_drafts,
            asks_remote_drafts=asks_drafts,
            asks_relayed_drafts=True,
            opens_draft=draft is not None,
        )
        writer.post(pb.VerifyResponse(opened=codec.encode_target_opened(opened, packs_logprobs=packs)))
        verdicts = [session.first]
        reading = asyncio.create_task(requests.read(context), name="target-stream")
        reading.add_done_callback(lambda _: session.end())
        try:
            while True:
                least_s = MIN_GATHER_S if session.on_committed is None else MIN_ROUNDS_GATHER_S
                until_ns = time.perf_counter_ns() + gather_time_ns(core.num_going_on, self._num_cores, least_s)
                for verdict in verdicts[:-1]:
                    writer.post(_response(writer, verdict, packs_logprobs=packs))
                await writer.send(_response(writer, verdicts[-1], packs_logprobs=packs))
                verdicts = await session.receive_all(until_ns)
        except TandemError:
            if not reading.done():
                raise
            await reading  # what ended the session: an error of its own, or just the end of the requests
        finally:
            reading.cancel()
            await requests.close()
            await session.close()
            await writer.close()
            with suppress(asyncio.CancelledError, Exception):  # the stream is over, whatever ended it
                await reading

    async def PutStateMap(
        self, request_iterator: AsyncIterator[StateMapPart], context: Context
    ) -> pb.PutStateMapResponse:
        """Take the first layer of a draft's head."""
        await self.require_core().put_state_map(request_iterator)
        return pb.PutStateMapResponse()


def gather_time_ns(num_sessions: int, num_cores: int, least_s: float) -> int:
    """Nanoseconds between two messages of each of ``num_sessions`` whose verdicts nobody asks for, at most."""
    return round(1e9 * min(MAX_GATHER_S, max(least_s, GATHER_CORE_S / num_cores * (num_sessions - 1))))


def _trace(span: Span, session: Session) -> None:
    """Record the phases up to the first token; then it decodes."""
    now_ns, opened = time.perf_counter_ns(), session.opened
    span.phase("queue", start_ns=span.start_ns)
    span.phase("prefill", start_ns=max(span.start_ns, now_ns - opened.prefill_ns))
    span.phase("decode", start_ns=now_ns)
    span.set(
        {
            "tandem.prompt_tokens": session.spec.prompt_len,
            "tandem.cached_tokens": opened.num_cached_tokens,
            "tandem.k": session.spec.num_speculative_tokens,
            "tandem.epoch": session.spec.epoch,
        }
    )


def _pass_on(writer: StreamWriter[pb.VerifyResponse], states: HiddenStates) -> None:
    """Send hidden states before the verdict they belong to, in messages of bounded size."""
    for piece in pieces([states]):
        writer.post(pb.VerifyResponse(hidden_states=codec.encode_hidden_states(piece)))


def _response(writer: StreamWriter[pb.VerifyResponse], verdict: Verdict, *, packs_logprobs: bool) -> pb.VerifyResponse:
    """A verdict as a message, once the hidden states that do not fit into it are sent."""
    if len(verdict.hidden_states) > 1:
        *earlier, last = verdict.hidden_states
        for states in earlier:
            _pass_on(writer, states)
        verdict = replace(verdict, hidden_states=(last,))
    return pb.VerifyResponse(verdict=codec.encode_verdict(verdict, packs_logprobs=packs_logprobs))


class _Requests:
    """What the gateway asks of one session. The stream's handler sends the verdicts."""

    #: From :meth:`begin` on.
    _session: Session

    def __init__(
        self,
        core: TargetCore,
        writer: StreamWriter[pb.VerifyResponse],
        channels: ChannelPool,
        trip_times: dict[str, TripTimes] | None,
    ) -> None:
        """``trip_times``: those of drafts by their addresses; None: the session may connect to no draft."""
        self._core = core
        self._writer = writer
        self._channels = channels
        self._trip_times = trip_times
        self._draft: DirectDraft | None = None
        self._draft_epoch = 0
        #: What the gateway passes on to a draft without an address, and back.
        self._relayed: RelayedStream | None = None

    def begin(self, session: Session, *, draft: pb.OpenDraft | None) -> None:
        """The session is admitted; open a draft for it at once."""
        self._session = session
        if draft is not None:
            self._begin_draft(draft)

    def may_ask(self, address: str) -> bool:
        """Whether the target connects to a draft there for this session."""
        is_known = framed_path(address) is not None or (":" in address and not address.startswith("unix"))
        return is_known and self._trip_times is not None

    async def read(self, context: Context) -> None:
        """Pass requests on to the session until the stream ends."""
        while (request := await context.read()) is not grpc.aio.EOF:
            kind = request.WhichOneof("kind")
            if kind is None or kind == "open":
                raise InvalidRequest("only the first message of a stream is open; then send round or multi_step_decode")
            message = getattr(request, kind)
            if kind == "relayed":
                if self._relayed is not None:
                    self._relayed.take(message)
            elif message.epoch != self._session.spec.epoch:
                self._core.count_stale()
            elif kind == "open_draft":
                await self._open_draft(message)
            else:
                self._ask(kind, message)
            await asyncio.sleep(0)  # the step begins before the next read

    async def close(self) -> None:
        """End the draft's session."""
        if self._draft is not None:
            await self._draft.close()

    def draft_opened(self, opened: DraftOpened) -> None:
        """Tell the gateway that the draft is open."""
        self._writer.post(pb.VerifyResponse(draft_opened=codec.encode_draft_opened(opened)))

    def draft_lost(self, error: TandemError) -> None:
        """Tell the gateway why the draft is not asked any more."""
        lost = pb.DraftLost(epoch=self._draft_epoch, code=status_of(error).grpc, text=text_of(error))
        self._writer.post(pb.VerifyResponse(draft_lost=lost))

    def _ask(self, kind: str, message: Any) -> None:
        if kind == "multi_step_decode":
            self._session.multi_step_decode(message.committed_len, message.num_tokens)
        elif kind == "round":
            self._session.offer(_proposal_of(message))
        elif self._draft is not None:
            self._draft.draft(message.num_draft_tokens)

    async def _open_draft(self, message: pb.OpenDraft) -> None:
        await self.close()
        if message.address:
            self._begin_draft(message)
        else:
            self._begin_relayed(message)

    def _begin_draft(self, message: pb.OpenDraft) -> None:
        address, path = message.address, framed_path(message.address)
        if self._trip_times is None or not self.may_ask(address):
            raise InvalidRequest(
                f"the draft {quote(address)} cannot be asked by this target: the target must be reached over a Unix"
                " socket, and the draft at unix:/path or host:port",
                param="address",
            )
        self._draft_epoch = message.session.epoch

        async def connect(token_ids: tuple[int, ...]) -> DraftStream:
            stream: Stream
            metadata = tuple(message.trace_headers.items())
            if path is None:
                stream = RemoteStream(self._channels, await self._channels.take(address), address, metadata)
            else:
                try:
                    stream = await FramedStream.open(path, DRAFT_METHOD, draft_pb.DraftResponse.FromString, metadata)
                except OSError as error:
                    raise Unavailable(f"the socket {path} cannot be reached: {error.strerror or error}") from None
            return DraftStream(stream, _opening(message, token_ids))

        times = self._trip_times.pop(address, None) or TripTimes(is_far=path is None, is_fixed=path is not None)
        self._trip_times[address] = times  # the newest is the last one
        if len(self._trip_times) > MAX_TRIP_TIMES:
            del self._trip_times[next(iter(self._trip_times))]
        timeout_s, num_draft_tokens = message.timeout_ms / 1e3, message.num_draft_tokens
        self._draft = DirectDraft(self._session, connect, self, timeout_s, times, num_draft_tokens=num_draft_tokens)

    def _begin_relayed(self, message: pb.OpenDraft) -> None:
        """The same for a draft behind the gateway. Nobody vouches for it: it changes no text and delays none."""
        self._draft_epoch = message.session.epoch
        self._relayed = stream = RelayedStream(
            self._draft_epoch, lambda asked: self._writer.post(pb.VerifyResponse(relayed=asked))
        )

        async def connect(token_ids: tuple[int, ...]) -> DraftStream:
            if not self._session.spec.is_draft_invariant:
                await stream.close()
                raise InvalidRequest("a draft without an address may change no text: use temperature 0 or coupled")
            draft = await DraftStream.open(stream, _opening(message, token_ids))
            if not draft.opened.streams:
                await draft.close()
                raise InvalidRequest("the draft streams no chains, and nobody waits for it; attach a draft model")
            return draft

        times = TripTimes(is_far=True, is_fixed=True)
        self._draft = DirectDraft(self._session, connect, self, message.timeout_ms / 1e3, times)


def _opening(message: pb.OpenDraft, token_ids: tuple[int, ...]) -> draft_pb.DraftRequest:
    message.session.token_ids.extend(token_ids)
    return draft_pb.DraftRequest(open=message.session)


def _proposal_of(message: pb.Round) -> Proposal:
    if not message.HasField("proposal"):
        return Proposal(message.epoch, message.committed_len, ())
    proposal = codec.decode_proposal(message.proposal)
    if proposal.base_len != message.committed_len:
        raise InvalidRequest(
            f"a round from committed length {message.committed_len} carries a proposal for {proposal.base_len}",
            param="committed_len",
        )
    return proposal
