"""Structs of models and their passes; see :mod:`engine.native.structs`."""

from __future__ import annotations

import ctypes

from engine.grouped_weight import GroupedWeight
from engine.native.c_types import Int32, Int64, Pointer
from engine.plan import BatchPlan


class CPlan(ctypes.Structure):
    """Sequences and cache entries of the rows of a pass: attention.h."""

    _fields_ = (
        ("positions", Pointer),
        ("slots", Pointer),
        ("row_starts", Pointer),
        ("block_tables", Pointer),
        ("kv_lens", Pointer),
        ("ancestors", Pointer),
        ("num_rows", Int64),
        ("num_sequences", Int64),
        ("table_width", Int64),
        ("block_size", Int64),
    )

    @classmethod
    def of(cls, plan: BatchPlan) -> CPlan:
        """Pointers into a plan's tensors, which must outlive it."""
        return cls(
            plan.positions.data_ptr(),
            plan.slots.data_ptr(),
            plan.row_starts.data_ptr(),
            plan.block_tables.data_ptr(),
            plan.kv_lens.data_ptr(),
            None if plan.ancestors is None else plan.ancestors.data_ptr(),
            plan.positions.shape[0],
            plan.kv_lens.shape[0],
            plan.block_tables.shape[1],
            plan.block_size,
        )


class CAttentionShape(ctypes.Structure):
    """Shape of an attention layer: attention.h."""

    _fields_ = (
        ("heads", Int32),
        ("kv_heads", Int32),
        ("head_dim", Int32),
        ("value_dim", Int32),
        ("k_block_stride", Int64),
        ("v_block_stride", Int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", Int64),
        ("keys_in_columns", Int64),
    )


class CGroupedSource(ctypes.Structure):
    """A grouped weight that is packed: grouped.cpp."""

    _fields_ = (
        ("codes", Pointer),
        ("table", Pointer),
        ("values", Pointer),
        ("scales", Pointer),
        ("offsets", Pointer),
        ("order", Pointer),
        ("n", Int64),
        ("k", Int64),
        ("group", Int64),
        ("bits", Int32),
        ("kind", Int32),
    )

    @classmethod
    def of(cls, weight: GroupedWeight) -> CGroupedSource:
        """Pointers into a weight's tensors, which must outlive it."""
        at = None if weight.table is None else weight.table.data_ptr()
        return cls(
            weight.codes.data_ptr(),
            at if weight.code_kind == 0 else None,
            at if weight.code_kind != 0 else None,
            weight.scales.data_ptr(),
            None if weight.offsets is None else weight.offsets.data_ptr(),
            None if weight.order is None else weight.order.data_ptr(),
            weight.out_features,
            weight.in_features,
            weight.group,
            weight.bits,
            weight.code_kind,
        )


class CLinear(ctypes.Structure):
    """Packed linear layers: decoder.h."""

    _fields_ = (
        ("weight", Pointer),
        ("bias", Pointer),
        ("scale", Pointer),
    )


class CMixer(ctypes.Structure):
    """The recurrent part of a layer: decoder.h."""

    _fields_ = (
        ("input", CLinear),
        ("output", CLinear),
        *((name, Pointer) for name in ("taps", "taps_bias", "rates", "time_bias", "skip", "norm")),
        *((name, Pointer) for name in ("rings", "state", "keys", "values", "decays")),
        *((name, Int64) for name in ("width", "channels", "num_taps", "ring_size", "num_records")),
        *((name, Int64) for name in ("conv_at", "gate_at", "time_at", "factor_at")),
        *((name, Int64) for name in ("key_heads", "heads", "key_dim", "value_dim", "norm_groups")),
        ("shortest", ctypes.c_float),
        ("longest", ctypes.c_float),
        ("kind", Int32),
    )


class CLayer(ctypes.Structure):
    """A layer: decoder.h."""

    _fields_ = (
        ("input_norm", Pointer),
        ("qkv", CLinear),
        ("query_norm", Pointer),
        ("key_norm", Pointer),
        ("output", CLinear),
        ("mixer", Pointer),
        ("post_norm", Pointer),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("window", Int64),
    )


class CHead(ctypes.Structure):
    """Weights of a draft head beside its layer: decoder.h."""

    _fields_ = (
        ("fuse", CLinear),
        ("feature_norm", Pointer),
        ("embedding_norm", Pointer),
        ("state_norm", Pointer),
        ("num_features", Int64),
        ("feature_parts", Int64),
        ("kind", Int32),
        ("norms_residual", Int32),
        ("norms_output", Int32),
    )


class CModel(ctypes.Structure):
    """A model and its weights: decoder.h."""

    _fields_ = (
        ("layers", Pointer),
        ("embedding", Pointer),
        ("final_norm", Pointer),
        ("lm_head", CLinear),
        ("head", Pointer),
        ("target_ids", Pointer),
        ("num_layers", Int64),
        ("hidden", Int64),
        ("intermediate", Int64),
        ("vocab", Int64),
        ("outputs", Int64),
        ("heads", Int64),
        ("kv_heads", Int64),
        ("head_dim", Int64),
        ("rotary_dim", Int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("gates_heads", Int32),
        ("gates_mlp", Int32),
        ("weight_dtype", Int32),
        ("embedding_dtype", Int32),
        ("cache_dtype", Int32),
        ("prefetch_one", Int64),
        ("prefetch_several", Int64),
    )


class CBatch(ctypes.Structure):
    """Inputs and outputs of a pass: decoder.h."""

    _fields_ = (
        ("token_ids", Pointer),
        ("logit_rows", Pointer),
        ("num_logits", Int64),
        ("plan", CPlan),
        ("state_plan", Pointer),
        ("k_caches", Pointer),
        ("v_caches", Pointer),
        ("cosines", Pointer),
        ("sines", Pointer),
        ("logits", Pointer),
        ("features", Pointer),
        ("stream", Pointer),
        ("features_dtype", Int32),
        ("features_are_fused", Int32),
        ("state_rows", Pointer),
        ("state_layers", Pointer),
        ("num_states", Int64),
        ("num_state_layers", Int64),
        ("states", Pointer),
    )


class CFeed(ctypes.Structure):
    """Tokens to feed to one sequence: feed.cpp."""

    _fields_ = (
        ("blocks", Pointer),
        ("token_ids", Pointer),
        ("num_tokens", Int64),
        ("length", Int64),
        ("num_logits", Int64),
        ("num_states", Int64),
        ("parents", Pointer),
        ("slot", Int64),
        ("base", Int64),
        ("new_base", Int64),
    )


class CKept(ctypes.Structure):
    """Rows of a tree that stay in the cache of one sequence: compaction.cpp."""

    _fields_ = (
        ("blocks", Pointer),
        ("rows", Pointer),
        ("num_rows", Int64),
        ("first", Int64),
    )
