"""Grammars of a model: its tokenizer as llguidance reads it, and the grammars compiled last."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from llguidance import LLMatcher, LLTokenizer

from specdec.errors import InvalidRequest, Overloaded, Unavailable
from specdec.structured_outputs import StructuredOutputsParams
from target_service.grammar.bounds import LIMITS, MAX_TEXT_BYTES, STACK_BYTES
from target_service.grammar.grammar import Grammar
from target_service.grammar.guard import CompileGuard
from target_service.grammar.language import grammar_of, refusal
from target_service.grammar.tokenizer import TokenizerText

#: Grammars kept: 10 MB where each is a nested schema, which takes 0.3 MB.
_NUM_KEPT: Final = 32
#: Refusals kept: 0.6 MB, 0.6 KB each.
_NUM_REFUSALS: Final = 1024
#: New grammars made at once: three that take a CPU second hold nobody up, and all take four cores at most.
_MAX_AT_ONCE: Final = 4
_CLOSED: Final = "the target is shutting down; use another replica"

_Result = TypeVar("_Result")


class GrammarCompiler:
    """Makes the grammars of sessions in a thread with a large stack.

    Another process compiles each new one first, and is ended where that takes too long: no thread could be. One that
    was refused is refused at once, until newer refusals take its place.
    """

    def __init__(self, read_tokenizer: Callable[[], TokenizerText | None], max_waiting: int = 256) -> None:
        """``read_tokenizer`` is called once, for the first grammar; None: the model has no tokenizer that fits.

        At most ``max_waiting`` requests wait for their grammars.
        """
        self._read_tokenizer = read_tokenizer
        self._text: TokenizerText | None = None
        self._tokenizer: LLTokenizer | None = None
        self._is_read = False
        #: Starts with the first grammar.
        self.guard: CompileGuard | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        #: The reason, by the digest of the parameters.
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        #: Each holds a slot.
        self._making: set[asyncio.Task[LLMatcher]] = set()
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._is_closed = False
        self._thread: ThreadPoolExecutor | None = None

    async def compile(self, params: StructuredOutputsParams, output: Sequence[int] = ()) -> Grammar:
        """A grammar that has read ``output``.

        Raises:
            InvalidRequest: there is no tokenizer, the grammar is wrong, too large or takes too long to compile, or
                ``output`` does not fit it.
            Overloaded: too many wait, or memory is too short to compile it.
            Unavailable: this was closed, or the process that checks grammars has ended.
        """
        if self._is_closed:
            raise Unavailable(_CLOSED)
        if params.num_bytes > MAX_TEXT_BYTES:
            raise refusal(params.kind, f"it has {params.num_bytes} bytes, above {MAX_TEXT_BYTES}; shorten it")
        matcher = self._find(params)
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting} requests wait for their grammars; try again later")
        self._num_waiting += 1
        try:
            if matcher is None:
                await self._slots.acquire()
                making = asyncio.create_task(self._make(params))
                self._making.add(making)
                making.add_done_callback(self._end_making)
                await asyncio.wait((making,))  # a caller who leaves cancels nothing
                matcher = making.result()
            return await self._in_thread(self._read, params, matcher, output)
        finally:
            self._num_waiting -= 1

    def _find(self, params: StructuredOutputsParams) -> LLMatcher | None:
        """The grammar, if it was made; raises :class:`InvalidRequest` if it was refused."""
        if (matcher := self._compiled.get(params)) is not None:
            self._compiled.move_to_end(params)
            return matcher
        digest = _digest_of(params)
        if (reason := self._refusals.get(digest)) is not None:
            self._refusals.move_to_end(digest)
            raise InvalidRequest(reason, param="structured_outputs")
        return None

    async def _make(self, params: StructuredOutputsParams) -> LLMatcher:
        """The grammar before it has read anything; kept, as is why it is refused."""
        if (found := self._find(params)) is not None:  # made while this one waited
            return found
        try:
            guard, grammar = await self._in_thread(self._prepare, params)
            if reason := await guard.refusal(grammar):
                raise refusal(params.kind, reason)
            matcher = await self._in_thread(self._compile, params, grammar)
        except InvalidRequest as error:
            self._refusals[_digest_of(params)] = str(error)
            if len(self._refusals) > _NUM_REFUSALS:
                self._refusals.popitem(last=False)
            raise
        self._compiled[params] = matcher
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return matcher

    def _end_making(self, making: asyncio.Task[LLMatcher]) -> None:
        self._making.remove(making)
        self._slots.release()
        if not making.cancelled():
            making.exception()  # read here: perhaps nobody waits for it

    async def _in_thread(self, call: Callable[..., _Result], *args: Any) -> _Result:
        if self._is_closed:
            raise Unavailable(_CLOSED)
        if self._thread is None:
            self._thread = _thread_with_stack(STACK_BYTES)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def close(self) -> None:
        """Compile no more; the thread ends once nobody waits for it."""
        if self._thread is not None and not self._is_closed:
            self._thread.submit(self._end_guard)
            self._thread.shutdown(wait=False)
        self._is_closed = True

    # --- in the thread ---

    def _prepare(self, params: StructuredOutputsParams) -> tuple[CompileGuard, str]:
        if not self._is_read:
            self._text, self._is_read = self._read_tokenizer(), True
            self._tokenizer = None if self._text is None else self._text.read()
        if self._text is None:
            raise InvalidRequest(
                "structured_outputs needs a fast tokenizer (tokenizer.json) beside the weights, or --tokenizer",
                param="structured_outputs",
            )
        grammar = grammar_of(params)
        if self.guard is None or self.guard.has_ended:
            self._end_guard()
            self.guard = CompileGuard(self._text)
        return self.guard, grammar

    def _end_guard(self) -> None:
        if self.guard is not None:
            self.guard.close()

    def _compile(self, params: StructuredOutputsParams, grammar: str) -> LLMatcher:
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refusal(params.kind, matcher.get_error())
        return matcher

    def _read(self, params: StructuredOutputsParams, matcher: LLMatcher, output: Sequence[int]) -> Grammar:
        assert self._tokenizer is not None
        own = matcher.deep_copy()
        if output and not own.consume_tokens(list(output)):
            raise refusal(params.kind, f"it cannot follow the tokens generated so far: {own.get_error()}")
        return Grammar(own, (self._tokenizer.vocab_size + 31) // 32)


def _digest_of(params: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(repr(params).encode()).digest()


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """A pool of one thread, which has started. Only pages of the stack that are used take memory."""
    pool = ThreadPoolExecutor(1, "grammars")
    before = threading.stack_size(num_bytes)
    try:
        pool.submit(int)
    finally:
        threading.stack_size(before)
    return pool
