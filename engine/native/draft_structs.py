"""Structs of chains, and of heads that need no attention; see :mod:`engine.native.structs`."""

from __future__ import annotations

import ctypes

from engine.native.c_types import Int32, Int64, Pointer


class CChain(ctypes.Structure):
    """A chain to draft: drafting.h."""

    _fields_ = (
        ("sampler", Pointer),
        ("blocks", Pointer),
        ("token_ids", Pointer),
        ("features", Pointer),
        ("num_token_ids", Int64),
        ("num_masks", Int64),
        ("length", Int64),
        ("num_dropped", Int64),
        ("base", Int64),
        ("num_tokens", Int64),
        ("sampling", Int64),
    )


class CDrafted(ctypes.Structure):
    """The drafted chains of a batch: drafting.h."""

    _fields_ = (
        ("token_ids", Pointer),
        ("q", Pointer),
        ("q_bytes", Pointer),
        ("lengths", Pointer),
        ("depth", Int64),
    )


class CMlpStep(ctypes.Structure):
    """Weights of one step of an MLP speculator: mlp.cpp."""

    _fields_ = (
        ("proj", Pointer),
        ("embedding", Pointer),
        ("weight", Pointer),
        ("bias", Pointer),
        ("head", Pointer),
    )


class CMlp(ctypes.Structure):
    """An MLP speculator: mlp.cpp."""

    _fields_ = (
        ("steps", Pointer),
        ("num_steps", Int64),
        ("features", Int64),
        ("inner", Int64),
        ("vocab", Int64),
        ("scale", ctypes.c_float),
        ("scales_input", Int32),
        ("weight_dtype", Int32),
        ("embedding_dtype", Int32),
        ("features_dtype", Int32),
        ("prefetch_one", Int64),
        ("prefetch_several", Int64),
    )


class CWalk(ctypes.Structure):
    """Blocks that chains are drawn along: walk.cpp."""

    _fields_ = (
        ("logits", Pointer),
        ("rows", Pointer),
        ("target_ids", Pointer),
        ("candidates", Pointer),
        ("inner", Pointer),
        ("weights", Pointer),
        ("before", Pointer),
        ("after", Pointer),
        ("sure", Pointer),
        ("sure_weights", Pointer),
        ("confidences", Pointer),
        ("vocab", Int64),
        ("outputs", Int64),
        ("num_candidates", Int64),
        ("rank", Int64),
        ("kind", Int64),
        ("table_dtype", Int64),
    )
