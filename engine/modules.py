"""A model's own modules on the paged cache, on this rank and, where the model is split, on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from engine.attention import AttentionKernels, PagedBatch
from engine.batch import Batch
from engine.hidden_states import StateTap
from engine.layers import ForwardState, LayerShape, PagedLayer, bind
from engine.mixers import Mixer, RecurrentCache
from engine.parallel.ranks import Ranks, Words
from engine.recurrent.even import ask_for

T = TypeVar("T")


class ModelModules:
    """The modules, bound to key and value caches [num_blocks + 1, Hkv, block_size, D] of every layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        device: torch.device,
        mixers: Sequence[Mixer] = (),
        num_slots: int = 0,
    ) -> None:
        """``num_slots``: sequences whose recurrent states are kept."""
        self.device = device
        #: Key and value caches, one after another.
        self.caches = [cache for pair in caches for cache in pair]
        #: The ranks of a split model; None while they load in step, and where it is not split.
        self.ranks: Ranks | None = None
        self._model = model
        self._tap = StateTap(model, shapes, [mixer.module for mixer in mixers])
        self._state = ForwardState()
        self._mixers = mixers
        self.num_layers = self._tap.num_layers
        for shape, (k_cache, v_cache) in zip(shapes, caches, strict=True):
            bind(shape, PagedLayer(k_cache, v_cache, shape.window, self._state))
        for mixer in mixers:
            mixer.bind([shape.allocate(num_slots, device) for shape in mixer.shapes], self._state)

    def logits(self, batch: Batch, *, kernels: AttentionKernels | None) -> torch.Tensor:
        """Logits [N, vocab_size] of a batch on the device; ``kernels`` None: torch's attention."""
        num_logits = batch.logit_rows.shape[0]
        # An output layer is not asked to handle no rows at all: it gets one, which is dropped.
        rows = batch.logit_rows if num_logits else batch.plan.slots.new_zeros(1)
        self._state.batch, self._state.kernels = PagedBatch(batch), kernels
        recurrences = None if kernels is None or not self._mixers else kernels.RECURRENCES
        try:
            with ask_for(None if recurrences is None else recurrences.EVEN):
                output = self._model(
                    input_ids=batch.input_ids,
                    position_ids=batch.plan.positions.unsqueeze(0),
                    use_cache=False,
                    logits_to_keep=rows,
                )
        finally:
            self._state.batch = None
        logits: torch.Tensor = output.logits[0]
        return logits[:num_logits]

    def logits_and_states(
        self,
        batch: Batch,
        layers: tuple[int, ...],
        rows: torch.Tensor | None = None,
        *,
        kernels: AttentionKernels | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`logits`, and hidden states of some rows (int64 [R]), or of all: [R, layers, H]."""
        with self._tap.catch(layers, rows) as caught:
            logits = self.logits(batch, kernels=kernels)
        return logits, caught[0]

    @property
    def state_caches(self) -> list[RecurrentCache]:
        """Those of all recurrences."""
        return [cache for mixer in self._mixers for cache in mixer.caches]

    def everywhere(self, message: Callable[[], Words], own_part: Callable[[], T]) -> T:
        """Do something on this rank, and on the others what the message says."""
        return own_part() if self.ranks is None else self.ranks.lead(message(), own_part)
