"""The model's own modules, with the attention kernels of a device, and on a GPU by replaying graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.attention import AttentionKernels
from engine.batch import Batch
from engine.compaction import Kept, move_entries, moves_of
from engine.cuda.graphs import Forward, GraphRunner
from engine.modules import ModelModules
from engine.parallel import messages
from engine.runner import PassLimits, Results, Runner
from engine.sampling.transfer import send

if TYPE_CHECKING:  # it needs Triton
    from engine.cuda.decoder import FusedDecoder


class TorchRunner(Runner):
    """Passes by the model's modules; on a split model by all ranks."""

    def __init__(
        self,
        name: str,
        modules: ModelModules,
        limits: PassLimits,
        kernels: AttentionKernels | None = None,
        fused: FusedDecoder | None = None,
    ) -> None:
        """``kernels``: of the attention; None means torch's. ``fused`` runs the passes in place of the modules."""
        super().__init__(name, limits)
        #: What replays the passes whose shapes it knows.
        self.graphs: GraphRunner | None = None
        #: :meth:`ModelModules.logits` and :meth:`ModelModules.logits_and_states` with the kernels. They do not hold the
        #: runner, so neither does a graph that captured them: a closed engine frees its memory at once.
        self.run_modules: Forward = partial(modules.logits, kernels=kernels)
        self.run_modules_with_states: Callable[..., tuple[torch.Tensor, torch.Tensor]] = partial(
            modules.logits_and_states, kernels=kernels
        )
        if fused is not None:
            self.run_modules, self.run_modules_with_states = fused.logits, fused.logits_and_states
        self._modules = modules
        self._move = move_entries if kernels is None else kernels.move_entries

    def run_everywhere(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> Results:
        """Run a pass on all ranks."""
        message = partial(messages.encode_pass, batch, rows, layers)
        return self._modules.everywhere(message, partial(self.run, batch, rows, layers))

    def run(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> Results:
        """Run a pass on this rank."""
        device = self._modules.device
        if layers:
            wanted = send(torch.tensor(rows, dtype=torch.int64), device)
            both = None if self.graphs is None else self.graphs.run_with_states(batch, layers)
            if both is not None:
                return both[0], both[1].index_select(0, wanted)
            logits, states = self.run_modules_with_states(batch.to(device), layers, wanted)
            return logits.float(), states
        replayed = None if self.graphs is None else self.graphs.run(batch)
        return self.run_modules(batch.to(device)).float() if replayed is None else replayed, None

    def keep_rows(self, moving: Sequence[Kept]) -> None:
        """Move the entries on all ranks."""
        moves = moves_of(moving, self.limits["block_size"])
        with torch.inference_mode():
            self._modules.everywhere(
                partial(messages.encode_moves, moves), partial(self._move, self._modules.caches, moves)
            )

    def warm_up(self) -> None:
        """Capture the graphs."""
        if self.graphs is not None:
            with torch.inference_mode():
                self.graphs.warm_up()
