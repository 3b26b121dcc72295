"""Generation: the one module behind REST, gRPC and the offline API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from gateway.access.buffers import RequestBuffer, RequestBuffers
from gateway.access.caller import current_caller
from gateway.access.request_id import current_request_id
from gateway.access.session_hint import current_attachment
from gateway.access.usage import Clients
from gateway.backends.attachments import Attachment, Attachments
from gateway.decoding.context import DecodingContext
from gateway.decoding.loop import Decoding, Interruption
from gateway.decoding.request import DecodingRequest
from gateway.merging import merge
from gateway.pacing.lookup_pacer import LookupPacer
from gateway.pacing.pace import Pacer
from gateway.pacing.stats import PacingStatsCollector
from gateway.pacing.target_pacer import TargetPacer
from gateway.placement.prefix_routes import hash_prefixes
from gateway.placement.routing import Router
from gateway.requests.call_trace import SampleTrace, trace_call, trace_refusal
from gateway.requests.draft_methods import DraftMethods
from gateway.requests.limits import body_limit, check_request
from gateway.requests.preparation import Preparation
from gateway.requests.prompt import check_prediction, encode_prediction, encode_prompt, read_prediction
from gateway.requests.types import GenerationChunk, GenerationRequest, GenerationResult, PromptReport, Sample
from gateway.samples import SampleAssembler
from gateway.telemetry.load_collector import LoadCollector
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.vllm_names import VllmNames
from gateway.text.processor import TextProcessor
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import TextTokenizer
from gateway.workers.pool import WorkerPool
from gateway.workers.threads import FairThreads
from specdec.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Unavailable, quote
from specdec.lookup.prediction import PredictionLookup
from specdec.scheduling.admission import Admission
from specdec.settings import GatewaySettings
from specdec.structured_outputs import asked_by
from specdec.types import ModelInfo

if TYPE_CHECKING:  # it loads OpenTelemetry
    from specdec.tracing.spans import Tracing

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longer texts are tokenized on a thread: the event loop is never held for more than about a millisecond.
SHORT_TEXT: Final = 4096
#: Larger requests, in bytes, are read by workers: parsing holds Python's lock, whatever the thread.
SMALL_REQUEST: Final = 8192
GOING_DOWN: Final = "the gateway is shutting down; use another one"


def _take() -> bool:
    """A slot; all are the same."""
    return True


class Generation:
    """Text from a router's targets and drafts. All methods belong to one event loop."""

    def __init__(
        self,
        router: Router,
        settings: GatewaySettings | None = None,
        tokenizer: TextTokenizer | None = None,
        *,
        make_pacer: Callable[[LookupPacer], Pacer] = TargetPacer,
        workers: WorkerPool | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """``workers`` hold a :class:`TextProcessor` of the same settings; None: large requests hold up the loop."""
        self._tracing = tracing
        self.router = router
        self.settings = settings or GatewaySettings()
        self.tokenizer = tokenizer
        self.metrics = GatewayMetrics(self._model_name)
        self.context = DecodingContext(router, self.settings, make_pacer=make_pacer)
        self.metrics.registry.register(PacingStatsCollector(lambda: self.context.pacing_stats))
        self.clients = Clients(self.metrics.refuse)
        self.attachments = Attachments(self.clients, router, body_limit(self.settings))
        self.buffers = RequestBuffers(self.settings.max_buffered_bytes)
        self.request_log = RequestLog(self.metrics, enabled=self.settings.log_requests)
        self.num_requests = 0
        self._admission: Admission[bool] = Admission(
            max_open=self.settings.max_concurrent_sequences,
            max_waiting=self.settings.max_queued_requests,
            max_wait_s=self.settings.max_queue_wait_s,
            undo=lambda _: None,
            describe=self._describe,
        )
        self.metrics.registry.register(
            LoadCollector(
                router,
                num_running=lambda: self.num_running,
                num_waiting=lambda: self.num_waiting,
                has_engines=self.settings.has_engines,
            )
        )
        self.metrics.registry.register(VllmNames(self.metrics))
        #: New requests are refused; open ones continue.
        self.draining = False
        self.draft_methods = DraftMethods(self.context)
        self._preparation = Preparation(self.settings, tokenizer, self.draft_methods)
        self.text = TextProcessor(tokenizer, self.settings)
        self._workers = workers
        if problem := self.text.replies.problem:
            logger.warning("an example conversation cannot be rendered: %s", problem)
        #: One thread: all chats share the process of the chat template.
        self._chat_reader = FairThreads(
            1,
            "requests",
            max_waiting=self.settings.max_concurrent_sequences + self.settings.max_queued_requests,
            max_wait_s=self.settings.max_queue_wait_s,
        )

    @property
    def max_body_bytes(self) -> int:
        """Bytes of the largest body or gRPC message that is read."""
        try:
            return body_limit(self.settings, self.router.model().max_model_len)
        except Unavailable:  # such a request is refused for that
            return body_limit(self.settings)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names the model answers to; empty while no target has answered and no name was set."""
        if self.settings.served_model_name:
            return self.settings.served_model_name
        try:
            return (self.router.model().name,)
        except Unavailable:
            return ()

    @property
    def num_running(self) -> int:
        """Sequences in progress."""
        return self._admission.num_open

    @property
    def num_waiting(self) -> int:
        """Requests that wait for that."""
        return self._admission.num_waiting

    def check_model(self, name: str) -> str:
        """The served name behind a requested one; empty means the first.

        Raises:
            NotFound: no model of that name is served.
            Unavailable: no target has answered yet.
        """
        names = self.model_names
        if not names:
            self.router.model()
        if name and name not in names:
            raise NotFound(f"model {quote(name)} does not exist here; this server has {', '.join(map(repr, names))}")
        return name or names[0]

    def check_tokenizer(self) -> None:
        """Warn when the tokenizer here is not the target's: every text would be read as other tokens."""
        wanted = self.router.model().tokenizer_fingerprint
        if self.tokenizer is not None and wanted and self.tokenizer.fingerprint() != wanted:
            logger.warning(
                "the gateway's tokenizer is not that of target %r; give --tokenizer the target's own folder",
                self.router.model().name,
            )

    def drain(self) -> None:
        """Refuse new requests and those that wait; those in progress continue."""
        self.draining = True
        self.attachments.end(Unavailable(GOING_DOWN))
        self._admission.refuse(Unavailable(GOING_DOWN))

    @asynccontextmanager
    async def admission(self, *requests: GenerationRequest) -> AsyncIterator[Sequence[GenerationRequest]]:
        """Hold slots for the sequences of one call; this may wait. The requests then have the time that is left to
        them.

        Raises:
            InvalidRequest: there are more sequences than slots.
            Overloaded: no slot came free, too many are waiting, or a limit of the caller is reached.
            DeadlineExceeded: the time of a request passed while it waited.
            Unavailable: the gateway is shutting down.
        """
        if self._tracing is None:
            async with self._admit(requests) as admitted:
                yield admitted
            return
        request_id = requests[0].request_id or current_request_id()
        all_params = [request.params for request in requests]
        with trace_call(self._tracing, request_id, self._model_name(), all_params) as call:
            async with self._admit(requests) as admitted:
                if call is not None:
                    call.admitted()
                yield [replace(each, trace=call) for each in admitted]

    @asynccontextmanager
    async def _admit(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Sequence[GenerationRequest]]:
        if self.draining:
            raise Unavailable(GOING_DOWN)
        num_sequences, limit = sum(request.params.n for request in requests), self.settings.max_concurrent_sequences
        if num_sequences > limit:
            raise InvalidRequest(
                f"the request has {num_sequences} sequences; {limit} are allowed (--max-concurrent-sequences); lower n"
                " or send fewer prompts",
                param="n",
            )
        caller, timeouts_s = current_caller(), [each.timeout_s for each in requests if each.timeout_s is not None]
        with self.clients.request(caller, num_sequences):
            begun_s = time.monotonic()
            try:
                async with asyncio.timeout(min(timeouts_s, default=None)):
                    await self._admission.admit(_take, client=caller.client, num_slots=num_sequences)
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline passed while it waited for a slot") from None
            waited_s = time.monotonic() - begun_s
            self.num_requests += 1
            try:
                yield [
                    each if each.timeout_s is None else replace(each, timeout_s=each.timeout_s - waited_s)
                    for each in requests
                ]
            finally:
                self.num_requests -= 1
                self._admission.leave(caller.client, num_sequences)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """The chunks of all samples as they come; each sample's last one has ``final``. Use it within ``aclosing``.

        Raises:
            InvalidRequest, NotFound: before the first chunk, when the request is impossible.
            DeadlineExceeded, Overloaded, Unavailable: at any point.
        """
        started = time.monotonic()
        self.check_model(request.model)
        timeouts_s = (request.timeout_s, self.settings.request_timeout_s)
        timeout_s = min((each for each in timeouts_s if each is not None), default=None)
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        request = replace(request, attachment=request.attachment or current_attachment())
        with_tools = request.reply is not None and request.reply.structured_outputs is not None
        name = "tools" if with_tools else request.outputs_field
        with asked_by(name):
            check_request(request, self.settings, self.router.model())
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await self.encode(prompt, add_special_tokens=request.add_special_tokens)
        caller = current_caller()
        attachment, attached = self.attachments.find(caller, request.attachment) or (None, None)
        prediction = await self._prediction_of(request.prediction, attachment)
        samples = self._preparation.prepare(
            request, prompt, prediction, self.router.model(), deadline=deadline, attached=attached
        )
        if (drafters := samples[0].drafters) is not None:
            await self.context.make_lookups(drafters.lookups, deadline)
        if len(self.router.targets) > 1:
            prefixes = await hash_prefixes(f"{caller.key}\n{request.cache_salt}", samples[0].prompt)
            samples = [replace(sample, prefixes=prefixes) for sample in samples]
        request_id = request.request_id or current_request_id()
        stops = StopStrings(request.params.stop)
        num_tokens = len(prompt) + sum(sample.params.max_tokens or 0 for sample in samples)
        with (
            self.request_log.request(request_id) as record,
            self.clients.tokens(caller, num_tokens) as tokens,
            asked_by(name),
        ):
            tokens.num_used = len(prompt)
            streams = [
                self._sample(request, request_id, index, sample, stops=stops, started=started)
                for index, sample in enumerate(samples)
            ]
            async with aclosing(merge(streams)) as chunks:
                async for chunk in chunks:
                    tokens.num_used += len(chunk.token_ids)
                    if record is not None:
                        record.add(chunk)
                    yield chunk

    def trace_refusal(self) -> AbstractContextManager[None]:
        """Read a call for text within this: where that fails, the call has a span all the same."""
        return nullcontext() if self._tracing is None else trace_refusal(self._tracing, self._model_name())

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """All samples, finished. Raises what :meth:`stream` does."""
        samples = [Sample(index) for index in range(request.params.n)]
        prompt, request_id, first_s = PromptReport(()), "", None
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                first_s = first_s or time.time()
                samples[chunk.index].add(chunk)
                prompt, request_id = chunk.prompt or prompt, chunk.request_id
        return GenerationResult(request_id, prompt, samples, first_s)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt; raises what :func:`encode_prompt` does."""
        encode = partial(encode_prompt, self.text, text, self.router.model(), add_special_tokens=add_special_tokens)
        return encode() if len(text) <= SHORT_TEXT else await asyncio.to_thread(encode)

    async def _prediction_of(
        self, given: str | Sequence[int], attachment: Attachment | None
    ) -> PredictionLookup | None:
        """A request's own prediction, or that of its attachment: it is tokenized once, what the context cannot hold is
        left out, and it refuses no request.
        """
        text = given or (attachment.prediction if attachment is not None else "")
        if not text or isinstance(text, PredictionLookup):
            return text or None
        if not isinstance(text, str):
            token_ids = text
            return PredictionLookup(lambda: token_ids)
        if not given:
            text = text[: self.settings.max_characters_per_token * self.router.model().max_model_len]
        try:
            prediction = await self._read_prediction(text)
        except (Overloaded, InvalidRequest):
            if given:
                raise
            return None
        if attachment is not None and not given:
            attachment.keep(text, prediction)
        return prediction

    async def _read_prediction(self, text: str) -> PredictionLookup:
        """A small prediction is tokenized when it is needed, a large one by a worker before."""
        model = self.router.model()
        check_prediction(self.text, text, model)
        raw = text.encode()
        if len(raw) <= SMALL_REQUEST:
            return PredictionLookup(partial(encode_prediction, self.text, text, model))
        with self.buffers.request(current_caller().client) as buffer:
            buffer.add(len(raw))
            token_ids = await self.read(read_prediction, raw, buffer, has_chat=False)
        return PredictionLookup(lambda: token_ids)

    async def read(
        self,
        function: Callable[[TextProcessor, bytes, ModelInfo, bool], T],
        raw: bytes,
        buffer: RequestBuffer,
        *,
        has_chat: bool = True,
    ) -> T:
        """``function(text, raw, model, is_large)``, in a worker where ``raw`` is large. ``buffer`` counts ``raw``; with
        ``has_chat`` the chat template may be rendered, for which a thread waits. Both queues are fair by client.

        Raises:
            Overloaded: too many requests wait to be read.
        """
        model = self.router.model()
        if len(raw) <= SMALL_REQUEST or self._workers is None:
            if not has_chat:
                return function(self.text, raw, model, False)
            return await self._chat_reader.run(
                function, self.text, raw, model, False, client=buffer.client, on_begin=buffer.keep_until
            )
        return await self._workers.run(function, raw, model, True, client=buffer.client, on_begin=buffer.keep_until)

    async def _sample(
        self,
        request: GenerationRequest,
        request_id: str,
        index: int,
        sample: DecodingRequest,
        *,
        stops: StopStrings,
        started: float,
    ) -> AsyncGenerator[GenerationChunk, None]:
        trace = None
        if request.trace is not None:
            trace = request.trace.sample(index)
            sample = replace(sample, trace_headers=trace.headers)
        decoding = Decoding(self.context, sample)
        assembler = SampleAssembler(
            request_id,
            index,
            request.params,
            decoding,
            tokenizer=self.tokenizer,
            stops=stops,
            started=started,
            with_metrics=request.return_token_metrics,
            replies=None if request.reply is None else self.text.replies,
            reply=request.reply,
        )
        outcome, first, last = "cancelled", 0.0, 0.0
        finish_reason: str | None = None
        key = current_caller().key
        self.metrics.running.inc()
        try:
            async with aclosing(_chunks(decoding, assembler, trace)) as chunks:
                async for chunk in chunks:
                    now = time.monotonic()
                    if last:
                        self.metrics.itl.observe((now - last) / max(len(chunk.token_ids), 1))
                    else:
                        self.metrics.ttft.observe(now - started)
                        first, opened = now, decoding.opened
                        if opened is not None and not self.settings.has_engines:  # which do not tell
                            self.metrics.queue.observe(opened.queue_ns / 1e9)
                            self.metrics.prefill.observe(opened.prefill_ns / 1e9)
                    last = now
                    if chunk.final is not None:
                        outcome = finish_reason = str(chunk.final.reason)
                        self.metrics.latency.observe(now - started)
                        self.metrics.decode.observe(now - first)
                    yield chunk
                    if chunk.final is not None:
                        return
        except Exception as error:
            outcome = type(error).__name__
            if trace is not None:
                trace.fail(error)
            raise
        finally:
            self.metrics.running.dec()
            if trace is not None:
                usage = assembler.usage
                trace.end(finish_reason, usage.prompt_tokens, usage.completion_tokens, decoding.metrics)
            opened = decoding.opened
            self.metrics.finish(
                outcome,
                decoding.metrics,
                None if opened is None else assembler.usage,
                None if opened is None else opened.rule,
                key=key,
            )

    def _model_name(self) -> str:
        """For metrics; empty while it is not known."""
        return next(iter(self.model_names), "")

    def _describe(self) -> str:
        num_open, limit = self._admission.num_open, self.settings.max_concurrent_sequences
        return f"the gateway is full: {num_open} of {limit} sequences are in progress"


async def _chunks(
    decoding: Decoding, assembler: SampleAssembler, trace: SampleTrace | None
) -> AsyncGenerator[GenerationChunk, None]:
    """The chunks of a sample; verdicts that came together make one."""
    async with aclosing(decoding.verdicts()) as verdicts:
        try:
            async for verdict in verdicts:
                if trace is not None and not isinstance(verdict, Interruption):
                    trace.record(verdict, decoding.answered, decoding.opened, time.perf_counter_ns())
                assembler.feed(verdict)
                if not verdict.is_followed or assembler.is_over:
                    yield assembler.take()
        except Exception:
            if assembler.holds_tokens:
                yield assembler.take()  # what should have followed was lost
            raise
