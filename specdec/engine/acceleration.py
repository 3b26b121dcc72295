"""Faster ways to run a loaded model, tried one after another; each must pass the self-check before it is used."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from specdec.engine.attention import AttentionKernel
from specdec.engine.layers import LayerShape
from specdec.engine.plan import BatchPlan

logger = logging.getLogger(__name__)

Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Decoder(Protocol):
    """A whole model's forward pass outside transformers' modules."""

    def forward(self, input_ids: torch.Tensor, plan: BatchPlan, logit_rows: torch.Tensor) -> torch.Tensor:
        """Ids [1, T] to logits [N, vocab_size] of the rows ``logit_rows`` [N]; writes the cache it was built on."""
        ...


def _native_module(name: str) -> Any | None:
    """A module of :mod:`specdec.engine.native`, or None where the kernels cannot be compiled or loaded here."""
    try:
        library = importlib.import_module("specdec.engine.native.library")
        if library.load() is None:  # has logged why
            return None
        return importlib.import_module(f"specdec.engine.native.{name}")
    except ImportError:
        return None


def native_attention() -> AttentionKernel | None:
    """The native paged attention, where it can be had."""
    module = _native_module("attention")
    return None if module is None else cast("AttentionKernel", module.paged_attention)


def native_decoder(
    model: PreTrainedModel, caches: Caches, shapes: Sequence[LayerShape], num_threads: int
) -> Decoder | None:
    """The native decoder built from a model's weights on these caches, where it knows the architecture."""
    module = _native_module("decoder")
    if module is None:
        return None
    windows = [shape.window for shape in shapes]
    return cast("Decoder | None", module.NativeDecoder.build(model, caches, windows, num_threads))


def pack_linears(model: PreTrainedModel, num_threads: int) -> None:
    """Swap a model's linear layers for packed ones that run at memory speed for few rows."""
    try:
        linears = importlib.import_module("specdec.engine.linears")
    except ImportError:
        return
    linears.pack_linears(model, num_threads)
