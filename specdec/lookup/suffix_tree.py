"""Texts and past outputs with their suffix trees, which are C++ (``native/``).

Each stands for the trie of all runs of tokens up to a depth, with counts, in at most two nodes for each token; no
dictionary of Python's could do that in so little time and memory.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from specdec.compiler import BuildError
from specdec.errors import InvalidRequest
from specdec.lookup.base import Match
from specdec.prebuilt import has_library, library_of
from specdec.struct_check import check_structs
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS

_SOURCES: Final = Path(__file__).with_name("native")
_Pointer, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Query(ctypes.Structure):
    """``Query`` of suffix.cpp."""

    _fields_ = (
        ("max_tokens", _Int64),
        ("max_spec_factor", ctypes.c_double),
        ("min_token_prob", ctypes.c_double),
        ("drafted", _Pointer),
        ("num_drafted", _Int64),
        ("longest_match", _Int64),
    )


class _Size(ctypes.Structure):
    """``Size`` of suffix.cpp."""

    _fields_ = (
        ("num_requests", _Int64),
        ("num_tokens", _Int64),
        ("num_nodes", _Int64),
        ("num_bytes", _Int64),
    )


class _Library:
    """The loaded trees; see suffix.cpp for what each function does."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        check_structs(lib, {"Query": _Query, "Size": _Size})
        self.text = lib.tandem_suffix_text
        self.text.argtypes, self.text.restype = (_Int32,), _Pointer
        self.free_text = lib.tandem_free_suffix_text
        self.free_text.argtypes, self.free_text.restype = (_Pointer,), None
        self.append = lib.tandem_suffix_append
        self.append.argtypes, self.append.restype = (_Pointer, _Pointer, _Int64), None
        self.truncate = lib.tandem_suffix_truncate
        self.truncate.argtypes, self.truncate.restype = (_Pointer, _Int64), _Int32
        self.cache = lib.tandem_suffix_cache
        self.cache.argtypes, self.cache.restype = (_Int32, _Int64, _Int64), _Pointer
        self.free_cache = lib.tandem_free_suffix_cache
        self.free_cache.argtypes, self.free_cache.restype = (_Pointer,), None
        self.add = lib.tandem_suffix_cache_add
        self.add.argtypes, self.add.restype = (_Pointer, _Pointer, _Int64), None
        self.apply_pending = lib.tandem_suffix_cache_apply_pending
        self.apply_pending.argtypes, self.apply_pending.restype = (_Pointer, _Int64), _Int64
        self.size = lib.tandem_suffix_cache_size
        self.size.argtypes, self.size.restype = (_Pointer, _Pointer), None
        self.count = lib.tandem_suffix_cache_count
        self.count.argtypes, self.count.restype = (_Pointer, _Pointer, _Int64), _Int64
        self.draft = lib.tandem_suffix_draft
        self.draft.argtypes, self.draft.restype = (_Pointer, _Pointer, _Pointer), None


@cache
def load() -> _Library:
    """The trees, prebuilt or compiled on the first call on this machine.

    Raises:
        InvalidRequest: they are not prebuilt, and there is no compiler, or it fails.
    """
    try:
        return _Library(library_of(_SOURCES, "suffixes"))
    except (BuildError, OSError, AttributeError) as error:
        raise InvalidRequest(f'method "suffix" cannot be used here ("ngram" can): {error}', param="method") from error


def can_load() -> bool:
    """Whether the trees are prebuilt, or there is a compiler for them."""
    return has_library(_SOURCES)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What past outputs take."""

    num_requests: int
    num_tokens: int
    num_nodes: int
    num_bytes: int


class SuffixCache:
    """The outputs of past requests, first in, first out.

    Added outputs enter the tree, and the oldest ones leave it, in ``apply_pending``: some suffixes at a time, because a
    long output takes milliseconds.
    """

    def __init__(self, depth: int, max_requests: int, max_tokens: int) -> None:
        """The oldest outputs go while there are more than ``max_requests``, or more than ``max_tokens`` tokens."""
        self._library = load()
        self._handle: int = self._library.cache(depth, max_requests, max_tokens)
        self._num_pending_suffixes = 0
        weakref.finalize(self, self._library.free_cache, self._handle)

    @property
    def handle(self) -> int:
        """Address of the C++ object."""
        return self._handle

    @property
    def is_up_to_date(self) -> bool:
        """Whether there is nothing left to be done."""
        return self._num_pending_suffixes == 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Queue the output of a request."""
        if token_ids:
            tokens = array("I", token_ids)
            self._library.add(self._handle, tokens.buffer_info()[0], len(tokens))
            self._num_pending_suffixes = len(tokens)

    def apply_pending(self, budget: int) -> None:
        """Put up to ``budget`` suffixes into the tree or take them out, a third of a microsecond each or so."""
        if self._num_pending_suffixes:
            self._num_pending_suffixes = self._library.apply_pending(self._handle, budget)

    def count(self, token_ids: Sequence[int]) -> int:
        """How often these tokens, no more than the tree is deep, stand in the outputs."""
        tokens = array("I", token_ids)
        return int(self._library.count(self._handle, tokens.buffer_info()[0], len(tokens)))

    @property
    def size(self) -> CacheSize:
        """What is held at this moment."""
        size = _Size()
        self._library.size(self._handle, ctypes.addressof(size))
        return CacheSize(size.num_requests, size.num_tokens, size.num_nodes, size.num_bytes)


class SuffixText:
    """Prompt and output of one session, and the tree over the ingested part of them."""

    def __init__(self, token_ids: Sequence[int], depth: int) -> None:
        self.token_ids = list(token_ids)
        self._depth = depth
        self._library = load()
        self._num_ingested = 0
        self._query = _Query()
        self._query_at = ctypes.addressof(self._query)
        self._drafted = (ctypes.c_uint32 * MAX_SPECULATIVE_TOKENS)()
        self._query.drafted = ctypes.addressof(self._drafted)
        self._begin()

    def _begin(self) -> None:
        self._handle: int = self._library.text(self._depth)
        self._free = weakref.finalize(self, self._library.free_text, self._handle)

    @property
    def num_pending(self) -> int:
        """Tokens not ingested yet."""
        return len(self.token_ids) - self._num_ingested

    def ingest(self, num_tokens: int) -> None:
        """Ingest the next ``num_tokens`` pending tokens, each at the cost of one walk down the tree."""
        if num_tokens:
            end = self._num_ingested + num_tokens
            tokens = array("I", self.token_ids[self._num_ingested : end])
            self._library.append(self._handle, tokens.buffer_info()[0], num_tokens)
            self._num_ingested = end

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens and put others after them; what is new becomes pending.

        Where more are dropped than the tree has let wait, it is started again and everything is pending.
        """
        if keep < self._num_ingested:
            if self._library.truncate(self._handle, keep):
                self._num_ingested = keep
            else:
                self._free()
                self._num_ingested = 0
                self._begin()
        self.token_ids[keep:] = token_ids

    def look_up(
        self,
        num_tokens: int,
        past: SuffixCache | None,
        *,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> Match:
        """What is likely to follow the ingested tokens: ``num_tokens`` or 64 at most.

        The best path in the text's own tree, or in that of past outputs where it scores higher.
        """
        query = self._query
        # The buffer has no room for more.
        query.max_tokens = min(num_tokens, MAX_SPECULATIVE_TOKENS)
        query.max_spec_factor, query.min_token_prob = max_spec_factor, min_token_prob
        self._library.draft(self._handle, None if past is None else past.handle, self._query_at)
        drafted = tuple(self._drafted[: query.num_drafted])
        return Match(drafted, query.longest_match)
