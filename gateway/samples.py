"""From verdicts to the chunks of one sample: text, stop strings, log-probabilities, the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.decoding.loop import Decoding
from gateway.decoding.round import Origin
from gateway.requests.types import (
    FinalChunk,
    GenerationChunk,
    PromptReport,
    TokenLogprobs,
    TokenMetrics,
    TokenUsage,
)
from gateway.text.detokenizer import Detokenizer
from gateway.text.message import MessageDelta
from gateway.text.message_parser import MessageParser
from gateway.text.replies import Replies, ReplyPlan
from gateway.text.stop_strings import StopFinder, Stopped, StopStrings
from gateway.text.tokenizer import TextTokenizer
from specdec.params import SamplingParams
from specdec.types import FinishReason, Verdict


@dataclass(slots=True)
class _Held:
    """Of tokens that no chunk has: their texts, to which that of the end is added."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_metrics: list[TokenMetrics] = field(default_factory=list)


class SampleAssembler:
    """Builds the chunks of one sample. ``params`` are the request's own, before preparation; ``stops`` are its
    stop strings, one object for all samples; ``with_metrics`` reports where each token came from, and when: seconds
    of ``time.monotonic`` since ``started``.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        decoding: Decoding,
        *,
        tokenizer: TextTokenizer | None,
        stops: StopStrings,
        started: float,
        with_metrics: bool = False,
        replies: Replies | None = None,
        reply: ReplyPlan | None = None,
    ) -> None:
        self._request_id = request_id
        self._index = index
        self._params = params
        self._decoding = decoding
        self._started = started
        self._with_metrics = with_metrics
        self._detokenizer: Detokenizer | None = None
        self._parser: MessageParser | None = None
        if tokenizer is not None and (params.detokenize or params.stop):
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                kept=() if replies is None or reply is None else replies.kept_special_tokens(reply),
                context=decoding.request.prompt[-8:],
            )
            self._parser = None if replies is None or reply is None else replies.parser(reply)
        self._finder = StopFinder(stops, include=params.include_stop_str_in_output)
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_characters = 0
        self._stop: str | None = None
        self._held = _Held()
        #: The verdict with which the text ended.
        self._last: Verdict | None = None
        self._prompt_reported = index > 0

    @property
    def usage(self) -> TokenUsage:
        """Counts so far."""
        opened = self._decoding.opened
        return TokenUsage(
            len(self._decoding.request.prompt),
            self._num_tokens,
            opened.num_cached_tokens if opened else 0,
            self._num_reasoning_tokens,
        )

    def feed(self, verdict: Verdict) -> None:
        """Take up the tokens of a verdict. Where a stop string ends the text, the tokens after it are dropped."""
        held, num_used = self._held, 0
        first = len(held.text)
        for position, token_id in enumerate(verdict.token_ids):
            self._num_tokens += 1
            num_used += 1
            if verdict.logprobs:
                held.logprobs.append(TokenLogprobs(verdict.logprobs[position], self._num_characters))
            is_last = num_used == len(verdict.token_ids)
            ends = is_last and verdict.finish_reason is FinishReason.STOP and verdict.stop_token_id == token_id
            has_text = self._detokenizer is not None and (not ends or self._params.include_stop_str_in_output)
            held.text.append(self._give_out(self._detokenizer.feed(token_id)) if has_text and self._detokenizer else "")
            if self._stop is not None:
                break
        held.token_ids += verdict.token_ids[:num_used]
        if self._stop is not None or verdict.finish_reason is not None:
            self._last = verdict
            self._flush(held.text)
        if self._with_metrics:
            held.token_metrics += self._metrics(verdict, held.text[first:], num_used)

    @property
    def is_over(self) -> bool:
        """Whether the text has ended."""
        return self._last is not None

    @property
    def holds_tokens(self) -> bool:
        """Whether there are tokens for a chunk."""
        return bool(self._held.token_ids)

    def take(self) -> GenerationChunk:
        """The chunk of the verdicts since the one before: several that came together make one."""
        held, self._held, last = self._held, _Held(), self._last
        num_thought = self._num_reasoning_tokens
        message = None
        if self._parser is not None:
            message = self._read(self._parser, held.text, len(held.token_ids))
            if last is not None and self._parser.has_parts:
                is_cut = self._stop is not None or last.finish_reason is not FinishReason.STOP
                message.add(self._parser.finish(is_cut=is_cut))
        final = None if last is None else self._final(last)
        prompt, self._prompt_reported = None if self._prompt_reported else self._prompt(), True
        return GenerationChunk(
            request_id=self._request_id,
            index=self._index,
            text="".join(held.text),
            message=message,
            token_ids=tuple(held.token_ids),
            num_reasoning_tokens=self._num_reasoning_tokens - num_thought,
            logprobs=tuple(held.logprobs),
            token_metrics=tuple(held.token_metrics),
            prompt=prompt,
            final=final,
        )

    def _metrics(self, verdict: Verdict, text: list[str], num_used: int) -> tuple[TokenMetrics, ...]:
        """What is told of the used tokens of a verdict; the last one has the text that its end gives out."""
        if not num_used:
            return ()
        texts = [*text[: num_used - 1], "".join(text[num_used - 1 :])]
        answered = self._decoding.answered
        time_ns = round(1e9 * (time.monotonic() - self._started))
        if answered is None:
            return tuple(TokenMetrics(each, Origin.TARGET, time_ns=time_ns) for each in texts)
        number, draft_ns = self._decoding.metrics.num_spec_steps, answered.draft_ns
        return tuple(
            TokenMetrics(each, origin, number, draft_ns, answered.wait_ns, time_ns)
            for each, origin in zip(texts, answered.origins(verdict), strict=False)  # a stop string drops the rest
        )

    def _give_out(self, text: str) -> str:
        """The part of new text that cannot be the beginning of a stop string."""
        self._num_characters += len(text)
        if not text or self._num_tokens <= self._params.min_tokens:
            return text
        found = self._finder.feed(text)
        if isinstance(found, Stopped):
            self._stop = found.stop
            return found.text
        return found

    def _flush(self, text: list[str]) -> None:
        """What was held back comes after the text of the last token."""
        if self._stop is None and self._detokenizer is not None:
            text.append(self._give_out(self._detokenizer.flush()))
            text.append(self._finder.flush())

    def _read(self, parser: MessageParser, text: list[str], num_tokens: int) -> MessageDelta:
        """What the texts of so many tokens add to the message."""
        if not parser.has_parts:
            return MessageDelta("".join(text))
        delta = MessageDelta()
        if not parser.has_thoughts:
            text = ["".join(text)]
        for position, piece in enumerate(text):
            was_thinking = parser.is_thinking
            delta.add(parser.feed(piece))
            self._num_reasoning_tokens += position < num_tokens and (was_thinking or parser.is_thinking)
        return delta

    def _final(self, verdict: Verdict) -> FinalChunk:
        stop_reason: str | int | None = self._stop
        if stop_reason is None and verdict.stop_token_id in self._params.stop_token_ids:
            stop_reason = verdict.stop_token_id
        metrics = self._decoding.metrics
        metrics.plain_reason = self._decoding.plain_reason()
        reason = verdict.finish_reason if self._stop is None else FinishReason.STOP
        has_calls = self._parser is not None and self._parser.has_calls
        return FinalChunk(reason or FinishReason.STOP, stop_reason, self.usage, metrics, has_calls)

    def _prompt(self) -> PromptReport:
        opened = self._decoding.opened
        return PromptReport(self._decoding.request.prompt, opened.prompt_logprobs if opened else ())
