"""The paged KV cache of a head's layers, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention import AttentionKernels, PagedBatch, paged_attention, write_kv
from engine.compaction import copy_blocks
from engine.heads.head import DraftHead
from engine.heads.layer import Attention
from engine.kv_pool import KVPool
from engine.layers import LayerShape, allocate_caches
from engine.loading import acceleration
from engine.loading.memory import size_cache
from engine.sampling.transfer import send
from specdec.settings import ModelSettings


class HeadCache:
    """Keys and values of every layer, and the bookkeeping of their blocks."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        head: DraftHead,
        settings: ModelSettings,
        max_model_len: int,
        *,
        activation_bytes: int = 0,
    ) -> None:
        """Lay out the cache of the head's layers on its device, beside ``activation_bytes`` for passes.

        Raises:
            InvalidRequest: there is no memory for it.
        """
        self.device = next(head.parameters()).device
        self.head: Any = head
        num_blocks, _, self.max_model_len = size_cache(
            settings,
            shapes,
            device=self.device,
            max_model_len=max_model_len,
            weight_bytes=sum(parameter.nbytes for parameter in head.parameters()),
            activation_bytes=activation_bytes,
        )
        self.pool = KVPool(num_blocks, settings.block_size)
        self._caches = allocate_caches(shapes, num_blocks, settings.block_size, self.device)
        self._kernels: AttentionKernels | None = None
        if not settings.enforce_eager:
            name, load = (
                ("native attention", acceleration.native_attention)
                if self.device.type == "cpu"
                else ("triton attention", acceleration.triton_attention)
            )
            self._kernels = acceleration.checked(name, load(), shapes, settings.block_size, self.device)

    def write(self, layer: int, key: Tensor, value: Tensor, paged: PagedBatch) -> None:
        """Put rows' keys and values [T, Hkv, D] into the slots of the batch."""
        k_cache, v_cache = self._caches[layer]
        if self._kernels is None:
            write_kv(k_cache, v_cache, key, value, paged)
        else:
            self._kernels.write_kv(k_cache, v_cache, key, value, paged.batch.plan)

    def attend(self, layer: int, query: Tensor, paged: PagedBatch, window: int | None = None) -> Tensor:
        """Attention of the batch's rows [T, Hq, D] to what is cached of their sequences."""
        (k_cache, v_cache), scale = self._caches[layer], query.shape[-1] ** -0.5
        if self._kernels is None:
            return paged_attention(query, k_cache, v_cache, paged, scale=scale, window=window)
        return self._kernels.paged_attention(query, k_cache, v_cache, paged.batch.plan, scale, window)

    def alike(self, states: list[Tensor]) -> list[Tensor]:
        """States of several sequences: all as the target has them, or all fused; on the CPU, of one dtype."""
        if any(map(self.is_fused, states)):
            with torch.inference_mode():
                states = [each if self.is_fused(each) else self.fused(each).to(each.device) for each in states]
        return states if len({each.dtype for each in states}) == 1 else [each.float() for each in states]

    def is_fused(self, states: Tensor) -> bool:
        """Whether the target has evaluated the head's :attr:`~engine.heads.head.DraftHead.state_map`."""
        width: int = self.head.num_features
        return states.shape[1] != width

    def fused(self, states: Tensor) -> Tensor:
        """States as features, [T, H] on the head's device; those that the target has fused are features already."""
        sent = send(states, self.device).to(self.head.dtype)
        out: Tensor = sent if self.is_fused(states) else self.head.fuse(sent)
        return out

    def copy_blocks(self) -> None:
        """Make the copies of blocks that new sequences share in part wait for; due before any pass."""
        if copies := self.pool.take_copies():
            for cache in self._caches:
                copy_blocks(cache, copies)


def shapes_of(attentions: Sequence[Attention], dtype: torch.dtype) -> list[LayerShape]:
    """How layers of our own attend."""
    return [
        LayerShape(
            module=attention,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            value_dim=attention.head_dim,
            dtype=dtype,
            window=None,
            chunk=None,
        )
        for attention in attentions
    ]
