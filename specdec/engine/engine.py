"""One model with its KV pool: the only thing the services know of running a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.kv_pool import KVPool, KVSequence
from specdec.sessions import ModelInfo
from specdec.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to feed to one sequence in one forward pass."""

    sequence: KVSequence
    #: Fed after the ``sequence.length`` entries that are in the cache already.
    token_ids: Sequence[int] | torch.Tensor
    #: Logits wanted for the last ``num_logits`` of these tokens; 0 for a prefill chunk that is not the last.
    num_logits: int


class Engine:
    """A loaded model, its KV cache and the forward pass over ragged batches.

    ``load``, ``warm_up``, ``forward`` and ``close`` are called on the device thread; ``pool`` belongs to the event loop.
    """

    info: ModelInfo
    pool: KVPool
    device: torch.device

    @classmethod
    def load(cls, settings: ModelSettings) -> Engine:
        """Load a checkpoint, check that it runs correctly here, and lay out the KV cache.

        Raises:
            ModelNotSupported: this engine would give wrong answers for the model, or cannot run it.
            InvalidRequest: a setting does not fit the model or the machine.
        """
        raise NotImplementedError

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Feed every segment; each sequence grows by its tokens.

        A sequence may stand in one segment only. Returns logits, float32 [sum of num_logits, vocab_size], in the order
        of the segments, on the engine's device.
        """
        raise NotImplementedError

    def warm_up(self) -> None:
        """Run the shapes that serving will run, so that the first request pays for nothing."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the weights and the cache."""
        raise NotImplementedError
