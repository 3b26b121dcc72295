"""The whole forward pass of Llama-shaped models in one native call: no Python between layers.

Known are transformers' Llama, Mistral, Qwen2 and Qwen3 classes exactly, with SiLU and rotary embeddings that do not
change with the length of a batch. Anything else is left to the model's own modules.

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.compaction import Kept
from engine.llama_models import MODELS, NORMS, ROPE_TYPES
from engine.native.library import DTYPES, WEIGHT_DTYPES, NativeLibrary, load
from engine.native.linears import AnyMatrix, matrix_of
from engine.native.packing import Packing, layer_groups
from engine.native.rounded import GroupedLinear, Int8Linear, is_plain
from engine.native.structs import CBatch, CKept, CModel, CPlan
from engine.plan import BatchPlan
from engine.trimmed_outputs import TrimmedOutputs
from specdec.errors import InvalidRequest

logger = logging.getLogger(__name__)

Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]
#: Cosines and sines of the first positions, so many: float32 [positions, D / 2], contiguous.
RotaryTables = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class NativeModel:
    """Packed weights and a cache as native passes read them."""

    #: Numbers of the target's hidden states that a row is fed with beside its token; 0 where this is no draft head.
    num_features = 0
    #: The same where the target has fused them.
    fused_width = 0

    def __init__(self, packing: Packing, model: CModel, caches: Caches, tables: RotaryTables) -> None:
        """``model`` points into what the packing keeps; its ``vocab`` counts the ids of tokens fed."""
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
        half = model.head_dim // 2
        self._tables: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0, half), torch.empty(0, half))
        self._k_caches = (ctypes.c_void_p * len(caches))(*(k_cache.data_ptr() for k_cache, _ in caches))
        self._v_caches = (ctypes.c_void_p * len(caches))(*(v_cache.data_ptr() for _, v_cache in caches))

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
        autotune: str,
    ) -> None:
        """Pack the weights of a model that :meth:`build` found suitable. Its modules run on the packed weights too."""
        config, decoder = model.config, model.model
        packing = Packing(library, _weight_groups(model), num_threads)
        layers = packing.array(
            [packing.layer(layer, window) for layer, window in zip(decoder.layers, windows, strict=True)]
        )
        weight_dtype = matrix_of(_output_of(model)).dtype
        outputs = vocab_size = _output_of(model).out_features
        #: Of a draft that drafts some tokens alone.
        self._trimmed: TrimmedOutputs | None = None
        target_ids = None
        if isinstance(model.lm_head, TrimmedOutputs):
            self._trimmed, vocab_size = model.lm_head, model.lm_head.vocab_size
            target_ids = packing.keep(model.lm_head.token_ids.to(torch.int32))
            lm_head, lm_head_bias = packing.linears(model.lm_head, ["linear"])
        else:
            lm_head, lm_head_bias = packing.linears(model, ["lm_head"])
        embedding = packing.keep(decoder.embed_tokens.weight.detach())
        attention = decoder.layers[0].self_attn
        native = CModel(
            layers=layers,
            embedding=embedding.data_ptr(),
            final_norm=packing.floats(decoder.norm.weight),
            lm_head=lm_head,
            lm_head_bias=lm_head_bias,
            num_layers=len(decoder.layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            target_ids=None if target_ids is None else target_ids.data_ptr(),
            vocab=vocab_size,
            outputs=outputs,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
            weight_dtype=WEIGHT_DTYPES[weight_dtype],
            embedding_dtype=DTYPES[embedding.dtype],
            cache_dtype=DTYPES[caches[0][0].dtype],
            **packing.choose_prefetch(autotune),
        )
        super().__init__(packing, native, caches, partial(_rotary_tables, decoder.rotary_emb))
        self.hidden_size: int = config.hidden_size
        #: Columns of logits that a pass writes; :meth:`widen` makes those of the vocabulary of them.
        self.num_outputs: int = outputs

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [N, num_outputs] as a pass writes them to [N, V]."""
        return logits if self._trimmed is None else self._trimmed.widen(logits)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        caches: Caches,
        windows: Sequence[int | None],
        num_threads: int,
        *,
        autotune: str = "cached",
    ) -> NativeDecoder | None:
        """The decoder of a transformers model, or None where it is not of a known shape or there are no kernels.

        caches: key and value cache of every layer, [num_blocks, Hkv, block, D] each, float32 or bfloat16. windows: per
        layer, the entries a row sees, itself included; None for all. The model's linear layers are replaced by packed
        ones, so it can still be run by itself; their own weights are freed one by one. ``autotune``: see
        :func:`~engine.native.autotune.choose_prefetch`.
        """
        library = load()
        if library is None:
            return None
        reason = _unknown(model, caches, windows)
        if reason is not None:
            logger.info("the native decoder does not know this model: %s", reason)
            return None
        with torch.inference_mode(False), torch.no_grad():
            return cls(library, model, caches, windows, num_threads, autotune=autotune)

    def forward(
        self,
        input_ids: torch.Tensor,
        plan: BatchPlan,
        logit_rows: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write the cache and return the logits, float32 [N, vocab_size], of the rows ``logit_rows`` (int64 [N]).

        input_ids int64 [T] or [1, T]. ``states``: rows (int64 [R]) whose hidden states are wanted, of which layers
        (int64 [F]), and where they are written: bfloat16 [R, F, hidden_size].

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        logits = torch.empty(logit_rows.shape[0], self.num_outputs)
        batch = self.batch_of(input_ids, plan, logit_rows, logits)
        if states is not None:
            rows, layers, out = states
            batch.state_rows, batch.num_states = rows.data_ptr(), rows.shape[0]
            batch.state_layers, batch.num_state_layers = layers.data_ptr(), layers.shape[0]
            batch.states = out.data_ptr()
        self.check(self.library.decoder_forward(self.address, ctypes.addressof(batch), self.num_threads))
        return self.widen(logits)

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


def _rotary_tables(rotary: nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = rotary(torch.empty(0), torch.arange(length)[None])  # [1, length, D] each, both halves equal
    half = cosines.shape[-1] // 2
    if not torch.equal(cosines[..., :half], cosines[..., half:]) or not torch.equal(
        sines[..., :half], sines[..., half:]
    ):
        raise NotImplementedError("a rotary embedding whose halves differ")
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()


def _weight_groups(model: Any) -> list[list[AnyMatrix]]:
    """The weights that are packed together."""
    groups = [group for layer in model.model.layers for group in layer_groups(layer)]
    return [*groups, [matrix_of(_output_of(model))]]


def _output_of(model: Any) -> Any:
    """The linear layer of the outputs."""
    return model.lm_head.linear if isinstance(model.lm_head, TrimmedOutputs) else model.lm_head


def _unknown(  # noqa: PLR0911
    model: Any, caches: Caches, windows: Sequence[int | None]
) -> str | None:
    """Why a model is not one this decoder computes, or None."""
    name = type(model).__name__
    if name not in MODELS or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is none of {', '.join(sorted(MODELS))}"
    config = model.config
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}"
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"rope_type is {rope.get('rope_type')!r}"
    layers, output = model.model.layers, _output_of(model)
    kind = type(output)
    if not len(layers) == len(caches) == len(windows) == config.num_hidden_layers > 0:
        return f"{len(layers)} layers, {len(caches)} caches and {len(windows)} windows"
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(type(linear) is kind and _is_known(linear) for linear in linears):
            return "linear layers that are not plain"
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        if any(type(norm).__name__ not in NORMS or norm.variance_epsilon != config.rms_norm_eps for norm in norms):
            return "norms of another kind"
        if not (_have_one_order(linears[:3]) and _have_one_order(linears[4:6])):
            return "inputs in several orders"
        if attention.scaling != layers[0].self_attn.scaling or attention.head_dim % 2:
            return "head sizes"
    if not _is_known(output) or type(model.model.norm).__name__ not in NORMS:
        return "its output layer"
    dtype = output.weight.dtype
    if type(model.model.embed_tokens) is not nn.Embedding or any(p.dtype != dtype for p in model.parameters()):
        return "weights of several dtypes"
    return _unknown_cache(caches) or _unknown_rotary(model)


def _have_one_order(linears: Sequence[nn.Module]) -> bool:
    """Whether layers that are packed together take their inputs in one order."""
    orders = [linear.grouped.order for linear in linears if isinstance(linear, GroupedLinear) and linear.grouped]
    first = orders[0] if orders else None
    return all(order is first or (order is not None and first is not None and order.equal(first)) for order in orders)


def _is_known(linear: nn.Module) -> bool:
    return isinstance(linear, Int8Linear | GroupedLinear) or (type(linear) is nn.Linear and is_plain(linear))


def _unknown_cache(caches: Caches) -> str | None:
    size, dtype = caches[0][0].shape, caches[0][0].dtype
    for cache in (cache for pair in caches for cache in pair):
        if cache.shape != size or cache.dtype != dtype or dtype not in DTYPES or not cache.is_contiguous():
            return f"a cache of {cache.dtype} {tuple(cache.shape)}"
        if cache.device.type != "cpu":
            return f"a cache on {cache.device}"
    return None


def _unknown_rotary(model: Any) -> str | None:
    try:
        cosines, _ = _rotary_tables(model.model.rotary_emb, 2)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its rotary embedding: {error}"
    head_dim = model.model.layers[0].self_attn.head_dim
    return None if 2 * cosines.shape[1] == head_dim else f"rotary embeddings of {2 * cosines.shape[1]} of {head_dim}"
