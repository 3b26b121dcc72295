"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation import Generation
from gateway.requests.types import GenerationChunk, GenerationRequest, PromptReport
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
from gateway.rest.schemas import CompletionBody
from gateway.rest.whole_answer import WholeLogprobs, WholeResponse
from gateway.text.detokenizer import Detokenizer
from specdec.errors import InvalidRequest, quote
from specdec.params import DEFAULT_MAX_TOKENS


async def create_completion(generation: Generation, body: CompletionBody, request: Request) -> Response:
    """Answer one call."""
    completion = Completion(generation, body, request)
    if body.stream:
        return EventResponse(completion.events(), completion.headers)
    return await while_connected(request.receive, completion.answer())


class Completion:
    """One call: its prompts, their samples, and the answer."""

    def __init__(self, generation: Generation, body: CompletionBody, request: Request) -> None:
        """Raises :class:`InvalidRequest` for values that no model could honour."""
        body.check_stream()
        self._generation = generation
        self._body = body
        self._head = head_of("cmpl", "text_completion", body, generation.check_model(body.model or ""))
        self._n = body.n or 1
        #: With echo, no tokens at all may be asked for; one is generated all the same, and left out.
        self._prompt_only = bool(body.echo) and body.limit_tokens() == 0
        self._requests = self._make_requests(timeout_of(request))
        self._totals = Totals()
        self._logprobs = LogprobWriter(generation.tokenizer, shows_ids=bool(body.return_tokens_as_token_ids))
        #: Characters before the generated text, by choice; known with the first chunk.
        self._offsets: dict[int, int] = {}

    def _make_requests(self, timeout_s: float | None) -> list[GenerationRequest]:
        body = self._body
        if body.best_of not in (None, self._n):
            raise InvalidRequest("best_of is not supported; leave it out, or equal to n", param="best_of")
        prompts = body.read.given
        if len(prompts) > 1 and body.session_id:
            raise InvalidRequest("session_id needs a single prompt", param="session_id")
        limit = self._generation.settings.max_concurrent_sequences
        if len(prompts) * self._n > limit:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n = {quote(self._n)} is above the limit of {limit} sequences"
                " (--max-concurrent-sequences); lower n, or send fewer prompts",
                param="n",
            )
        limit_tokens = body.limit_tokens()
        max_tokens = DEFAULT_MAX_TOKENS if limit_tokens is None else limit_tokens
        given = {"prompt_logprobs": body.logprobs} if body.echo and body.logprobs is not None else {}
        params = body.sampling(max_tokens=1 if self._prompt_only else max_tokens, logprobs=body.logprobs, **given)
        special = body.add_special_tokens is not False
        return [body.request(prompt, params, timeout_s=timeout_s, add_special_tokens=special) for prompt in prompts]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return name_ignored(self._body.read.ignored)

    async def answer(self) -> WholeResponse:
        """The whole answer as one object."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in range(len(self._requests) * self._n)]
        asked = self._body.logprobs is not None
        all_logprobs = [WholeLogprobs() if asked else None for _ in pieces]
        async for number, chunk in self._in_order():
            choice = number * self._n + chunk.index
            piece = self._choice(choice, number, chunk) | token_fields(chunk, self._body)
            if (logprobs := all_logprobs[choice]) is not None:
                logprobs.add(piece.pop("logprobs"))
            pieces[choice].append(piece)
        content = {**asdict(self._head), "usage": self._totals.usage(), "metrics": self._totals.metrics()}
        return WholeResponse(content, list(zip(map(_joined, pieces), all_logprobs, strict=True)), self.headers)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece; the last piece of all carries the metrics."""
        unfinished = len(self._requests) * self._n
        async for number, chunk in self._in_order():
            unfinished -= chunk.final is not None
            of_tokens = token_fields(chunk, self._body)
            if not (chunk.text or chunk.logprobs or chunk.final or of_tokens):
                continue
            choice = self._choice(number * self._n + chunk.index, number, chunk) | of_tokens
            metrics = {} if unfinished else {"metrics": self._totals.metrics()}
            yield self._head.with_choices([choice], **self._totals.stream_usage(self._body), **metrics)
        if self._body.include_usage:
            yield self._head.with_choices([], usage=self._totals.usage(), metrics=self._totals.metrics())

    async def _chunks(self) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        async with aclosing(run_all(self._generation, self._requests)) as chunks:
            async for number, given in chunks:
                chunk = given.without_output() if self._prompt_only else given
                self._totals.add(number, chunk)
                yield number, chunk

    async def _in_order(self) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """The chunks, each sample's first one with the prompt's report, for which other samples wait for sample 0."""
        prompts: dict[int, PromptReport] = {}
        waiting: dict[int, list[GenerationChunk]] = {}
        reported: set[tuple[int, int]] = set()
        async with aclosing(self._chunks()) as chunks:
            async for number, chunk in chunks:
                if chunk.prompt is not None:
                    prompts[number] = chunk.prompt
                waiting.setdefault(number, []).append(chunk)
                if number not in prompts:
                    continue
                for ready in waiting.pop(number):
                    is_first = (number, ready.index) not in reported
                    reported.add((number, ready.index))
                    yield number, replace(ready, prompt=prompts[number] if is_first else None)

    def _choice(self, choice: int, number: int, chunk: GenerationChunk) -> dict[str, Any]:
        """A choice, or a piece of it, without :func:`token_fields`.

        With ``chunk.prompt`` it is the first one, and begins with the echo.
        """
        body, prompt = self._body, chunk.prompt
        echo = self._echo(number, prompt) if body.echo and prompt is not None else ""
        if prompt is not None:
            self._offsets[choice] = len(echo)
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs.completion(chunk.logprobs, self._offsets[choice])
            if body.echo and prompt is not None:
                before = self._echo_logprobs(prompt)
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        result = {"index": choice, "text": echo + chunk.text, "logprobs": logprobs, **finish_fields(chunk.final)}
        if body.return_token_ids and prompt is not None:
            result["prompt_token_ids"] = list(prompt.token_ids)
        if body.prompt_logprobs is not None and prompt is not None:
            result["prompt_logprobs"] = prompt_logprobs(prompt.logprobs, self._generation.tokenizer)
        return result

    def _echo(self, number: int, prompt: PromptReport) -> str:
        text = self._body.read.texts[number]
        return self._generation.text.decode(prompt.token_ids) if text is None else text

    def _echo_logprobs(self, prompt: PromptReport) -> dict[str, list[Any]]:
        """The prompt's own log-probabilities; its first token has none."""
        tokenizer = self._generation.tokenizer
        offsets, end = [], 0
        reader = Detokenizer(tokenizer, skip_special_tokens=True) if tokenizer is not None else None
        for token_id in prompt.token_ids:
            offsets.append(end)
            end += len(reader.feed(token_id)) if reader is not None else 0
        tokens = list(map(self._logprobs.name, prompt.token_ids))
        return {"text_offset": offsets, "tokens": tokens, **self._logprobs.echo(prompt.logprobs)}


def _joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A choice of its pieces: texts and lists follow each other, the last one's other values count."""
    choice = {name: value for piece in pieces for name, value in piece.items() if name != "logprobs"}
    choice["text"] = "".join(piece["text"] for piece in pieces)
    for name in ("token_ids", "token_metrics"):
        if name in choice:
            choice[name] = [entry for piece in pieces for entry in piece[name]]
    return choice
