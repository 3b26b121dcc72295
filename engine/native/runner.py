"""Passes by the native decoder, and whole chains in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from engine.batch import Batch, Segment
from engine.chain_job import ChainJob, StopFlags
from engine.compaction import Kept
from engine.hidden_states import STATE_DTYPE, StateRows
from engine.native import chains
from engine.native.decoder import NativeDecoder
from engine.native.feed import feed, takes
from engine.native.sampling import knows
from engine.runner import PassLimits, Results, Runner
from engine.sampling.drafting import DraftedChain


class NativeRunner(Runner):
    """A decoder on the engine's caches."""

    brings_threads: ClassVar = True

    def __init__(self, decoder: NativeDecoder, limits: PassLimits) -> None:
        super().__init__("native decoder", limits)
        self.decoder = decoder

    @property
    def description(self) -> str:
        """The name, and how far its weights are prefetched."""
        return f"{self.name}, {self.decoder.prefetch}"

    @property
    def keys_in_columns(self) -> bool:
        """In blocks of whole tiles."""
        return self.limits["block_size"] % self.decoder.library.key_tile == 0

    def forward(self, segments: Sequence[Segment], wanted: StateRows | None) -> Results:
        """In one call where all token ids are host integers."""
        if takes(segments):
            return feed(self.decoder, segments, **self.limits, states=wanted)
        return super().forward(segments, wanted)

    def run(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> Results:
        """A pass over a batch of tensors."""
        state_plan = None if batch.states is None else batch.states.numbers
        if not layers:
            return self.decoder.forward(batch.input_ids, batch.plan, batch.logit_rows, state_plan=state_plan), None
        states = torch.empty(len(rows), len(layers), self.decoder.hidden_size, dtype=STATE_DTYPE)
        asked = torch.tensor(rows, dtype=torch.int64), torch.tensor(layers), states
        return self.decoder.forward(batch.input_ids, batch.plan, batch.logit_rows, asked, state_plan), states

    def draft_chains(self, jobs: Sequence[ChainJob], stop: StopFlags | None) -> list[DraftedChain] | None:
        """In one call where the kernels know what every job asks of sampling, and no layer is recurrent."""
        if self.decoder.is_recurrent or not all(knows(job.state) for job in jobs):
            return None
        size, limit = self.limits["block_size"], self.limits["max_model_len"]
        return chains.draft_chains(self.decoder, jobs, stop, block_size=size, max_model_len=limit)

    def keep_rows(self, moving: Sequence[Kept]) -> None:
        """Move the entries in the decoder's own layout of the cache."""
        self.decoder.keep_rows(moving, self.limits["block_size"])
