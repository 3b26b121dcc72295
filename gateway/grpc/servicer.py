"""The gRPC interface: message in, call, message out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from gateway.generation import Generation
from gateway.types import FinalChunk, GenerationChunk, GenerationRequest, TokenLogprobs, TokenText
from specdec import codec
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Serves a :class:`Generation`. The interceptor turns its errors into statuses."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one request. The call's deadline is the request's; a call that ends early closes its sessions."""
        asked = read_request(request, timeout_s=context.time_remaining())
        with self._generation.admission(asked.params.n):
            async with aclosing(self._generation.stream(asked)) as chunks:
                async for chunk in chunks:
                    yield write_chunk(chunk)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text to token ids."""
        self._generation.check_model(request.model)
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._generation.encode(request.text, add_special_tokens=add)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._generation.router.model().max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Token ids to text."""
        self._generation.check_model(request.model)
        text = self._generation.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The served names and what is behind them."""
        self._generation.check_model("")
        target = codec.encode_model_info(self._generation.router.model())
        draft_info = self._generation.router.draft_model()
        draft = None if draft_info is None else codec.encode_model_info(draft_info)
        names = self._generation.model_names
        return pb.ListModelsResponse(models=[pb.ServedModel(id=name, target=target, draft=draft) for name in names])


def read_request(message: pb.GenerateRequest, *, timeout_s: float | None) -> GenerationRequest:
    """The request behind a message.

    Raises:
        InvalidRequest: it has no prompt, or a value is out of range.
    """
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the request has no prompt; set text or token_ids", param="prompt")
    speculation = message.speculation
    k = speculation.num_speculative_tokens if speculation.HasField("num_speculative_tokens") else None
    return GenerationRequest(
        prompt=message.text if kind == "text" else tuple(message.token_ids.ids),
        params=_read_params(message),
        model=message.model,
        rule=codec.decode_rule(speculation.verification),
        num_speculative_tokens=k,
        session_id=message.session_id,
        timeout_s=timeout_s,
    )


def _read_params(message: pb.GenerateRequest) -> SamplingParams:
    """The request's own fields come after its transforms, whose seed is ignored."""
    transforms = codec.read_parameters(message.sampling)
    return SamplingParams(**transforms | {"seed": None} | codec.read_parameters(message))


def write_chunk(chunk: GenerationChunk) -> pb.GenerateResponse:
    """A chunk as a message."""
    response = pb.GenerateResponse(
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=[_write_position(position) for position in chunk.logprobs],
        request_id=chunk.request_id,
    )
    if chunk.final is not None:
        _write_final(chunk.final, response)
    return response


def _write_final(final: FinalChunk, response: pb.GenerateResponse) -> None:
    response.finish_reason = codec.encode_finish_reason(final.reason)
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
        )
    )
    response.speculation.CopyFrom(pb.SpeculationMetrics(**final.speculation.report()))


def _write_position(position: TokenLogprobs) -> types_pb.PositionLogprobs:
    return types_pb.PositionLogprobs(token=_write_token(position.token), top=map(_write_token, position.top))


def _write_token(token: TokenText) -> types_pb.TokenLogprob:
    return types_pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)
