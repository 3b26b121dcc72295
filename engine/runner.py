"""What runs the passes of a model on a paged cache: the native decoder, or the model's own modules in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypedDict

import torch

from engine.batch import Batch, Segment, build_batch
from engine.chain_job import ChainJob, StopFlags
from engine.compaction import Kept
from engine.hidden_states import StateRows
from engine.sampling.drafting import DraftedChain

if TYPE_CHECKING:
    from engine.cuda.chains import CapturedChains

#: Logits, float32 [N, V], and the hidden states wanted, [rows, layers, H]; None where none are.
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


class PassLimits(TypedDict):
    """What bounds a batch: entries in a block, token ids, entries of a sequence."""

    block_size: int
    vocab_size: int
    max_model_len: int


class Runner(ABC):
    """One way to run a model.

    Its methods are called on the device thread. Where ``brings_threads``, any thread may call them, one at a time.
    """

    #: Whether its kernels bring threads of their own: torch is left with one, and a call belongs to no thread.
    brings_threads: ClassVar = False

    def __init__(self, name: str, limits: PassLimits) -> None:
        """``name``: "native decoder", "native attention", "cuda graphs", "triton attention" or "torch attention"."""
        self.name = name
        self.limits = limits
        #: Drafts several tokens of a chain by one launch; None: each is a pass.
        self.captured_chains: CapturedChains | None = None

    @property
    def description(self) -> str:
        """For users: the name, and what was measured for this machine."""
        return self.name

    @property
    def keys_in_columns(self) -> bool:
        """Whether the keys of a block and head lie [D, block_size] in the cache."""
        return False

    def forward(self, segments: Sequence[Segment], wanted: StateRows | None) -> Results:
        """Feed every segment; each sequence grows by its tokens.

        Raises as :func:`engine.batch.build_batch`, after which no sequence has grown. A pass that breaks off leaves no
        recurrent state behind: such sequences are empty then.
        """
        with torch.inference_mode():
            batch = build_batch(segments, **self.limits)
            rows, layers = ([], ()) if wanted is None else (wanted.rows(), wanted.layers)
            try:
                results = self.run_everywhere(batch, rows, layers)
            except BaseException:
                _forget_states(segments)
                raise
        for segment, kv_len in zip(segments, batch.kv_lens, strict=True):
            segment.sequence.length = kv_len
        if batch.states is not None:
            for segment, base, end in zip(segments, batch.states.new_bases, batch.states.ends, strict=True):
                if (slot := segment.sequence.states) is not None:
                    slot.base, slot.end = base, end
        return results

    def run_everywhere(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> Results:
        """:meth:`run`, on all ranks of a split model; in inference mode."""
        return self.run(batch, rows, layers)

    @abstractmethod
    def run(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> Results:
        """A pass on this process; ``rows`` and ``layers`` say which hidden states are wanted."""

    def draft_chains(self, jobs: Sequence[ChainJob], stop: StopFlags | None) -> list[DraftedChain] | None:
        """:func:`engine.chains.draft_chains` in one call; None where each token of these jobs needs a pass."""
        return None

    @abstractmethod
    def keep_rows(self, moving: Sequence[Kept]) -> None:
        """Move the entries of accepted paths together; there is one at least."""

    def warm_up(self) -> None:
        """Prepare what the first passes need."""
        return


def _forget_states(segments: Sequence[Segment]) -> None:
    """A pass broke off, maybe between two layers."""
    for segment in segments:
        if segment.sequence.states is not None:
            segment.sequence.states.forget()
            segment.sequence.length = 0
