"""Sampling without torch: what the kernels know of a session, and drawing tokens from rows of logits."""

from __future__ import annotations

import ctypes
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

from engine.native.library import NativeLibrary
from engine.native.sampling_structs import CEdits, CSampler, CTreePlace
from engine.sampling import sparse
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import MAX_SEED, SamplingParams
from specdec.rules import DraftSampling, Rule

logger = logging.getLogger(__name__)

#: Candidates a kernel finds at most.
MAX_CANDIDATES: Final = 64
#: Bytes a kernel may write for one q row.
MAX_ROW_BYTES: Final = 1024

#: The sampling parameters that the kernels compute, and the numbers they know of each; None: all of them. Where
#: another one is in use, or another number, tokens are drawn by tensors.
KNOWN: Final[Mapping[str, tuple[float, float] | None]] = {
    "temperature": (0.0, math.inf),
    "seed": (0, MAX_SEED),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "min_tokens": (0, math.inf),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_token_ids": None,
}

_Int64 = ctypes.c_int64


class NativeSampler:
    """A session's parameters as the kernels read them; made once per session, at the first use."""

    def __init__(self, state: SamplingState) -> None:
        params = state.params
        self._edits: CEdits | None = CEdits() if state.edits else None
        self._kept: list[Any] = []  # what the structures point into
        self._struct = CSampler(
            params.temperature,
            params.top_p,
            params.min_p,
            min(params.top_k, state.num_tokens),
            state.num_tokens,
            sparse.max_tokens(state.num_tokens),
            sparse.Q_SHARE,
            (ctypes.c_uint64 * len(Stream))(*map(state.stream_key, Stream)),
            None if self._edits is None else ctypes.addressof(self._edits),
        )
        self.address: int = ctypes.addressof(self._struct)
        if self._edits is not None:
            self._fill(self._edits, state)

    def refresh(self, state: SamplingState) -> None:
        """Add what was committed since."""
        edits = self._edits
        if edits is None:
            return
        if state.penalizes:
            edits.counts = state.output_counts.data_ptr()
        edits.missing = state.params.min_tokens - state.num_output_tokens
        if width := edits.head_width:
            tail = state.token_ids[-width:]
            self._tail[:] = (_Int64 * width)(*[-2] * (width - len(tail)), *tail)[:]

    def _fill(self, edits: CEdits, state: SamplingState) -> None:
        params = state.params
        if params.allowed_token_ids:
            edits.forbidden = self._keep(state.forbidden)
        if ids := state.single_bad_token_ids:
            edits.bad_tokens, edits.num_bad_tokens = self._keep(torch.tensor(ids)), len(ids)
        if len(params.bad_token_ids) > len(state.single_bad_token_ids):
            heads, ends = state.bad_sequences
            edits.bad_heads, edits.bad_ends = self._keep(heads), self._keep(ends)
            edits.num_bad_sequences, edits.head_width = heads.shape
            self._tail = (_Int64 * heads.shape[1])()
            edits.tail = ctypes.addressof(self._tail)
        if params.min_tokens and state.stop_token_ids:
            edits.stop_tokens = self._keep(torch.tensor(state.stop_token_ids))
            edits.num_stop_tokens = len(state.stop_token_ids)
        if params.logit_bias:
            ids_and_values = state.bias
            edits.biased_tokens, edits.biases = map(self._keep, ids_and_values)
            edits.num_biased = len(params.logit_bias)
        if state.penalizes:
            edits.counts = self._keep(state.output_counts)
            edits.seen = self._keep(state.prompt_seen) if params.repetition_penalty != 1 else None
            edits.repetition = params.repetition_penalty
            edits.frequency = params.frequency_penalty
            edits.presence = params.presence_penalty

    def _keep(self, values: torch.Tensor) -> int:
        assert values.is_contiguous()
        self._kept.append(values)
        return values.data_ptr()


def unknown_parameters(params: SamplingParams) -> list[str]:
    """The names of the parameters in use that the kernels do not know, or not with these values."""
    return [row.name for row in params.in_use() if row.stage.is_sampling and not _is_known(row.name, params)]


def _is_known(name: str, params: SamplingParams) -> bool:
    if name not in KNOWN:
        return False
    limits = KNOWN[name]
    return limits is None or limits[0] <= getattr(params, name) <= limits[1]


def knows(state: SamplingState) -> bool:
    """Whether the kernels compute all that a session asks of sampling; if not, tensors must."""
    if state.kernels is None:
        unknown = unknown_parameters(state.params)
        if unknown:
            _warn(", ".join(unknown))
        state.kernels = False if unknown else NativeSampler(state)
    return state.kernels is not False


@cache
def _warn(names: str) -> None:
    """Said once."""
    logger.warning("the native sampler does not know %s; tensors sample such sessions", names)


def sampler_of(state: SamplingState) -> int:
    """The address of a session's ``Sampler``, up to date; valid as long as the state lives and commits nothing.

    Raises :class:`ValueError` for a session that the kernels do not know; ask :func:`knows` first.
    """
    sampler = state.kernels
    if not sampler:
        if not knows(state):
            raise ValueError(f"the native sampler does not know {', '.join(unknown_parameters(state.params))}")
        sampler = state.kernels
    if state.edits:
        sampler.refresh(state)
    address: int = sampler.address
    return address


def samplings_of(rows: Rows, rules: Sequence[Rule]) -> list[DraftSampling]:
    """How the draft of each row chooses its token."""
    return [rule.sampling_at(state.params.temperature) for state, rule in zip(rows.states, rules, strict=True)]


def likeliest(
    library: NativeLibrary, logits: torch.Tensor, rows: Rows, rules: Sequence[Rule], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """:func:`engine.sampling.candidates.candidates` on a CPU, row by row, as lists; ``count`` is at most
    :data:`MAX_CANDIDATES`.

    ``logits`` float32 [R, V], contiguous; rows of sessions that edit them are written to.
    """
    num_rows, prefix = len(rows), rows.prefix.contiguous()
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    assert count <= MAX_CANDIDATES
    places = (CTreePlace * num_rows)()
    for r, (place, position) in enumerate(zip(places, rows.positions, strict=True)):
        place.prefix = prefix.data_ptr() + 8 * prefix.shape[1] * r
        place.num_prefix, place.position = rows.prefix_lens[r], position
    samplers = array("q", map(sampler_of, rows.states))
    samplings = array("i", samplings_of(rows, rules))
    ids, logprobs = array("q", bytes(8 * num_rows * count)), array("d", bytes(8 * num_rows * count))
    samplers_at, samplings_at, ids_at, logprobs_at = (
        values.buffer_info()[0] for values in (samplers, samplings, ids, logprobs)
    )
    places_at = ctypes.addressof(places)
    status = library.likeliest(
        logits.data_ptr(), logits.shape[1], num_rows, samplers_at, samplings_at, places_at, count, ids_at, logprobs_at
    )
    if status:
        raise MemoryError("working memory for sampling")
    starts = range(0, num_rows * count, count)
    return [ids[s : s + count].tolist() for s in starts], [logprobs[s : s + count].tolist() for s in starts]
