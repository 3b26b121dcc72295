"""Whole chains of drafted tokens in one native call: no Python between two tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from specdec.engine.batch import Batch
from specdec.engine.chain_job import ChainJob, StopFlags
from specdec.engine.native.decoder import NativeDecoder
from specdec.sampling import sparse
from specdec.sampling.drafting import DraftedChain
from specdec.sampling.noise import Stream
from specdec.sampling.rule import Rule, SparseRow
from specdec.sampling.state import SamplingState

#: ``Chain`` of chains.cpp, its ``DrawSettings`` last.
_CHAIN: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("blocks",)),
        *((name, np.int64) for name in ("num_blocks", "length", "num_tokens")),
        *((name, np.uint64) for name in ("stop", "token_ids", "candidates", "q_rows", "q_sizes")),
        ("num_drawn", np.int64),
        *((name, np.int32) for name in ("kind", "num_candidates")),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p")),
        ("top_k", np.int64),
        ("stream", np.uint64),
        *((name, np.int64) for name in ("base", "vocabulary", "q_tokens")),
        ("q_share", np.float64),
    ]
)
_GREEDY, _COUPLED, _RATIO = range(3)
#: Guesses of one position at most.
MAX_CANDIDATES: Final = 64


def can_draw(state: SamplingState) -> bool:
    """Whether the native sampler knows all that the session's parameters ask for: everything but edits of logits."""
    return not state.edits


def draft_chains(
    decoder: NativeDecoder, batch: Batch, jobs: Sequence[ChainJob], numbers: Sequence[int], stop: StopFlags | None
) -> list[DraftedChain]:
    """Draft the jobs of these numbers, a chain each; ``batch`` feeds their own tokens, a segment each, in this order.

    The sequences' lengths are left to the caller, who knows them from the chains. Raises like
    :meth:`NativeDecoder.forward`.
    """
    drafting = [i for i, number in enumerate(numbers) if jobs[number].num_tokens]
    count = len(drafting)
    most = max((jobs[numbers[i]].num_tokens for i in drafting), default=0)
    num_candidates = max((jobs[numbers[i]].num_candidates for i in drafting), default=0)
    if num_candidates > MAX_CANDIDATES:
        raise ValueError(f"{num_candidates} candidates are asked for; at most {MAX_CANDIDATES} are found")
    tokens = np.empty((count, most), dtype=np.int64)
    candidates = np.empty((count, most, num_candidates), dtype=np.int64)
    q_rows = np.empty((count, most, sparse.Q_BYTES), dtype=np.uint8)
    q_sizes = np.zeros((count, most), dtype=np.int32)
    logits = torch.empty(max(count, 1), decoder.vocab_size)
    at = (tokens.ctypes.data, candidates.ctypes.data, q_rows.ctypes.data, q_sizes.ctypes.data)
    strides = (tokens.strides[0], candidates.strides[0], q_rows.strides[0], q_sizes.strides[0])
    stop_at = 0 if stop is None else stop.ctypes.data  # int32, in one piece
    blocks = []  # kept: the pool may give a sequence another array meanwhile
    records = []
    max_kv_len = batch.plan.max_kv_len
    for row, i in enumerate(drafting):
        job, kv_len = jobs[numbers[i]], batch.kv_lens[i]
        blocks.append(job.sequence.blocks)
        max_kv_len = max(max_kv_len, kv_len + job.num_tokens - 1)
        records.append(
            (
                blocks[-1].ctypes.data,
                0 if job.sequence.released else len(blocks[-1]),
                *(kv_len, job.num_tokens),
                stop_at + stop.itemsize * numbers[i] if stop is not None else 0,
                *(start + row * stride for start, stride in zip(at, strides, strict=True)),
                *(0, *_draw_settings(job, num_candidates)),
            )
        )
    chains = np.array(records, dtype=_CHAIN)
    native_batch = decoder.batch_of(batch.input_ids, batch.plan, batch.logit_rows, logits, max_kv_len)
    decoder.check(
        decoder.library.draft_chains(
            decoder.address,
            ctypes.addressof(native_batch),
            chains.ctypes.data,
            count,
            sparse.Q_BYTES,
            decoder.num_threads,
        )
    )
    results = [DraftedChain(())] * len(numbers)
    for row, i in enumerate(drafting):
        drawn = int(chains["num_drawn"][row])
        sizes = q_sizes[row, :drawn].tolist()
        results[i] = DraftedChain(
            tuple(tokens[row, :drawn].tolist()),
            tuple([SparseRow(q_rows[row, n, :size].tobytes()) for n, size in enumerate(sizes) if size]),
            tuple(map(tuple, candidates[row, :drawn].tolist())) if num_candidates else (),
        )
    return results


def _draw_settings(job: ChainJob, num_candidates: int) -> tuple[float, ...]:
    state, params = job.state, job.state.params
    if params.greedy:
        kind, stream = _GREEDY, 0
    elif job.rule is Rule.COUPLED:
        kind, stream = _COUPLED, state.stream_key(Stream.COUPLING)
    else:
        kind, stream = _RATIO, state.stream_key(Stream.DRAFT)
    return (
        *(kind, num_candidates),
        *(params.temperature, params.top_p, params.min_p, params.top_k),
        *(stream, len(state) + len(job.assumed)),
        *(state.num_tokens, sparse.max_tokens(state.num_tokens), sparse.Q_SHARE),
    )
