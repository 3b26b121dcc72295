"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation import Generation
from gateway.requests.types import GenerationChunk, GenerationRequest, PromptReport, Sample
from gateway.rest.answers import (
    Totals,
    finish_fields,
    head_of,
    name_ignored,
    run_all,
    timeout_of,
    token_fields,
)
from gateway.rest.events import EventResponse, while_connected
from gateway.rest.logprobs import LogprobWriter, prompt_logprobs
from gateway.rest.schemas import ChatBody
from gateway.rest.whole_answer import WholeLogprobs, WholeResponse
from gateway.text.message import AssistantMessage, CallDelta, MessageDelta


async def create_chat_completion(generation: Generation, body: ChatBody, request: Request) -> Response:
    """Answer one call."""
    chat = Chat(generation, body, request)
    if body.stream:
        return EventResponse(chat.events(), chat.headers)
    return await while_connected(request.receive, chat.answer())


class Chat:
    """One call: its conversation, the samples, and the answer."""

    def __init__(self, generation: Generation, body: ChatBody, request: Request) -> None:
        """Raises :class:`InvalidRequest` for values that no model could honour."""
        body.check_stream()
        self._generation = generation
        self._body = body
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = head_of("chatcmpl", kind, body, generation.check_model(body.model or ""))
        self._n = body.n or 1
        self._request = self._make_request(timeout_of(request))
        self._totals = Totals()
        self._logprobs = LogprobWriter(generation.tokenizer, shows_ids=bool(body.return_tokens_as_token_ids))

    def _make_request(self, timeout_s: float | None) -> GenerationRequest:
        body = self._body
        params = body.sampling(max_tokens=body.limit_tokens(), logprobs=body.num_logprobs())
        return body.request(
            body.read.given[0],
            body.plan.constrain(params),
            timeout_s=timeout_s,
            # The template has put the special tokens where they belong.
            add_special_tokens=body.add_special_tokens is True,
            reply=body.plan,
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return name_ignored(self._body.read.ignored)

    async def answer(self) -> WholeResponse:
        """The whole answer as one object."""
        asked = self._request.params.logprobs is not None
        samples = [(Sample(index), WholeLogprobs() if asked else None) for index in range(self._n)]
        prompt = PromptReport(())
        async for chunk in self._chunks():
            sample, logprobs = samples[chunk.index]
            sample.add(replace(chunk, logprobs=()))
            if logprobs is not None:
                logprobs.add(self._logprobs.chat(chunk.logprobs))
            prompt = chunk.prompt or prompt
        choices = [(self._choice(sample), logprobs) for sample, logprobs in samples]
        more = {"usage": self._totals.usage(), "metrics": self._totals.metrics(), **self._prompt_fields(prompt)}
        return WholeResponse({**asdict(self._head), **more}, choices, self.headers)

    def _choice(self, sample: Sample) -> dict[str, Any]:
        """A whole choice without its log-probabilities."""
        return {
            "index": sample.index,
            "message": self._message(sample.message or AssistantMessage()),
            **finish_fields(sample.final),
            **token_fields(sample, self._body),
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece: the role of each choice, its text, its end; the last end carries the metrics."""
        unfinished, begun = self._n, set()
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if chunk.index not in begun:
                    begun.add(chunk.index)
                    role = {"index": chunk.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                    fields = self._prompt_fields(chunk.prompt) if chunk.prompt is not None else {}
                    yield self._head.with_choices(
                        [role | finish_fields(None)], **self._totals.stream_usage(self._body), **fields
                    )
                unfinished -= chunk.final is not None
                delta = self._delta(chunk)
                of_tokens = token_fields(chunk, self._body)
                if not (delta or chunk.logprobs or chunk.final or of_tokens):
                    continue
                metrics = {} if unfinished else {"metrics": self._totals.metrics()}
                usage = self._totals.stream_usage(self._body)
                yield self._head.with_choices([self._piece(chunk, delta) | of_tokens], **usage, **metrics)
        if self._body.include_usage:
            yield self._head.with_choices([], usage=self._totals.usage(), metrics=self._totals.metrics())

    async def _chunks(self) -> AsyncGenerator[GenerationChunk, None]:
        async with aclosing(run_all(self._generation, [self._request])) as chunks:
            async for number, chunk in chunks:
                self._totals.add(number, chunk)
                yield chunk

    def _delta(self, chunk: GenerationChunk) -> MessageDelta:
        """The part of the message that a chunk brings, as far as it is asked for."""
        delta = chunk.message or MessageDelta()
        return replace(delta, reasoning="") if self._body.include_reasoning is False else delta

    def _message(self, message: AssistantMessage) -> dict[str, Any]:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
        return {
            "role": "assistant",
            "content": message.content or (None if calls else ""),
            **(_thoughts(message.reasoning) if self._body.include_reasoning is not False else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def _piece(self, chunk: GenerationChunk, delta: MessageDelta) -> dict[str, Any]:
        asked = self._request.params.logprobs is not None
        is_content = bool(delta.content) or not (delta or chunk.final)
        return {
            "index": chunk.index,
            "delta": {
                **({"content": delta.content} if is_content else {}),
                **_thoughts(delta.reasoning),
                **({"tool_calls": list(map(_call_piece, delta.calls))} if delta.calls else {}),
            },
            "logprobs": self._logprobs.chat(chunk.logprobs) if asked else None,
            **finish_fields(chunk.final),
        }

    def _prompt_fields(self, prompt: PromptReport) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.token_ids)
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt.logprobs, self._generation.tokenizer)
        return fields


def _thoughts(text: str) -> dict[str, str]:
    """Under DeepSeek's name, which most clients know, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call_piece(call: CallDelta) -> dict[str, Any]:
    """OpenAI's delta of a call: id, type and name with its first piece."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
