"""The parts that completions and chat answers share, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from gateway.access.request_id import current_request_id, use_request_id
from gateway.decoding.metrics import SpeculationMetrics
from gateway.generation import Generation
from gateway.merging import merge
from gateway.requests.limits import check_name
from gateway.requests.types import (
    FinalChunk,
    GenerationChunk,
    GenerationRequest,
    Sample,
    TokenUsage,
)
from gateway.rest.schemas import SamplingBody
from specdec.errors import InvalidRequest, quote

TIMEOUT_HEADER = "X-Request-Timeout-S"
IGNORED_HEADER = "X-Ignored-Fields"

logger = logging.getLogger(__name__)
#: Ignored fields that the log has named.
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    object: str
    created: int
    model: str

    def with_choices(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One object of the answer."""
        return {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model, "choices": choices,
            **more,
        }  # fmt: skip


def head_of(prefix: str, kind: str, body: SamplingBody, model: str) -> Head:
    """The head of a new answer; its id holds the request's."""
    if body.request_id:
        check_name("request_id", body.request_id)
        use_request_id(body.request_id)
    return Head(f"{prefix}-{body.request_id or current_request_id()}", kind, int(time.time()), model)


def timeout_of(request: Request) -> float | None:
    """The seconds a client gives the request; None means the server's setting."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not 0 < timeout_s < float("inf"):
        raise InvalidRequest(f"{TIMEOUT_HEADER} is {quote(text)}; give seconds above 0", param=TIMEOUT_HEADER)
    return timeout_s


def name_ignored(names: Iterable[str]) -> dict[str, str]:
    """The header that names a request's fields without effect; the log names each once."""
    given = sorted(set(names))
    for name in given:
        if name not in _logged:
            _logged.add(name)
            logger.info("the field %s of requests has no effect here", name)
    return {IGNORED_HEADER: ", ".join(given)} if given else {}


async def run_all(
    generation: Generation, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """The chunks of several prompts, each with the prompt's number."""

    async def one(number: int, request: GenerationRequest) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        async with aclosing(generation.stream(request)) as chunks:
            async for chunk in chunks:
                yield number, chunk

    async with (
        generation.admission(*requests) as admitted,
        aclosing(merge([one(number, request) for number, request in enumerate(admitted)])) as merged,
    ):
        async for numbered in merged:
            yield numbered


class Totals:
    """Usage and metrics over all prompts and samples of an answer."""

    def __init__(self) -> None:
        self._prompts: dict[int, TokenUsage] = {}
        self._completion_tokens: Counter[tuple[int, int]] = Counter()
        self._reasoning_tokens = 0
        self._speculation = SpeculationMetrics()

    def add(self, number: int, chunk: GenerationChunk) -> None:
        """Count a chunk of prompt ``number``; the prompt itself counts once."""
        final, sample = chunk.final, (number, chunk.index)
        if chunk.prompt is not None:
            self._prompts.setdefault(number, TokenUsage(len(chunk.prompt.token_ids), 0))
        self._completion_tokens[sample] += len(chunk.token_ids)
        self._reasoning_tokens += chunk.num_reasoning_tokens
        if final is None:
            return
        known = self._prompts.get(number)
        if known is None or final.usage.cached_tokens > known.cached_tokens:
            self._prompts[number] = final.usage
        self._completion_tokens[sample] = final.usage.completion_tokens
        self._speculation.add(final.speculation)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, of what was added so far."""
        prompt_tokens = sum(usage.prompt_tokens for usage in self._prompts.values())
        completion_tokens = self._completion_tokens.total()
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in self._prompts.values())},
            "completion_tokens_details": {
                "reasoning_tokens": self._reasoning_tokens,
                "accepted_prediction_tokens": self._speculation.num_accepted_predicted_tokens,
                "rejected_prediction_tokens": self._speculation.num_rejected_predicted_tokens,
            },
        }

    def stream_usage(self, body: SamplingBody) -> dict[str, Any]:
        """The usage field of an event within a stream."""
        if not body.include_usage:
            return {}
        return {"usage": self.usage() if body.continuous_usage else None}

    def metrics(self) -> dict[str, Any]:
        """What speculation did."""
        return {"speculative_decoding": self._speculation.report()}


def token_fields(part: GenerationChunk | Sample, body: SamplingBody) -> dict[str, Any]:
    """What a choice, or a piece of it, tells of its tokens besides log-probabilities."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["token_ids"] = list(part.token_ids)
    if body.return_token_metrics:
        fields["token_metrics"] = [each.report() for each in part.token_metrics]
    return fields


def finish_fields(final: FinalChunk | None) -> dict[str, Any]:
    """A choice's finish and stop reason; null before its end."""
    if final is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": final.finish_reason, "stop_reason": final.stop_reason}
