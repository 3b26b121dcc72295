"""Execution paths of a loaded model, tried one after another; each must pass the self-check before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specdec.engine.attention import AttentionKernels
from specdec.engine.cuda.graphs import GraphRunner
from specdec.engine.layers import LayerShape
from specdec.engine.native import attention, library, linears
from specdec.engine.native.decoder import NativeDecoder
from specdec.engine.plan import BatchPlan

logger = logging.getLogger(__name__)

Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class FusedForward(Protocol):
    """A whole model's forward pass outside transformers' modules."""

    hidden_size: int

    def forward(
        self,
        input_ids: torch.Tensor,
        plan: BatchPlan,
        logit_rows: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Ids [1, T] to logits [N, vocab_size] of the rows ``logit_rows`` [N]; writes the cache it was built on.

        ``states``: rows [R] and layers [F], int64, and where their hidden states go, bfloat16 [R, F, hidden_size].
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutionPath:
    """How a model is run: a fused forward pass, or its own modules with attention kernels."""

    name: str
    decoder: FusedForward | None = None
    #: None means torch.
    kernels: AttentionKernels | None = None
    graphs: GraphRunner | None = None


def execution_paths(
    model: PreTrainedModel,
    caches: Caches,
    shapes: Sequence[LayerShape],
    num_threads: int,
    make_graphs: Callable[[], GraphRunner],
    *,
    enforce_eager: bool,
    is_split: bool,
    autotune: str,
) -> Iterator[ExecutionPath]:
    """Yield the execution paths of a model on these caches, the fastest first; each is made when it is asked for.

    On a CPU the model's linear layers are packed for the paths after the first. ``enforce_eager``: only paths that run
    the model's own modules, unchanged. ``is_split``: the model has parts on other ranks. The native decoder exchanges
    nothing with them, and CUDA graphs of exchanges have not been tried.
    """
    if caches[0][0].device.type == "cpu":
        if not enforce_eager:
            decoder = None if is_split else native_decoder(model, caches, shapes, num_threads, autotune)
            if decoder is not None:
                yield ExecutionPath("native decoder", decoder)
            pack_linears(model, num_threads, autotune)
        if (kernels := native_attention()) is not None:
            yield ExecutionPath("native attention", kernels=kernels)
    elif (kernels := triton_attention()) is not None:
        if not enforce_eager and not is_split:
            yield ExecutionPath("cuda graphs", kernels=kernels, graphs=make_graphs())
        yield ExecutionPath("triton attention", kernels=kernels)
    yield ExecutionPath("torch attention")


def native_attention() -> AttentionKernels | None:
    """The native kernels for attention, where they can be compiled and loaded; else the log says why not."""
    return attention if library.load() is not None else None


def triton_attention() -> AttentionKernels | None:
    """The kernels for a GPU, where Triton is installed (it comes with torch's CUDA builds for Linux)."""
    if find_spec("triton") is None:
        logger.warning("attention on this GPU is slow: install triton")
        return None
    from specdec.engine.cuda import attention as kernels  # noqa: PLC0415 - there is no Triton without a GPU

    return kernels


def native_decoder(
    model: PreTrainedModel, caches: Caches, shapes: Sequence[LayerShape], num_threads: int, autotune: str
) -> FusedForward | None:
    """The native decoder built from a model's weights on these caches, where it knows the architecture."""
    return NativeDecoder.build(model, caches, [shape.window for shape in shapes], num_threads, autotune=autotune)


def pack_linears(model: PreTrainedModel, num_threads: int, autotune: str) -> None:
    """Swap a model's linear layers for packed ones that run at memory speed for few rows."""
    linears.pack_linears(model, num_threads, autotune)
