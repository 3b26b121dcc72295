"""Structs of sampling and of verification; see :mod:`engine.native.structs`."""

from __future__ import annotations

import ctypes

from engine.native.c_types import Int64, Pointer
from engine.sampling.noise import Stream


class CEdits(ctypes.Structure):
    """What changes the logits of a session before the temperature: sampling.h."""

    _fields_ = (
        ("forbidden", Pointer),
        ("bad_tokens", Pointer),
        ("bad_heads", Pointer),
        ("bad_ends", Pointer),
        ("stop_tokens", Pointer),
        ("biased_tokens", Pointer),
        ("biases", Pointer),
        ("counts", Pointer),
        ("seen", Pointer),
        ("tail", Pointer),
        ("num_bad_tokens", Int64),
        ("num_bad_sequences", Int64),
        ("head_width", Int64),
        ("num_stop_tokens", Int64),
        ("num_biased", Int64),
        ("missing", Int64),
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
        ("top_k", Int64),
        ("num_tokens", Int64),
        ("q_tokens", Int64),
        ("q_share", ctypes.c_double),
        ("stream_keys", ctypes.c_uint64 * len(Stream)),
        ("edits", Pointer),
    )


class CDraftPlace(ctypes.Structure):
    """A position to draft a token for, and where the results go: sampling.h."""

    _fields_ = (
        ("prefix", Pointer),
        ("num_prefix", Int64),
        ("base", Int64),
        ("q", Pointer),
        ("q_bytes", Pointer),
    )


class CTreePlace(ctypes.Structure):
    """A position of a tree whose children are looked for: sampling.h."""

    _fields_ = (
        ("prefix", Pointer),
        ("num_prefix", Int64),
        ("position", Int64),
    )


class CRound(ctypes.Structure):
    """A round to verify: sampling_verify.cpp."""

    _fields_ = (
        ("sampler", Pointer),
        ("token_ids", Pointer),
        ("num_tokens", Int64),
        ("start_row", Int64),
        ("length", Int64),
        ("acceptance", Int64),
        ("q", Pointer),
        ("q_bytes", Pointer),
        ("uniforms", Pointer),
        ("parents", Pointer),
        ("masks", Pointer),
        ("mask_words", Int64),
    )


class CDecision(ctypes.Structure):
    """The outcome of a round: sampling_verify.cpp."""

    _fields_ = (
        ("end", Int64),
        ("token", Int64),
        ("valid", Int64),
    )
