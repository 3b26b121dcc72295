"""The whole forward pass of a model in one native call: no Python between layers.

Known are the classes of :data:`~engine.native.layer_parts.FAMILIES` exactly, without experts, and rotary embeddings
that do not change with the length of a batch. Anything else is left to the model's own modules.

Activations are float32 whatever the weights are, with two exceptions for bfloat16 weights: the cache is bfloat16, as
transformers' is, and where the machine multiplies bfloat16 directly, what enters a linear layer is rounded to it. So
every rounding here is one transformers makes too, among many more. What enters a layer with int8 weights is rounded to
16 bits of its row's largest element; before grouped weights, to 8 bits of the largest of 64 neighbours.

The cache is this decoder's own: a block whose size is a multiple of the kernels' tile (32 entries with AVX-512) holds
its keys as [Hkv, D, block], not [Hkv, block, D], in the same memory.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engine.compaction import Kept
from engine.mixers import Mixer
from engine.native.layer_parts import norm_eps, norm_weight
from engine.native.library import DTYPES, WEIGHT_DTYPES, NativeLibrary, load
from engine.native.linears import matrix_of
from engine.native.model_parts import Caches, LayerCache, ModelParts, RotaryTables, unknown_model
from engine.native.model_structs import CBatch, CKept, CModel, CPlan
from engine.native.packing import Packing
from engine.plan import BatchPlan
from engine.trimmed_outputs import TrimmedOutputs
from specdec.errors import InvalidRequest

logger = logging.getLogger(__name__)


class NativeModel:
    """Packed weights and a cache as native passes read them."""

    #: Numbers of the target's hidden states that a row is fed with beside its token; 0 where this is no draft head.
    num_features = 0
    #: The same where the target has fused them.
    fused_width = 0

    def __init__(
        self,
        packing: Packing,
        model: CModel,
        caches: Sequence[LayerCache | None],
        tables: RotaryTables,
    ) -> None:
        """``model`` points into what the packing keeps; its ``vocab`` counts the ids of tokens fed. ``caches``: of each
        layer; None where one does not attend.
        """
        self.library = packing.library
        self.num_threads = packing.num_threads
        self.vocab_size: int = model.vocab
        #: What every pass reads, all but the rows of the embedding.
        self.weight_bytes = packing.memory.num_bytes
        #: Of its weights.
        self.prefetch = packing.prefetch
        self._model = model
        self._kept = (packing.kept, caches)  # what the structures point into
        self._tabulate = tables
        half = model.rotary_dim // 2
        self._tables: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0, half), torch.empty(0, half))
        self._k_caches, self._v_caches = (
            (ctypes.c_void_p * len(caches))(*(None if cache is None else cache[i].data_ptr() for cache in caches))
            for i in range(2)
        )

    @property
    def address(self) -> int:
        """Where the native ``Model`` lies (decoder.h); valid as long as this object lives."""
        return ctypes.addressof(self._model)

    def check(self, status: int) -> None:
        """Raise what a native pass returned, unless that is 0."""
        if status == -2:
            raise InvalidRequest(f"a token id is outside the vocabulary of {self.vocab_size} tokens", param="token_ids")
        if status:
            raise MemoryError("working memory for a pass")

    def caches_for(self, max_kv_len: int) -> CBatch:
        """A ``Batch`` that names the caches, and rotary tables for sequences up to a length; no rows yet."""
        if max_kv_len > self._tables[0].shape[0]:
            self._extend_tables(max_kv_len)
        cosines, sines = self._tables
        return CBatch(
            k_caches=ctypes.addressof(self._k_caches),
            v_caches=ctypes.addressof(self._v_caches),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )

    def _extend_tables(self, length: int) -> None:
        """Tabulate at least ``length`` positions."""
        length = max(256, 1 << (length - 1).bit_length())
        with torch.inference_mode(False):
            self._tables = self._tabulate(length)


class NativeDecoder(NativeModel):
    """A model's forward pass on its packed weights and its cache."""

    def __init__(
        self,
        library: NativeLibrary,
        model: Any,
        caches: Caches,
        windows: Sequence[int | None],
        num_threads: int,
        *,
        mixers: Sequence[Mixer],
        autotune: str,
    ) -> None:
        """Pack the weights of a model that :meth:`build` found suitable. Its modules run on the packed weights too."""
        config, parts = model.config, ModelParts(model)
        layers, norm = parts.layers, parts.final_norm
        packing = Packing(library, parts.groups, num_threads)
        (output,) = parts.output.layers
        weight_dtype = matrix_of(output).dtype
        #: Columns of logits that a pass writes; :meth:`widen` makes those of the vocabulary of them.
        self.num_outputs: int = output.out_features
        #: Of a draft that drafts some tokens alone.
        self._trimmed: TrimmedOutputs | None = model.lm_head if isinstance(model.lm_head, TrimmedOutputs) else None
        vocab_size, target_ids = self.num_outputs, None
        if self._trimmed is not None:
            vocab_size = self._trimmed.vocab_size
            target_ids = packing.keep(self._trimmed.token_ids.to(torch.int32)).data_ptr()
        attention, gates_heads = parts.attention[0], parts.gates_heads
        attending = iter(zip(caches, windows, strict=True))
        kept = [next(attending) if layer.attention is not None else (None, None) for layer in layers]
        states = {id(mixer.module): mixer for mixer in mixers}
        packed = [
            packing.layer(layer, window, states.get(id(layer.mixer)))
            for layer, (_, window) in zip(layers, kept, strict=True)
        ]
        embedding = packing.keep(model.get_input_embeddings().weight.detach())
        native = CModel(
            layers=packing.array(packed),
            embedding=embedding.data_ptr(),
            final_norm=packing.floats(norm_weight(norm)),
            lm_head=packing.linear(parts.output),
            num_layers=len(layers),
            hidden=config.hidden_size,
            intermediate=max(parts.intermediate_sizes, default=0),
            target_ids=target_ids,
            vocab=vocab_size,
            outputs=self.num_outputs,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            rotary_dim=parts.rotary_dim,
            eps=norm_eps(norm),
            scale=attention.scaling,
            embedding_scale=parts.embedding_scale,
            gates_heads=gates_heads,
            gates_mlp=bool(layers[0].names.gate),
            weight_dtype=WEIGHT_DTYPES[weight_dtype],
            embedding_dtype=DTYPES[embedding.dtype],
            cache_dtype=DTYPES[caches[0][0].dtype],
            **packing.choose_prefetch(autotune),
        )
        super().__init__(packing, native, [cache for cache, _ in kept], parts.rotary_tables)
        self._states = [mixer.caches for mixer in mixers]  # what the structures point into, too
        self.hidden_size: int = config.hidden_size
        #: Whether it has recurrent states.
        self.is_recurrent = bool(mixers)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        caches: Caches,
        windows: Sequence[int | None],
        num_threads: int,
        *,
        mixers: Sequence[Mixer] = (),
        autotune: str = "cached",
    ) -> NativeDecoder | None:
        """The decoder of a transformers model, or None where it is not of a known shape or there are no kernels.

        caches: key and value cache of every layer that attends, [num_blocks, Hkv, block, D] each, float32 or bfloat16.
        windows: of these layers, the entries a row sees, itself included; None for all. ``mixers``: the recurrent parts
        of layers, with their states. The model's linear layers are replaced by packed ones, so it can still be run by
        itself; their own weights are freed one by one. ``autotune``: see
        :func:`~engine.native.autotune.choose_prefetch`.
        """
        library = load()
        if library is None:
            return None
        reason = unknown_model(model, caches, windows, mixers)
        if reason is not None:
            logger.info("the native decoder does not know this model: %s", reason)
            return None
        with torch.inference_mode(False), torch.no_grad():
            return cls(library, model, caches, windows, num_threads, mixers=mixers, autotune=autotune)

    def forward(
        self,
        input_ids: torch.Tensor,
        plan: BatchPlan,
        logit_rows: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        state_plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the cache and return the logits, float32 [N, vocab_size], of the rows ``logit_rows`` (int64 [N]).

        input_ids int64 [T] or [1, T]. ``states``: rows (int64 [R]) whose hidden states are wanted, of which layers
        (int64 [F]), and where they are written: bfloat16 [R, F, hidden_size]. ``state_plan``: what a pass does to
        recurrent states, :attr:`~engine.recurrent.plan.StatePlan.numbers`.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        logits = torch.empty(logit_rows.shape[0], self.num_outputs)
        batch = self.batch_of(input_ids, plan, logit_rows, logits)
        batch.state_plan = None if state_plan is None else state_plan.data_ptr()
        if states is not None:
            rows, layers, out = states
            batch.state_rows, batch.num_states = rows.data_ptr(), rows.shape[0]
            batch.state_layers, batch.num_state_layers = layers.data_ptr(), layers.shape[0]
            batch.states = out.data_ptr()
        self.check(self.library.decoder_forward(self.address, ctypes.addressof(batch), self.num_threads))
        return self.widen(logits)

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [N, num_outputs] as a pass writes them to [N, V]."""
        return logits if self._trimmed is None else self._trimmed.widen(logits)

    def batch_of(
        self, input_ids: torch.Tensor, plan: BatchPlan, logit_rows: torch.Tensor, logits: torch.Tensor
    ) -> CBatch:
        """The native ``Batch`` (decoder.h) of a pass; the tensors must outlive it. ``logits`` float32 [N, V]."""
        batch = self.caches_for(plan.max_kv_len)
        batch.token_ids = input_ids.data_ptr()
        batch.logit_rows = logit_rows.data_ptr()
        batch.num_logits = logit_rows.shape[0]
        batch.plan = CPlan.of(plan)
        batch.logits = logits.data_ptr()
        return batch

    def keep_rows(self, kept: Sequence[Kept], block_size: int) -> None:
        """:func:`engine.compaction.move_entries` of what is kept, on this decoder's layout of the cache."""
        rows = array("q", [row for one in kept for row in one.rows])
        at, _ = rows.buffer_info()
        structs = (CKept * len(kept))()
        blocks = [one.sequence.blocks for one in kept]
        for struct, one, table in zip(structs, kept, blocks, strict=True):
            struct.blocks = table.__array_interface__["data"][0]
            struct.rows, struct.num_rows, struct.first = at, len(one.rows), one.first
            at += 8 * len(one.rows)
        caches = self.caches_for(0)
        caches.plan.block_size = block_size
        self.library.keep_rows(self.address, ctypes.addressof(caches), ctypes.addressof(structs), len(kept))
