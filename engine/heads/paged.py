"""An EAGLE head, or a prediction layer, on a paged KV cache: ragged batches of sessions, chains of drafted tokens.

Entry i of a sequence stands for the i-th position whose target state is known: the token after it and its features were
fed. Rotary positions count entries, dropped ones included; attention sees their differences only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine.adapters import adopt
from engine.attention import PagedBatch
from engine.batch import Batch, Segment, build_batch
from engine.chains import ChainJob, StopFlags, draw_chains
from engine.cuda.graphs import USUAL_ROWS, Capture, CudaCapture, GraphRunner, reserved_bytes
from engine.cuda.sync import NotCapturable
from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.head_cache import HeadCache, shapes_of
from engine.heads.layered_chains import draft_layered_chains
from engine.heads.mtp import MtpHead
from engine.heads.native.eagle import NativeHead
from engine.heads.self_check import HeadReference
from engine.layers import PAGED, ForwardState, LayerShape, PagedLayer, bind, record_layers
from engine.native import chains as native
from engine.native.linears import pack_linears
from engine.native.sampling import knows
from engine.sampling.drafting import DraftedChain
from engine.sampling.transfer import send
from specdec.process.cores import usable_cores
from specdec.settings import ModelSettings

if TYPE_CHECKING:
    from engine.cuda.chains import CapturedChains

logger = logging.getLogger(__name__)

#: The one choice of "hidden states" that a head's captured passes leave: its outputs.
_OUTPUT: Final = (0,)


class PagedHead(HeadCache):
    """A head, the caches of its layers, and the bookkeeping of the caches."""

    def __init__(self, head: EagleHead | Eagle3Head | MtpHead, settings: ModelSettings, max_model_len: int) -> None:
        """Lay out the cache on the head's device.

        Raises:
            InvalidRequest: there is no memory for it.
            ModelNotSupported: a prediction layer attends in a way that cannot be paged.
        """
        device = next(head.parameters()).device
        has_graphs = device.type == "cuda" and not settings.enforce_eager
        graph_bytes = reserved_bytes(head.config.vocab_size, device) if has_graphs else 0
        shapes = _shapes_of(head)
        super().__init__(shapes, head, settings, max_model_len, activation_bytes=graph_bytes)
        self.head: EagleHead | Eagle3Head | MtpHead = head
        #: The pass that layers of transformers run in.
        self._state = ForwardState()
        if isinstance(head, MtpHead):
            for body in head.bodies:
                body.set_attn_implementation(PAGED)
            for shape, (k_cache, v_cache) in zip(shapes, self._caches, strict=True):
                bind(shape, PagedLayer(k_cache, v_cache, shape.window, self._state))
        self._native: NativeHead | None = None
        self._graphs: GraphRunner | None = None
        self._captured_chains: CapturedChains | None = None
        #: What captured passes read beside their batch, [rows, H].
        self._features = torch.zeros(0, dtype=head.dtype, device=device)
        if not settings.enforce_eager and device.type == "cpu":
            self._native = self._build_native(settings.num_threads or usable_cores(), settings.autotune)
        elif self._kernels is not None and device.type == "cuda":
            self.use_graphs(CudaCapture(device))

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

    def use_graphs(self, capture: Capture) -> None:
        """Replay passes of up to 512 rows from now on; the usual ones are captured here. A head that cannot be
        captured, as experts may not, runs as it is, which the log says.
        """
        head = self.head
        size = head.config.hidden_size if isinstance(head, MtpHead) else head.config.layer.hidden_size
        self._features = torch.zeros(USUAL_ROWS, size, dtype=self.head.dtype, device=self.device)
        self._graphs = GraphRunner(
            lambda batch: self._run(batch, _OUTPUT)[0],
            capture,
            vocab_size=self.head.config.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.pool.block_size,
            device=self.device,
            forward_with_states=self._run,
            hidden_size=size,
            states_dtype=self.head.dtype,
            max_state_choices=self._num_layers,
        )
        from engine.cuda.chains import CapturedChains  # noqa: PLC0415 - there is no Triton without a GPU

        self._captured_chains = CapturedChains(
            self._step,
            capture,
            self._batch,
            max_model_len=self.max_model_len,
            block_size=self.pool.block_size,
            device=self.device,
        )
        try:
            with torch.inference_mode():
                for layer in range(self._num_layers):
                    self._graphs.warm_up((layer,))
        except NotCapturable as error:
            logger.warning("%s runs without CUDA graphs: %s", type(head).__name__, error)
            self._graphs = self._captured_chains = None

    def _step(self, batch: Batch) -> Tensor:
        """Logits [N, V] of a pass over the outputs that lie ready, which leaves its own there."""
        logits, outputs = self._run(batch, _OUTPUT)
        self._features[: len(outputs)].copy_(outputs[:, 0])
        return logits

    @property
    def _num_layers(self) -> int:
        """Layers that are passes of their own."""
        return len(self.head.layers) if isinstance(self.head, MtpHead) else 1

    @property
    def path(self) -> str:
        """How chains are drafted: "native head" in one call, or "torch" with a pass per step."""
        return "torch" if self._native is None else "native head"

    def forward(self, segments: Sequence[Segment], features: Tensor) -> tuple[Tensor, Tensor]:
        """Feed every segment's positions, with their features [T, H] one after another; in inference mode, by torch.

        Returns the outputs at the wanted rows, [sum of num_logits, H], and their logits over the target's vocabulary,
        float32 [N, V]; -inf for tokens that cannot be drafted. Sequences grow by what they were fed.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
            ValueError: a segment is empty or does not fit its sequence.
        """
        x, logits, is_replayed = self._pass(segments, features, _OUTPUT)
        return x[: len(logits)].clone() if is_replayed else x, logits

    def _pass(
        self, segments: Sequence[Segment], features: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, bool]:
        """Outputs and logits as :meth:`_run` gives them, and whether the former last until the next replay only."""
        batch = self._batch(segments)
        replayed = None
        if self._graphs is not None and len(features) <= len(self._features):
            self._features[: len(features)].copy_(features)
            replayed = self._graphs.run_with_states(batch, layers)
        logits, x = replayed or self._run(batch.to(self.device), layers, features)
        _grow(segments, batch)
        return x[:, 0], logits, replayed is not None

    def _run(self, batch: Batch, layers: tuple[int, ...], features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and outputs [N, 1, H] of a batch on the device, by one layer; where there are several, outputs
        of all rows, [T, 1, H]. Features None: those that lie ready.
        """
        features = self._features[: batch.plan.num_rows] if features is None else features
        x = self._outputs(batch, features, *layers)
        wanted = x.index_select(0, batch.logit_rows)
        logits = self.head.to_target_logits(self.head.logits(wanted).float())
        return logits, (x if self._num_layers > 1 else wanted)[:, None]

    def _feed_layer(self, segments: Sequence[Segment], features: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Feed rows [T, H] to one prediction layer: outputs [T, H], and logits of the wanted rows. Sequences grow by
        what they were fed.
        """
        return self._pass(segments, features, (layer,))[:2]

    def _outputs(self, batch: Batch, features: Tensor, layer: int = 0) -> Tensor:
        """Outputs [T, H] of a batch on the device."""
        paged = PagedBatch(batch)

        def attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            self.write(layer, key, value, paged)
            return self.attend(layer, query, paged)

        self._state.batch, self._state.kernels = paged, self._kernels
        try:
            rows = batch.input_ids[0], features, batch.plan.positions, attend
            x: Tensor = self.head(*rows, layer) if layer else self.head(*rows)
        finally:
            self._state.batch = None
        return x

    def step(self, segments: Sequence[Segment], states: Tensor, *, are_features: bool) -> tuple[Tensor, Tensor]:
        """Feed rows with the target's states [T, num_features], with what it fused of them [T, H], or with outputs of
        earlier rows [T, H]; in inference mode.

        Returns the outputs at the wanted rows, [N, H], and their logits over the target's vocabulary, float32 [N, V].
        Sequences grow by what they were fed. Raises like :meth:`forward`.
        """
        self.copy_blocks()
        are_features = are_features and not self.is_fused(states)
        if self._native is None:
            return self.forward(segments, self.fused(states) if are_features else self._sent(states))
        batch = self._batch(segments)
        logits, x = self._native.forward(
            batch.input_ids[0], states, batch.plan, batch.logit_rows, are_features=are_features
        )
        _grow(segments, batch)
        return x, self.head.to_target_logits(logits)

    def draft_chains(self, jobs: Sequence[ChainJob], stop: StopFlags | None = None) -> list[DraftedChain]:
        """Ingest what the jobs feed, with their features, then draft a chain for those that want one.

        Sequences grow by ``token_ids`` alone: entries of drafted tokens are on the head's own features and are
        ignored. Raises like :meth:`forward`, after which sequences may have grown: roll them back.
        """
        self.copy_blocks()
        own = [job.features for job in jobs if job.features is not None]
        assert len(own) == len(jobs), "a head's jobs bring features"
        if len({(states.shape[1], states.dtype) for states in own}) > 1:  # of different targets
            jobs = [replace(job, features=states) for job, states in zip(jobs, self.alike(own), strict=True)]
        if self._native is not None and all(knows(job.state) for job in jobs):
            size, limit = self.pool.block_size, self.max_model_len
            return native.draft_chains(self._native, jobs, stop, block_size=size, max_model_len=limit)
        with torch.inference_mode():
            if self._num_layers > 1:
                features = [self.fused(job.features) for job in jobs if job.features is not None]
                return draft_layered_chains(self._feed_layer, self._num_layers, jobs, features, stop)
            x, logits = self._ingest(jobs)
            drafting = [i for i, job in enumerate(jobs) if job.num_tokens]
            if not drafting:
                return [DraftedChain(())] * len(jobs)
            lengths = [job.sequence.length for job in jobs]

            def feed(continuing: Sequence[int], token_ids: Tensor) -> Tensor:
                at = send(list(continuing), self.device)
                segments = [Segment(jobs[i].sequence, token_ids[n : n + 1], 1) for n, i in enumerate(continuing)]
                out, logits = self.forward(segments, x.index_select(0, at))
                x.index_copy_(0, at, out)
                return logits

            if len(drafting) < len(jobs):
                logits = logits.index_select(0, send(drafting, self.device))

            def prepare() -> None:
                self._features[: len(drafting)].copy_(x.index_select(0, send(drafting, self.device)))

            captured, sequences = self._captured_chains, [jobs[i].sequence for i in drafting]
            extend = None if captured is None else partial(captured.extend, sequences, prepare=prepare)
            chains = draw_chains(logits, jobs, feed, stop, extend)
            for job, length in zip(jobs, lengths, strict=True):
                job.sequence.length = length
            return chains

    def _ingest(self, jobs: Sequence[ChainJob]) -> tuple[Tensor, Tensor]:
        """One pass over all that is fed; returns outputs [jobs, H] and logits at each job's last position."""
        features = [job.features for job in jobs if job.features is not None]
        segments = [Segment(job.sequence, job.token_ids, 1) for job in jobs]
        return self.forward(segments, self.fused(torch.cat(features)))

    def _sent(self, states: Tensor) -> Tensor:
        return send(states, self.device).to(self.head.dtype)

    def _batch(self, segments: Sequence[Segment]) -> Batch:
        return build_batch(
            segments,
            block_size=self.pool.block_size,
            vocab_size=self.head.config.vocab_size,
            max_model_len=self.max_model_len,
        )


def _shapes_of(head: EagleHead | Eagle3Head | MtpHead) -> list[LayerShape]:
    """How the head's layers attend."""
    if not isinstance(head, MtpHead):
        return shapes_of(head.attentions, head.dtype)
    shapes = []
    for body in head.bodies:
        adopt(body)
        shapes += record_layers(body, 1, head.embed_tokens.weight.device)[0]
    return shapes


def _grow(segments: Sequence[Segment], batch: Batch) -> None:
    """Sequences have what they were fed."""
    for segment, kv_len in zip(segments, batch.kv_lens, strict=True):
        segment.sequence.length = kv_len
