"""The structs that the C++ kernels share with Python; :data:`STRUCTS` is compared with C++ when the library is loaded.

The C++ definitions say what each field means. Pointers are addresses of arrays; lengths count elements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

from engine.grouped_weight import GroupedWeight
from engine.plan import BatchPlan
from engine.sampling.noise import Stream

_Pointer = ctypes.c_void_p
_Int64 = ctypes.c_int64
_Int32 = ctypes.c_int32


class CPlan(ctypes.Structure):
    """Sequences and cache entries of the rows of a pass: attention.h."""

    _fields_ = (
        ("positions", _Pointer),
        ("slots", _Pointer),
        ("row_starts", _Pointer),
        ("block_tables", _Pointer),
        ("kv_lens", _Pointer),
        ("ancestors", _Pointer),
        ("num_rows", _Int64),
        ("num_sequences", _Int64),
        ("table_width", _Int64),
        ("block_size", _Int64),
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
        ("heads", _Int32),
        ("kv_heads", _Int32),
        ("head_dim", _Int32),
        ("value_dim", _Int32),
        ("k_block_stride", _Int64),
        ("v_block_stride", _Int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", _Int64),
        ("keys_in_columns", _Int64),
    )


class CGroupedSource(ctypes.Structure):
    """A grouped weight that is packed: grouped.cpp."""

    _fields_ = (
        ("codes", _Pointer),
        ("table", _Pointer),
        ("scales", _Pointer),
        ("offsets", _Pointer),
        ("order", _Pointer),
        ("n", _Int64),
        ("k", _Int64),
        ("group", _Int64),
        ("bits", _Int32),
    )

    @classmethod
    def of(cls, weight: GroupedWeight) -> CGroupedSource:
        """Pointers into a weight's tensors, which must outlive it."""
        return cls(
            weight.codes.data_ptr(),
            None if weight.table is None else weight.table.data_ptr(),
            weight.scales.data_ptr(),
            None if weight.offsets is None else weight.offsets.data_ptr(),
            None if weight.order is None else weight.order.data_ptr(),
            weight.out_features,
            weight.in_features,
            weight.group,
            weight.bits,
        )


class CLinear(ctypes.Structure):
    """Packed linear layers: decoder.h."""

    _fields_ = (
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("scale", _Pointer),
    )


class CMixer(ctypes.Structure):
    """The recurrent part of a layer: decoder.h."""

    _fields_ = (
        ("input", CLinear),
        ("output", CLinear),
        *((name, _Pointer) for name in ("taps", "taps_bias", "rates", "time_bias", "skip", "norm")),
        *((name, _Pointer) for name in ("rings", "state", "keys", "values", "decays")),
        *((name, _Int64) for name in ("width", "channels", "num_taps", "ring_size", "num_records")),
        *((name, _Int64) for name in ("conv_at", "gate_at", "time_at", "factor_at")),
        *((name, _Int64) for name in ("key_heads", "heads", "key_dim", "value_dim", "norm_groups")),
        ("shortest", ctypes.c_float),
        ("longest", ctypes.c_float),
        ("kind", _Int32),
    )


class CLayer(ctypes.Structure):
    """A layer: decoder.h."""

    _fields_ = (
        ("input_norm", _Pointer),
        ("qkv", CLinear),
        ("query_norm", _Pointer),
        ("key_norm", _Pointer),
        ("output", CLinear),
        ("mixer", _Pointer),
        ("post_norm", _Pointer),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("window", _Int64),
    )


class CHead(ctypes.Structure):
    """Weights of a draft head beside its layer: decoder.h."""

    _fields_ = (
        ("fuse", CLinear),
        ("feature_norm", _Pointer),
        ("embedding_norm", _Pointer),
        ("state_norm", _Pointer),
        ("num_features", _Int64),
        ("feature_parts", _Int64),
        ("kind", _Int32),
        ("norms_residual", _Int32),
        ("norms_output", _Int32),
    )


class CModel(ctypes.Structure):
    """A model and its weights: decoder.h."""

    _fields_ = (
        ("layers", _Pointer),
        ("embedding", _Pointer),
        ("final_norm", _Pointer),
        ("lm_head", CLinear),
        ("head", _Pointer),
        ("target_ids", _Pointer),
        ("num_layers", _Int64),
        ("hidden", _Int64),
        ("intermediate", _Int64),
        ("vocab", _Int64),
        ("outputs", _Int64),
        ("heads", _Int64),
        ("kv_heads", _Int64),
        ("head_dim", _Int64),
        ("rotary_dim", _Int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("gates_heads", _Int32),
        ("gates_mlp", _Int32),
        ("weight_dtype", _Int32),
        ("embedding_dtype", _Int32),
        ("cache_dtype", _Int32),
        ("prefetch_one", _Int64),
        ("prefetch_several", _Int64),
    )


class CBatch(ctypes.Structure):
    """Inputs and outputs of a pass: decoder.h."""

    _fields_ = (
        ("token_ids", _Pointer),
        ("logit_rows", _Pointer),
        ("num_logits", _Int64),
        ("plan", CPlan),
        ("state_plan", _Pointer),
        ("k_caches", _Pointer),
        ("v_caches", _Pointer),
        ("cosines", _Pointer),
        ("sines", _Pointer),
        ("logits", _Pointer),
        ("features", _Pointer),
        ("stream", _Pointer),
        ("features_dtype", _Int32),
        ("features_are_fused", _Int32),
        ("state_rows", _Pointer),
        ("state_layers", _Pointer),
        ("num_states", _Int64),
        ("num_state_layers", _Int64),
        ("states", _Pointer),
    )


class CFeed(ctypes.Structure):
    """Tokens to feed to one sequence: feed.cpp."""

    _fields_ = (
        ("blocks", _Pointer),
        ("token_ids", _Pointer),
        ("num_tokens", _Int64),
        ("length", _Int64),
        ("num_logits", _Int64),
        ("num_states", _Int64),
        ("parents", _Pointer),
        ("slot", _Int64),
        ("base", _Int64),
        ("new_base", _Int64),
    )


class CKept(ctypes.Structure):
    """Rows of a tree that stay in the cache of one sequence: compaction.cpp."""

    _fields_ = (
        ("blocks", _Pointer),
        ("rows", _Pointer),
        ("num_rows", _Int64),
        ("first", _Int64),
    )


class CEdits(ctypes.Structure):
    """What changes the logits of a session before the temperature: sampling.h."""

    _fields_ = (
        ("forbidden", _Pointer),
        ("bad_tokens", _Pointer),
        ("bad_heads", _Pointer),
        ("bad_ends", _Pointer),
        ("stop_tokens", _Pointer),
        ("biased_tokens", _Pointer),
        ("biases", _Pointer),
        ("counts", _Pointer),
        ("seen", _Pointer),
        ("tail", _Pointer),
        ("num_bad_tokens", _Int64),
        ("num_bad_sequences", _Int64),
        ("head_width", _Int64),
        ("num_stop_tokens", _Int64),
        ("num_biased", _Int64),
        ("missing", _Int64),
        ("repetition", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
    )


class CSampler(ctypes.Structure):
    """What sampling knows of a session: sampling.h."""

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_k", _Int64),
        ("num_tokens", _Int64),
        ("q_tokens", _Int64),
        ("q_share", ctypes.c_double),
        ("stream_keys", ctypes.c_uint64 * len(Stream)),
        ("edits", _Pointer),
    )


class CDraftPlace(ctypes.Structure):
    """A position to draft a token for, and where the results go: sampling.h."""

    _fields_ = (
        ("prefix", _Pointer),
        ("num_prefix", _Int64),
        ("base", _Int64),
        ("q", _Pointer),
        ("q_bytes", _Pointer),
    )


class CTreePlace(ctypes.Structure):
    """A position of a tree whose children are looked for: sampling.h."""

    _fields_ = (
        ("prefix", _Pointer),
        ("num_prefix", _Int64),
        ("position", _Int64),
    )


class CChain(ctypes.Structure):
    """A chain to draft: drafting.h."""

    _fields_ = (
        ("sampler", _Pointer),
        ("blocks", _Pointer),
        ("token_ids", _Pointer),
        ("features", _Pointer),
        ("num_token_ids", _Int64),
        ("num_masks", _Int64),
        ("length", _Int64),
        ("num_dropped", _Int64),
        ("base", _Int64),
        ("num_tokens", _Int64),
        ("sampling", _Int64),
    )


class CDrafted(ctypes.Structure):
    """The drafted chains of a batch: drafting.h."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("q_bytes", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
    )


class CRound(ctypes.Structure):
    """A round to verify: sampling_verify.cpp."""

    _fields_ = (
        ("sampler", _Pointer),
        ("token_ids", _Pointer),
        ("num_tokens", _Int64),
        ("start_row", _Int64),
        ("length", _Int64),
        ("acceptance", _Int64),
        ("q", _Pointer),
        ("q_bytes", _Pointer),
        ("uniforms", _Pointer),
        ("parents", _Pointer),
        ("masks", _Pointer),
        ("mask_words", _Int64),
    )


class CDecision(ctypes.Structure):
    """The outcome of a round: sampling_verify.cpp."""

    _fields_ = (
        ("end", _Int64),
        ("token", _Int64),
        ("valid", _Int64),
    )


class CMlpStep(ctypes.Structure):
    """Weights of one step of an MLP speculator: mlp.cpp."""

    _fields_ = (
        ("proj", _Pointer),
        ("embedding", _Pointer),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("head", _Pointer),
    )


class CMlp(ctypes.Structure):
    """An MLP speculator: mlp.cpp."""

    _fields_ = (
        ("steps", _Pointer),
        ("num_steps", _Int64),
        ("features", _Int64),
        ("inner", _Int64),
        ("vocab", _Int64),
        ("scale", ctypes.c_float),
        ("scales_input", _Int32),
        ("weight_dtype", _Int32),
        ("embedding_dtype", _Int32),
        ("features_dtype", _Int32),
        ("prefetch_one", _Int64),
        ("prefetch_several", _Int64),
    )


class CWalk(ctypes.Structure):
    """Blocks that chains are drawn along: walk.cpp."""

    _fields_ = (
        ("logits", _Pointer),
        ("rows", _Pointer),
        ("target_ids", _Pointer),
        ("candidates", _Pointer),
        ("inner", _Pointer),
        ("weights", _Pointer),
        ("before", _Pointer),
        ("after", _Pointer),
        ("sure", _Pointer),
        ("sure_weights", _Pointer),
        ("confidences", _Pointer),
        ("vocab", _Int64),
        ("outputs", _Int64),
        ("num_candidates", _Int64),
        ("rank", _Int64),
        ("kind", _Int64),
        ("table_dtype", _Int64),
    )


#: By their names in C++.
STRUCTS: Final[Mapping[str, type[ctypes.Structure]]] = {
    "Plan": CPlan,
    "AttentionShape": CAttentionShape,
    "GroupedSource": CGroupedSource,
    "Linear": CLinear,
    "Mixer": CMixer,
    "Layer": CLayer,
    "Head": CHead,
    "Model": CModel,
    "Batch": CBatch,
    "Feed": CFeed,
    "Kept": CKept,
    "Edits": CEdits,
    "Sampler": CSampler,
    "DraftPlace": CDraftPlace,
    "TreePlace": CTreePlace,
    "Chain": CChain,
    "Drafted": CDrafted,
    "Round": CRound,
    "Decision": CDecision,
    "MlpStep": CMlpStep,
    "Mlp": CMlp,
    "Walk": CWalk,
}
