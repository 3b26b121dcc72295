"""The gRPC interface: message in, call, message out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio

from gateway.access.caller import current_caller
from gateway.generation import SMALL_REQUEST, Generation
from gateway.grpc.attaching import serve_attachment
from gateway.grpc.reading import GenerateCall, read_detokenize, read_generate, read_tokenize
from gateway.requests.types import FinalChunk, GenerationChunk, PromptReport
from gateway.text.processor import TextProcessor
from specdec import codec
from specdec.errors import InvalidRequest
from specdec.rpc.call import Call
from specdec.types import ModelInfo
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

#: Messages that may hold a chat, by what reads them.
_CHATS: Final[Mapping[Any, Any]] = {read_generate: pb.GenerateRequest, read_tokenize: pb.TokenizeRequest}

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer:
    """Serves a :class:`Generation`. The interceptor converts its errors to statuses.

    Messages of any size come as bytes: :mod:`gateway.grpc.reading` decodes them, large ones in a worker.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def Generate(self, raw: bytes, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one request. The call's deadline is the request's; a call that ends early closes its sessions."""
        with self._generation.trace_refusal():
            call = await self._read(read_generate, raw)
        del raw  # may be many megabytes, of fields that nobody knows
        asked = replace(call.request, timeout_s=context.time_remaining())
        async with (
            self._generation.admission(asked) as (admitted,),
            aclosing(self._generation.stream(admitted)) as chunks,
        ):
            async for chunk in chunks:
                response = write_chunk(chunk.without_output() if call.prompt_only else chunk)
                if chunk.prompt is not None and (call.echo or call.request.params.prompt_logprobs is not None):
                    response.prompt.CopyFrom(self._write_prompt(chunk.prompt, call))
                yield response

    async def Tokenize(self, raw: bytes, context: Context) -> bytes:
        """Text to token ids: a ``TokenizeRequest`` to a ``TokenizeResponse``."""
        return await self._answer(read_tokenize, raw)

    async def Detokenize(self, raw: bytes, context: Context) -> bytes:
        """Token ids to text: a ``DetokenizeRequest`` to a ``DetokenizeResponse``."""
        return await self._answer(read_detokenize, raw)

    async def AttachDraft(self, _: AsyncIterator[bytes], context: Context) -> None:
        """Serve a draft that its client brings for its own requests."""
        if self._generation.settings.has_engines:
            raise InvalidRequest("the engines behind this gateway draft by themselves; attach elsewhere")
        await serve_attachment(self._generation.attachments, cast("Call", context))

    async def ListModels(self, raw: bytes, context: Context) -> pb.ListModelsResponse:
        """The served names and what is behind them."""
        self._generation.check_model("")
        target = codec.encode_model_info(self._generation.router.model())
        draft_info = self._generation.router.draft_model()
        draft = None if draft_info is None else codec.encode_model_info(draft_info)
        names = self._generation.model_names
        methods = [
            pb.DraftMethod(name=name, num_speculative_tokens=method.max_tokens)
            for name, method in self._generation.draft_methods.offered.items()
        ]
        return pb.ListModelsResponse(
            models=[pb.ServedModel(id=name, target=target, draft=draft, methods=methods) for name in names]
        )

    def _write_prompt(self, prompt: PromptReport, call: GenerateCall) -> pb.Prompt:
        text = call.prompt_text or ""
        if call.echo and call.prompt_text is None:
            text = self._generation.text.decode(prompt.token_ids)
        logprobs = codec.encode_logprobs(prompt.logprobs)
        return pb.Prompt(text=text, token_ids=prompt.token_ids, logprobs=logprobs)

    async def _answer(
        self, read: Callable[[TextProcessor, bytes, ModelInfo, bool], tuple[str, bytes]], raw: bytes
    ) -> bytes:
        model, answer = await self._read(read, raw)
        self._generation.check_model(model)
        return answer

    async def _read(self, read: Callable[[TextProcessor, bytes, ModelInfo, bool], T], raw: bytes) -> T:
        most = self._generation.max_body_bytes
        if len(raw) > most:
            raise InvalidRequest(
                f"the message is above the limit of {most} bytes (--max-body-bytes); send a smaller one"
            )
        with self._generation.buffers.request(current_caller().client) as buffer:
            buffer.add(len(raw))
            has_chat = len(raw) <= SMALL_REQUEST and _has_chat(read, raw)
            return await self._generation.read(read, raw, buffer, has_chat=has_chat)


def _has_chat(read: Callable[..., Any], raw: bytes) -> bool:
    """Whether a message holds a chat. Other small messages need not wait for those that do."""
    kind = _CHATS.get(read)
    return kind is not None and kind.FromString(raw).HasField("chat")


def add_to_server(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Register the service as the generated function does, but leave requests as bytes."""
    unary = grpc.unary_unary_rpc_method_handler
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate, response_serializer=pb.GenerateResponse.SerializeToString
        ),
        "Tokenize": unary(servicer.Tokenize),
        "Detokenize": unary(servicer.Detokenize),
        "AttachDraft": grpc.stream_stream_rpc_method_handler(
            servicer.AttachDraft, response_serializer=pb.AttachDraftResponse.SerializeToString
        ),
        "ListModels": unary(servicer.ListModels, response_serializer=pb.ListModelsResponse.SerializeToString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def write_chunk(chunk: GenerationChunk) -> pb.GenerateResponse:
    """A chunk as a message."""
    response = pb.GenerateResponse(
        text=chunk.content, token_ids=chunk.token_ids, request_id=chunk.request_id, index=chunk.index
    )
    if chunk.logprobs:
        response.logprobs.extend(codec.encode_logprobs(entry.position for entry in chunk.logprobs))
    if chunk.token_metrics:
        response.token_metrics.extend(pb.TokenMetrics(**each.report()) for each in chunk.token_metrics)
    if chunk.message is not None:
        response.reasoning_content = chunk.message.reasoning
        response.tool_calls.extend(pb.ToolCall(**asdict(call)) for call in chunk.message.calls)
    if chunk.final is not None:
        _write_final(chunk.final, response)
    return response


def _write_final(final: FinalChunk, response: pb.GenerateResponse) -> None:
    response.finish_reason = types_pb.FinishReason.Value(f"FINISH_REASON_{final.finish_reason.upper()}")
    if isinstance(final.stop_reason, str):
        response.stop_text = final.stop_reason
    elif final.stop_reason is not None:
        response.stop_token_id = final.stop_reason
    usage = final.usage
    response.usage.CopyFrom(
        pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            accepted_prediction_tokens=final.speculation.num_accepted_predicted_tokens,
            rejected_prediction_tokens=final.speculation.num_rejected_predicted_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )
    )
    response.speculation.CopyFrom(pb.SpeculationMetrics(**final.speculation.report()))
