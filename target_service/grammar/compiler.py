"""Grammars of a model: its tokenizer as llguidance reads it, and the grammars compiled last."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.errors import InvalidRequest
from specdec.structured_outputs import StructuredOutputsParams
from target_service.grammar.grammar import Grammar
from target_service.grammar.language import grammar_of, refusal

#: Bounds of llguidance's work, so that no request holds up others: compiling at most ~50 ms, a row of a mask ~10 ms.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
#: Grammars kept; one of a nested schema takes about 1 MB.
_NUM_KEPT: Final = 32


class GrammarCompiler:
    """Makes the grammars of sessions. Compiling runs in a thread, one grammar at a time."""

    def __init__(self, read_tokenizer: Callable[[], LLTokenizer | None]) -> None:
        """``read_tokenizer`` is called once, for the first grammar; None: the model has no tokenizer that fits."""
        self._read_tokenizer = read_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._is_read = False
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._lock = Lock()

    async def compile(self, params: StructuredOutputsParams, output: Sequence[int] = ()) -> Grammar:
        """A grammar that has read ``output``.

        Raises:
            InvalidRequest: there is no tokenizer, the grammar is wrong or too large, or ``output`` does not fit it.
        """
        return await asyncio.to_thread(self._compile, params, output)

    def _compile(self, params: StructuredOutputsParams, output: Sequence[int]) -> Grammar:
        with self._lock:
            matcher = self._matcher(params).deep_copy()
        if output and not matcher.consume_tokens(list(output)):
            raise refusal(params.kind, "the tokens generated so far do not fit it")
        assert self._tokenizer is not None
        return Grammar(matcher, (self._tokenizer.vocab_size + 31) // 32)

    def _matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        if (matcher := self._compiled.get(params)) is not None:
            self._compiled.move_to_end(params)
            return matcher
        if not self._is_read:
            self._tokenizer, self._is_read = self._read_tokenizer(), True
        if self._tokenizer is None:
            raise InvalidRequest(
                "structured_outputs needs a fast tokenizer (tokenizer.json) beside the weights, or --tokenizer",
                param="structured_outputs",
            )
        matcher = LLMatcher(self._tokenizer, grammar_of(params), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise refusal(params.kind, matcher.get_error())
        self._compiled[params] = matcher
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return matcher
