"""A session on an engine: one request, whose answer becomes verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import httpx2

from gateway.backends.engines.answer import EngineChoice, EngineCompletion, EngineUsage, parse
from gateway.backends.engines.connection import EngineConnection
from gateway.backends.engines.events import DONE, read_events
from gateway.backends.engines.liveness import Liveness
from gateway.backends.engines.logprobs import output_positions
from gateway.backends.engines.whole_answer import read_whole
from specdec.errors import Unavailable, quote
from specdec.logprobs import PositionLogprobs
from specdec.rules import DEFAULT_RULE
from specdec.types import FinishReason, Proposal, SessionSpec, TargetOpened, Verdict

#: Seconds for what follows the last token: the usage, and the end of the answer.
END_TIMEOUT_S: Final = 1.0
_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class EngineSession:
    """One completion. The engine decodes to the end by itself, so nothing is asked for after the opening."""

    #: The first tokens.
    first: Verdict

    def __init__(
        self,
        connection: EngineConnection,
        liveness: Liveness,
        response: httpx2.Response,
        spec: SessionSpec,
        on_close: Callable[[], None],
    ) -> None:
        """``response`` is that to :func:`~gateway.backends.engines.body.body_of`, not read yet."""
        self._connection = connection
        self._liveness = liveness
        self._response = response
        self._spec = spec
        self._on_close: Callable[[], None] | None = on_close
        self._length = len(spec.token_ids)
        self._max_len = spec.prompt_len + (spec.params.max_tokens or 1)
        self._answers = self._read()
        self.opened = TargetOpened(spec.epoch, DEFAULT_RULE)

    def offer(self, proposal: Proposal) -> None:
        """Drop the proposal: the engine drafts by itself."""

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Do nothing: the engine decodes without being asked."""

    async def receive(self) -> Verdict:
        """The next tokens.

        Raises:
            Unavailable: the engine was lost, or answered what cannot be.
            InvalidRequest, Overloaded: the engine said so within its answer.
        """
        async with self._liveness.waiting():
            async for answer in self._answers:
                if (verdict := self._verdict(answer)) is None:
                    continue
                if verdict.finish_reason is not None:
                    await self._read_end()
                return verdict
        raise Unavailable("the engine's answer ended before the text did")

    async def close(self) -> None:
        """Close the connection, unless the answer was read to its end. Idempotent."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        on_close()
        try:
            await self._answers.aclose()
        finally:
            await self._connection.finish(self._response)

    async def _read(self) -> AsyncGenerator[EngineCompletion, None]:
        spec = self._spec
        if (count := spec.params.prompt_logprobs) is not None:
            answer, positions = await read_whole(await self._connection.read(self._response), spec.token_ids, count)
            if positions is None and answer.error is None:
                raise Unavailable("the engine left out the prompt's log-probabilities")
            self.opened = replace(self.opened, prompt_logprobs=positions or ())
            yield answer
            return
        async with (
            aclosing(self._connection.pieces(self._response)) as pieces,
            aclosing(read_events(pieces)) as events,
        ):
            async for data in events:
                if data != DONE:
                    yield parse(EngineCompletion, data)

    async def _read_end(self) -> None:
        """Read on after the last token: the usage comes then, and a connection that was read to its end is kept."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                async for answer in self._answers:
                    self._note_usage(answer.usage)
        except (TimeoutError, Unavailable):
            await self._response.aclose()

    def _verdict(self, answer: EngineCompletion) -> Verdict | None:
        """The tokens of an answer; None: it has none, and is not the end."""
        if answer.error is not None:
            raise self._connection.error_of(None, answer.error)
        self._note_usage(answer.usage)
        if not answer.choices:
            return None
        choice, spec, base_len = answer.choices[0], self._spec, self._length
        if choice.token_ids is None:
            raise Unavailable("the engine left out the token ids that were asked for")
        token_ids, reason = tuple(choice.token_ids), self._reason(choice)
        if not token_ids and reason is None:
            return None
        self._length += len(token_ids)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if (count := spec.params.logprobs) is not None and token_ids:
            logprobs = tuple(output_positions(choice.logprobs, token_ids, count))
        return Verdict(
            spec.epoch,
            base_len,
            token_ids,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if token_ids and reason is FinishReason.STOP else None,
            logprobs=logprobs,
            num_multi_step_left=0 if reason is not None else max(0, self._max_len - self._length),
        )

    def _reason(self, choice: EngineChoice) -> FinishReason | None:
        name = choice.finish_reason
        if name is not None and name not in _REASONS:
            raise Unavailable(f"the engine gave the request up with finish_reason {quote(name)}")
        return None if name is None else _REASONS[name]

    def _note_usage(self, usage: EngineUsage | None) -> None:
        if usage is not None and usage.prompt_tokens_details is not None:
            num_cached = usage.prompt_tokens_details.cached_tokens or 0
            self.opened = replace(self.opened, num_cached_tokens=max(0, num_cached))
