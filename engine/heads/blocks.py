"""A DFlash head on a paged KV cache: ragged batches of sessions, a block of each drafted in one pass.

Entry i of a sequence stands for the i-th position whose target state is known, as in :mod:`engine.heads.paged`. The
rows of a block are written behind them and dropped after the pass.

Where the rows of a block see all of it, attention is told that they stand behind the block, as a tree of no ancestors:
its kernels let every row see the entries before the rows that are fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.attention import PagedBatch
from engine.batch import MAX_TREE_ROWS, Batch, Segment, build_batch
from engine.chains import ChainJob, StopFlags, draw_chains
from engine.heads.dflash import DFlashHead
from engine.heads.head_cache import HeadCache, shapes_of
from engine.heads.native.walk import NativeWalk
from engine.native.linears import pack_linears
from engine.native.sampling import knows
from engine.sampling.drafting import DraftedChain
from engine.sampling.transfer import send
from specdec.errors import ModelNotSupported
from specdec.process.cores import usable_cores
from specdec.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a pass: where their keys go, and how their rows attend."""

    #: int64 [R].
    token_ids: Tensor
    positions: Tensor
    #: Of the rows in their blocks.
    places: Tensor
    #: Slots of the rows, then, unless all layers are causal, of copies of them: what lies where attention believes the
    #: rows to stand is masked, but must be a number.
    slots: Tensor
    causal: PagedBatch
    both_ways: PagedBatch
    #: Of each job that drafts, the first row.
    starts: list[int]


class PagedBlocks(HeadCache):
    """A head, the caches of its layers, and the bookkeeping of the caches."""

    def __init__(
        self,
        head: DFlashHead,
        settings: ModelSettings,
        max_model_len: int,
        *,
        num_tokens: int,
        least_confidence: float = 0.0,
    ) -> None:
        """Lay out the cache on the head's device.

        ``num_tokens``: those drafted at most. A chain ends before the first one whose confidence is below
        ``least_confidence``.

        Raises:
            InvalidRequest: there is no memory for it.
            ModelNotSupported: the blocks are longer than a tree may be.
        """
        super().__init__(shapes_of(head.attentions, head.dtype), head, settings, max_model_len)
        if head.config.block_size >= MAX_TREE_ROWS:
            raise ModelNotSupported(f"block_size is {head.config.block_size}; it must be below {MAX_TREE_ROWS}")
        self.head: DFlashHead = head
        self._least_confidence = least_confidence
        #: Entries a block needs at most, and tokens of a block.
        self.num_rows = min(num_tokens, head.config.max_tokens) + head.config.num_given
        self._native: NativeWalk | None = None
        if not settings.enforce_eager and self.device.type == "cpu":
            num_threads = settings.num_threads or usable_cores()
            self._native = NativeWalk.build(head, num_threads)
            pack_linears(head, num_threads, settings.autotune)

    def draft_chains(self, jobs: Sequence[ChainJob], stop: StopFlags | None = None) -> list[DraftedChain]:
        """Ingest what the jobs feed, as context, and draft a chain for those that want one.

        A block has the rows of the longest chain there may be, unless all layers are causal: in the others its length
        matters. Sequences grow by ``token_ids`` alone.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
            ValueError: a segment is empty or does not fit its sequence.
        """
        self.copy_blocks()
        drafting = [i for i, job in enumerate(jobs) if job.num_tokens]
        with torch.inference_mode():
            x, starts = self._pass(jobs, drafting)
            if not drafting:
                return [DraftedChain(())] * len(jobs)
            first = dict(zip(drafting, starts, strict=True))
            if self._native is not None and all(knows(job.state) for job in jobs):
                return self._draw_natively(self._native, x, first, jobs, stop)
            walk, step = self.head.walk(x), 0

            def rows(chains: Sequence[int]) -> Tensor:
                return send([first[i] + self.head.config.num_given + step for i in chains], self.device)

            def feed(continuing: Sequence[int], token_ids: Tensor) -> Tensor:
                nonlocal step
                step += 1
                return walk.step(continuing, rows(continuing), token_ids)

            last = send([jobs[i].token_ids[-1] for i in drafting], self.device)
            chains = draw_chains(walk.step(drafting, rows(drafting), last), jobs, feed, stop)
            lengths = walk.lengths([len(chain.token_ids) for chain in chains], self._least_confidence)
        return [_cut(chain, length) for chain, length in zip(chains, lengths, strict=True)]

    def _draw_natively(
        self,
        native: NativeWalk,
        x: Tensor,
        first: Mapping[int, int],
        jobs: Sequence[ChainJob],
        stop: StopFlags | None,
    ) -> list[DraftedChain]:
        """The chains in one native call."""
        rows = [first.get(i, 0) + self.head.config.num_given for i in range(len(jobs))]
        chains, confidences = native.draft_chains(x, rows, jobs, stop)
        if confidences is None or self._least_confidence <= 0:
            return chains
        unsure = (torch.sigmoid(confidences) < self._least_confidence).tolist()
        return [
            _cut(chain, below.index(True)) if True in below else chain
            for chain, below in zip(chains, unsure, strict=True)
        ]

    def _pass(self, jobs: Sequence[ChainJob], drafting: Sequence[int]) -> tuple[Tensor, list[int]]:
        """One pass over all that is fed; returns the blocks' rows, [R, H], and the first of each block."""
        head = self.head
        new = self._batch([Segment(job.sequence, job.token_ids, 0) for job in jobs], 0).to(self.device).plan
        states = self.alike([job.features for job in jobs if job.features is not None])
        context = self.fused(torch.cat(states))
        for job in jobs:
            job.sequence.length += len(job.token_ids)
        if not drafting:
            rotation = head.rotary(new.positions, context.dtype)
            paged = PagedBatch(Batch(new, new.positions[None], new.positions, [], []))
            for layer, attention in enumerate(head.attentions):
                self.write(layer, *attention.keys_and_values(context, rotation), paged)
            return context, []
        blocks = self._blocks([jobs[i] for i in drafting])
        slots = replace(new, slots=torch.cat((new.slots, blocks.slots)))
        written = PagedBatch(Batch(slots, new.positions[None], new.positions, [], []))
        num_rows = len(blocks.token_ids)
        copies = len(blocks.slots) > num_rows

        def attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            reach = head.config.reaches[layer]
            if copies:
                key, value = torch.cat((key, key[-num_rows:])), torch.cat((value, value[-num_rows:]))
            self.write(layer, key, value, written)
            return self.attend(layer, query, blocks.causal if reach.is_causal else blocks.both_ways, reach.window)

        x = head(blocks.token_ids, context, torch.cat((new.positions, blocks.positions)), attend, blocks.places)
        return x, blocks.starts

    def _blocks(self, jobs: Sequence[ChainJob]) -> _Blocks:
        """Lay out a block behind the entries of each job."""
        config, size = self.head.config, self.pool.block_size
        segments = []
        for job in jobs:
            count = job.num_tokens + config.num_given
            if not config.is_causal:
                count = max(count, min(self.num_rows, job.sequence.capacity - job.sequence.length))
            segments.append(Segment(job.sequence, [job.token_ids[-1], *[config.mask_token_id] * (count - 1)], count))
        batch = self._batch(segments, config.block_size)
        plan, counts = batch.plan, [len(segment.token_ids) for segment in segments]
        starts = [job.sequence.length for job in jobs]
        entries = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        chained = replace(plan, positions=torch.from_numpy(entries))  # windows count entries
        causal = replace(batch, plan=chained)
        both_ways, slots = causal, plan.slots
        if not config.is_causal:
            kv_lens = [start + 2 * count for start, count in zip(starts, counts, strict=True)]
            tables = plan.block_tables
            missing = -(-max(kv_lens) // size) - tables.shape[1]
            tables = torch.nn.functional.pad(tables, (0, max(0, missing)))  # block 0 is nobody's
            owners = np.repeat(np.arange(len(jobs)), counts)
            behind = torch.from_numpy(entries + np.repeat(counts, counts))
            copies = tables[torch.from_numpy(owners), behind // size].long() * size + behind % size
            slots = torch.cat((slots, copies))
            behind_plan = replace(
                chained,
                block_tables=tables.contiguous(),
                kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
                max_kv_len=max(kv_lens),
                ancestors=torch.zeros(len(entries), dtype=torch.int64),
            )
            both_ways = replace(batch, plan=behind_plan, kv_lens=kv_lens).to(self.device)
        return _Blocks(
            send(batch.input_ids[0], self.device),
            send(plan.positions, self.device),
            send(torch.from_numpy(entries - np.repeat(starts, counts)), self.device),
            send(slots, self.device),
            PagedBatch(causal.to(self.device)),
            PagedBatch(both_ways),
            batch.row_starts[:-1],
        )

    def _batch(self, segments: Sequence[Segment], num_more: int) -> Batch:
        """``num_more``: entries beyond the longest text, which are not kept."""
        return build_batch(
            segments,
            block_size=self.pool.block_size,
            vocab_size=self.head.config.vocab_size,
            max_model_len=self.max_model_len + num_more,
        )


def _cut(chain: DraftedChain, length: int) -> DraftedChain:
    return DraftedChain(chain.token_ids[:length], chain.q_rows[:length])
