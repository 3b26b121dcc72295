"""An EAGLE head, or a prediction layer, on a paged KV cache: ragged batches of sessions, chains of drafted tokens.

Entry i of a sequence stands for the i-th position whose target state is known: the token after it and its features were
fed. Rotary positions count entries, dropped ones included; attention sees their differences only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.adapters import adopt
from engine.attention import AttentionKernels, PagedBatch, paged_attention, write_kv
from engine.batch import Batch, Segment, build_batch
from engine.chains import ChainJob, StopFlags, draw_chains
from engine.compaction import copy_blocks
from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.mtp import MtpHead
from engine.heads.native.eagle import NativeHead
from engine.heads.self_check import HeadReference
from engine.kv_pool import KVPool
from engine.layers import PAGED, ForwardState, LayerShape, PagedLayer, allocate_caches, bind, record_layers
from engine.loading import acceleration
from engine.loading.memory import size_cache
from engine.native import chains as native
from engine.native.linears import pack_linears
from engine.native.sampling import knows
from engine.sampling.drafting import DraftedChain
from engine.sampling.transfer import send
from specdec.process.cores import usable_cores
from specdec.settings import ModelSettings

logger = logging.getLogger(__name__)


class PagedHead:
    """A head, the caches of its layers, and the bookkeeping of the caches."""

    def __init__(self, head: EagleHead | Eagle3Head | MtpHead, settings: ModelSettings, max_model_len: int) -> None:
        """Lay out the cache on the head's device.

        Raises:
            InvalidRequest: there is no memory for it.
            ModelNotSupported: a prediction layer attends in a way that cannot be paged.
        """
        device = head.embed_tokens.weight.device
        shapes = _shapes_of(head)
        num_blocks, _, self.max_model_len = size_cache(
            settings,
            shapes,
            device=device,
            max_model_len=max_model_len,
            weight_bytes=sum(parameter.nbytes for parameter in head.parameters()),
        )
        self.head = head
        self.device = device
        self.pool = KVPool(num_blocks, settings.block_size)
        self._caches = allocate_caches(shapes, num_blocks, settings.block_size, device)
        #: The pass that the layers of transformers run in.
        self._state = ForwardState()
        if isinstance(head, MtpHead):
            head.body.set_attn_implementation(PAGED)
            for shape, (k_cache, v_cache) in zip(shapes, self._caches, strict=True):
                bind(shape, PagedLayer(k_cache, v_cache, shape.window, self._state))
        self._kernels: AttentionKernels | None = None
        self._native: NativeHead | None = None
        caches = settings.block_size, device
        if not settings.enforce_eager and device.type == "cpu":
            self._kernels = acceleration.checked("native attention", acceleration.native_attention(), shapes, *caches)
            self._native = self._build_native(settings.num_threads or usable_cores(), settings.autotune)
        elif not settings.enforce_eager:
            self._kernels = acceleration.checked("triton attention", acceleration.triton_attention(), shapes, *caches)

    def _build_native(self, num_threads: int, autotune: str) -> NativeHead | None:
        """The head on native kernels, if they agree with its module; else the module gets packed layers alone."""
        limit = self.pool.total_blocks // 2 * self.pool.block_size
        native_head = reference = None
        if not isinstance(self.head, MtpHead):
            reference = HeadReference(self.head, limit) if limit > 0 else None
            native_head = NativeHead.build(self.head, self._caches, num_threads, autotune)
        if native_head is None:
            pack_linears(self.head, num_threads, autotune)
            return None
        difference = None if reference is None else reference.difference(native_head, self.pool)
        if difference is not None:
            logger.warning("%s: the native head is not used: %s", type(self.head).__name__, difference)
            return None
        torch.set_num_threads(1)  # the kernels bring their own; torch's would spin beside them
        return native_head

    @property
    def path(self) -> str:
        """How chains are drafted: "native head" in one call, or "torch" with a pass per step."""
        return "torch" if self._native is None else "native head"

    def forward(self, segments: Sequence[Segment], features: Tensor) -> Tensor:
        """Feed every segment's positions, with their features [T, H] one after another; in inference mode, by torch.

        Returns [sum of num_logits, H]: the outputs at the wanted rows. Sequences grow by what they were fed.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
            ValueError: a segment is empty or does not fit its sequence.
        """
        batch = self._batch(segments)
        on_device = batch.to(self.device)
        plan = on_device.plan
        paged = PagedBatch(on_device)

        def attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            (k_cache, v_cache), scale = self._caches[layer], query.shape[-1] ** -0.5
            if self._kernels is None:
                write_kv(k_cache, v_cache, key, value, paged)
                return paged_attention(query, k_cache, v_cache, paged, scale=scale)
            self._kernels.write_kv(k_cache, v_cache, key, value, plan)
            return self._kernels.paged_attention(query, k_cache, v_cache, plan, scale)

        self._state.batch, self._state.kernels = paged, self._kernels
        try:
            x: Tensor = self.head(on_device.input_ids[0], features, plan.positions, attend)
        finally:
            self._state.batch = None
        for segment, kv_len in zip(segments, batch.kv_lens, strict=True):
            segment.sequence.length = kv_len
        return x if len(on_device.logit_rows) == len(x) else x.index_select(0, on_device.logit_rows)

    def logits(self, x: Tensor) -> Tensor:
        """Over the target's vocabulary, float32 [N, V]; -inf for tokens that cannot be drafted."""
        return self.head.to_target_logits(self.head.logits(x).float())

    def step(self, segments: Sequence[Segment], states: Tensor, *, are_features: bool) -> tuple[Tensor, Tensor]:
        """Feed rows with the target's states [T, num_features], with what it fused of them [T, H], or with outputs of
        earlier rows [T, H]; in inference mode.

        Returns the outputs at the wanted rows, [N, H], and their logits over the target's vocabulary, float32 [N, V].
        Sequences grow by what they were fed. Raises like :meth:`forward`.
        """
        self._copy_blocks()
        are_features = are_features and not self._is_fused(states)
        if self._native is None:
            x = self.forward(segments, self._fused(states) if are_features else self._sent(states))
            return x, self.logits(x)
        batch = self._batch(segments)
        logits, x = self._native.forward(
            batch.input_ids[0], states, batch.plan, batch.logit_rows, are_features=are_features
        )
        for segment, kv_len in zip(segments, batch.kv_lens, strict=True):
            segment.sequence.length = kv_len
        return x, self.head.to_target_logits(logits)

    def alike(self, states: list[Tensor]) -> list[Tensor]:
        """States of several sequences: all as the target has them, or all fused; on the CPU, of one dtype."""
        if any(map(self._is_fused, states)):
            with torch.inference_mode():
                states = [each if self._is_fused(each) else self._fused(each).to(each.device) for each in states]
        return states if len({each.dtype for each in states}) == 1 else [each.float() for each in states]

    def _is_fused(self, states: Tensor) -> bool:
        """Whether the target has evaluated the head's :attr:`~engine.heads.head.DraftHead.state_map`."""
        return states.shape[1] != self.head.num_features

    def _fused(self, states: Tensor) -> Tensor:
        """The target's states as features, [T, H] on the head's device."""
        return self.head.fuse(self._sent(states))

    def _sent(self, states: Tensor) -> Tensor:
        return send(states, self.device).to(self.head.dtype)

    def draft_chains(self, jobs: Sequence[ChainJob], stop: StopFlags | None = None) -> list[DraftedChain]:
        """Ingest what the jobs feed, with their features, then draft a chain for those that want one.

        Sequences grow by ``token_ids`` alone: entries of drafted tokens are on the head's own features and are
        ignored. Raises like :meth:`forward`, after which sequences may have grown: roll them back.
        """
        self._copy_blocks()
        own = [job.features for job in jobs if job.features is not None]
        assert len(own) == len(jobs), "a head's jobs bring features"
        if len({(states.shape[1], states.dtype) for states in own}) > 1:  # of different targets
            jobs = [replace(job, features=states) for job, states in zip(jobs, self.alike(own), strict=True)]
        if self._native is not None and all(knows(job.state) for job in jobs):
            size, limit = self.pool.block_size, self.max_model_len
            return native.draft_chains(self._native, jobs, stop, block_size=size, max_model_len=limit)
        with torch.inference_mode():
            x = self._ingest(jobs)
            drafting = [i for i, job in enumerate(jobs) if job.num_tokens]
            if not drafting:
                return [DraftedChain(())] * len(jobs)
            lengths = [job.sequence.length for job in jobs]

            def feed(continuing: Sequence[int], token_ids: Tensor) -> Tensor:
                at = send(list(continuing), self.device)
                segments = [Segment(jobs[i].sequence, token_ids[n : n + 1], 1) for n, i in enumerate(continuing)]
                out = self.forward(segments, x.index_select(0, at))
                x.index_copy_(0, at, out)
                return self.logits(out)

            first = x if len(drafting) == len(jobs) else x.index_select(0, send(drafting, self.device))
            chains = draw_chains(self.logits(first), jobs, feed, stop)
            for job, length in zip(jobs, lengths, strict=True):
                job.sequence.length = length
            return chains

    def _ingest(self, jobs: Sequence[ChainJob]) -> Tensor:
        """One pass over all that is fed; returns the outputs at each job's last position, [jobs, H]."""
        features = [job.features for job in jobs if job.features is not None]
        states = torch.cat(features)
        states = self._sent(states) if self._is_fused(states) else self._fused(states)
        return self.forward([Segment(job.sequence, job.token_ids, 1) for job in jobs], states)

    def _batch(self, segments: Sequence[Segment]) -> Batch:
        return build_batch(
            segments,
            block_size=self.pool.block_size,
            vocab_size=self.head.config.vocab_size,
            max_model_len=self.max_model_len,
        )

    def _copy_blocks(self) -> None:
        """Make the copies of blocks that new sequences share in part wait for; due before any pass."""
        if copies := self.pool.take_copies():
            for cache in self._caches:
                copy_blocks(cache, copies)


def _shapes_of(head: EagleHead | Eagle3Head | MtpHead) -> list[LayerShape]:
    """How the head's layers attend."""
    if isinstance(head, MtpHead):
        adopt(head.body)
        return record_layers(head.body, 1, head.embed_tokens.weight.device)[0]
    return [
        LayerShape(
            module=attention,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            value_dim=attention.head_dim,
            dtype=head.dtype,
            window=None,
            chunk=None,
        )
        for attention in head.attentions
    ]
