"""The native draft loop: all chains of a batch in one call, with no Python between their tokens."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from engine.chain_job import ChainJob, Drawing, StopFlags
from engine.native.decoder import NativeModel
from engine.native.draft_structs import CChain, CDrafted
from engine.native.library import DTYPES
from engine.native.sampling import MAX_ROW_BYTES, sampler_of
from engine.sampling.drafting import DraftedChain
from specdec.rules import SparseRow

#: What a chain ingests first: the addresses of its blocks, of its tokens and of its features, 0 where
#: there are none; how many tokens; how many entries are in the cache, and how many were dropped from it; how many
#: of the tokens are masks, each of which brings a row of logits.
Fed: TypeAlias = tuple[int, int, int, int, int, int, int]


class _Output:
    """Memory for what the chains bring, in one piece."""

    def __init__(self, num_chains: int, depth: int, *, with_q: bool) -> None:
        steps = num_chains * depth
        self._depth, self._with_q = depth, with_q
        self._lengths_at = 8 * steps
        self._sizes_at = self._lengths_at + 8 * num_chains
        self._q_at = self._sizes_at + 4 * steps + 4 * (steps % 2)
        self._memory = memoryview(bytearray(self._q_at + MAX_ROW_BYTES * steps * with_q))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.struct = CDrafted(
            token_ids=start,
            q=start + self._q_at,
            q_bytes=start + self._sizes_at,
            lengths=start + self._lengths_at,
            depth=depth,
        )

    def read(self) -> list[DraftedChain]:
        depth = self._depth
        tokens = self._memory[: self._lengths_at].cast("q").tolist()
        lengths = self._memory[self._lengths_at : self._sizes_at].cast("q").tolist()
        chains = []
        for c, length in enumerate(lengths):
            steps = range(c * depth, c * depth + length)
            q_rows = self._rows(steps) if self._with_q else ()
            chains.append(DraftedChain(tuple(tokens[steps.start : steps.stop]), q_rows))
        return chains

    def _rows(self, steps: range) -> tuple[SparseRow, ...]:
        sizes = self._memory[self._sizes_at : self._q_at].cast("i")[steps.start : steps.stop].tolist()
        starts = range(self._q_at + steps.start * MAX_ROW_BYTES, len(self._memory), MAX_ROW_BYTES)
        ends = [start + size for start, size in zip(starts, sizes, strict=False) if size]
        return tuple([SparseRow(bytes(self._memory[start:end])) for start, end in zip(starts, ends, strict=False)])


def draft_chains(
    model: NativeModel, jobs: Sequence[ChainJob], stop: StopFlags | None, *, block_size: int, max_model_len: int
) -> list[DraftedChain]:
    """:func:`engine.chains.draft_chains` on a native model whose engine has begun a pass.

    Jobs of a head bring ``features``. Its sequences grow by ``token_ids`` alone: what is cached for drafted tokens
    stands on the head's own states, and is fed again with the target's.
    """
    tokens = array("q")
    starts = []
    longest = 1
    for job in jobs:
        sequence, count = job.sequence, len(job.token_ids)
        end = sequence.length + count + max(0, job.num_tokens - 1)
        if not count:
            raise ValueError("a chain starts with a token to feed, and this one has none")
        if end > min(sequence.capacity, max_model_len):
            raise ValueError(
                f"{job.num_tokens} drafted tokens after {sequence.length + count} entries exceed the"
                f" {sequence.capacity} the sequence has room for (the model takes {max_model_len})"
            )
        if model.num_features:
            _check_features(job, (model.num_features, model.fused_width), jobs[0])
        longest = max(longest, end + sequence.num_dropped + 1)
        starts.append(len(tokens))
        tokens.extend(job.token_ids)
        tokens.extend([job.mask_token_id or 0] * job.num_masks)
    if len({id(job.sequence) for job in jobs}) != len(jobs):
        raise ValueError("a sequence stands in two chains of one batch")

    at, _ = tokens.buffer_info()
    blocks = [job.sequence.blocks for job in jobs]  # held: the event loop may replace a sequence's own
    fed = [
        (
            0 if job.sequence.released else blocks[c].__array_interface__["data"][0],
            at + 8 * start,
            0 if job.features is None else job.features.data_ptr(),
            len(job.token_ids) + job.num_masks,
            job.sequence.length,
            job.sequence.num_dropped,
            job.num_masks,
        )
        for c, (job, start) in enumerate(zip(jobs, starts, strict=True))
    ]
    caches = model.caches_for(longest)
    caches.plan.block_size = block_size
    if jobs[0].features is not None:
        caches.features_dtype = DTYPES[jobs[0].features.dtype]
        caches.features_are_fused = jobs[0].features.shape[1] != model.num_features
    chains = draw_chains(
        jobs,
        fed,
        stop,
        lambda packed, stop_at, out: model.check(
            model.library.draft_chains(
                model.address, ctypes.addressof(caches), packed, len(jobs), stop_at, out, model.num_threads
            )
        ),
    )
    for job, chain in zip(jobs, chains, strict=True):
        job.sequence.length += len(job.token_ids)
        if not model.num_features and job.mask_token_id is None:
            job.sequence.length += max(0, len(chain.token_ids) - 1)
    return chains


def draw_chains(
    jobs: Sequence[Drawing], fed: Sequence[Fed], stop: StopFlags | None, call: Callable[[int, int | None, int], None]
) -> list[DraftedChain]:
    """Let native code draw the jobs' chains: ``call`` gets the addresses of its chains, the flags and its output."""
    structs = (CChain * len(jobs))()
    samplings = [job.rule.sampling_at(job.state.params.temperature) for job in jobs]
    for chain, job, sampling, first in zip(structs, jobs, samplings, fed, strict=True):
        blocks, token_ids, features, count, length, num_dropped, num_masks = first
        chain.sampler, chain.sampling = sampler_of(job.state), sampling
        chain.blocks, chain.features = blocks, features
        chain.token_ids, chain.num_token_ids, chain.num_masks = token_ids, count, num_masks
        chain.length, chain.num_dropped, chain.base = length, num_dropped, len(job.state)
        chain.num_tokens = job.num_tokens
    with_q = any(sampling.sends_q for sampling in samplings)
    out = _Output(len(jobs), max(job.num_tokens for job in jobs), with_q=with_q)
    if stop is not None and (stop.dtype != np.int32 or not stop.flags.c_contiguous):
        raise ValueError(f"stop flags are {stop.dtype}; they must be contiguous int32")
    call(
        ctypes.addressof(structs),
        None if stop is None else stop.ctypes.data,
        ctypes.addressof(out.struct),
    )
    return out.read()


def _check_features(job: ChainJob, widths: tuple[int, int], first: ChainJob) -> None:
    features, count = job.features, len(job.token_ids)
    if features is None or features.shape not in [(count, width) for width in widths] or not features.is_contiguous():
        raise ValueError(f"a head needs {count} rows of {widths[0]} features that are contiguous")
    if features.dtype not in DTYPES or first.features is None or features.dtype != first.features.dtype:
        raise ValueError(f"features are {features.dtype}; all must be float32, or all bfloat16")
    if features.shape[1] != first.features.shape[1]:
        raise ValueError(f"features have {features.shape[1]} numbers; all must have as many")
