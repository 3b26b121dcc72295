"""Verification without torch: every round of a step decided in one call, and q rows checked."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch

from engine.native.library import NativeLibrary
from engine.native.sampling import knows, sampler_of
from engine.native.sampling_structs import CDecision, CRound
from engine.sampling.state import SamplingState
from specdec.rules import Rule, SparseRow

_MALFORMED: Final = -2

#: ``Acceptance`` of sampling_verify.cpp by rule; at temperature 0 it is the first under every rule. Rules that are not
#: here are left to tensors.
_OWN_CHOICE: Final = 0
_ACCEPTANCE: Final[Mapping[Rule, int]] = {Rule.COUPLED: _OWN_CHOICE, Rule.TOKEN: 1, Rule.BLOCK: 2}


class VerifyRound(Protocol):
    """What is read of a :class:`target_service.verification.rounds.Round`, which says more."""

    @property
    def state(self) -> SamplingState:
        """The session."""
        ...

    @property
    def rule(self) -> Rule:
        """What its drafts are verified by."""
        ...

    @property
    def start_row(self) -> int:
        """Row of the logits that decides the first token."""
        ...

    @property
    def draft_token_ids(self) -> Sequence[int]:
        """The drafted tokens."""
        ...

    @property
    def parents(self) -> Sequence[int]:
        """Of each the one it follows, -1 for the committed tokens; empty: a chain."""
        ...

    @property
    def q_rows(self) -> Sequence[SparseRow]:
        """None, or one per group of siblings, in a chain per token."""
        ...

    @property
    def masks(self) -> torch.Tensor | None:
        """Of each row of logits the tokens that may be drawn, as bits of int32 [k + 1, W]."""
        ...


def decides(r: VerifyRound) -> bool:
    """Whether :func:`verify_rounds` knows the round's rule and the session's parameters."""
    return (r.rule in _ACCEPTANCE or not r.state.params.temperature) and knows(r.state)


def verify_rounds(
    kernels: NativeLibrary,
    logits: torch.Tensor,
    rounds: Sequence[VerifyRound],
    uniforms: Sequence[Sequence[float]] | None = None,
    *,
    num_threads: int | None = None,
) -> list[tuple[int, int, bool]] | None:
    """Decide rounds that :func:`decides` knows.

    Returns of every round the place where the walk along the drafted tokens ends (in a chain how many are accepted, in
    a tree 0 or the index of the last one + 1), the target's own token, which stands there, and whether there was one to
    draw; None where a proposal is malformed.

    ``logits`` float32 [R, V] on the CPU, contiguous, raw; they are not written to. ``uniforms`` take the place of the
    sessions' own noise under the ratio rules: for each round k numbers for acceptance, k for residual draws, one for
    the bonus draw (for trees k + 1, by place). ``num_threads`` (None takes torch's) share the work, where there is
    enough of it.
    """
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    numbers, rows = array("q"), bytearray()
    starts = []
    for r in rounds:
        assert r.start_row >= 0
        assert r.start_row + len(r.draft_token_ids) < logits.shape[0]
        assert r.state.num_tokens <= logits.shape[1]
        assert len(r.parents) in (0, len(r.draft_token_ids))
        num_groups = len(set(r.parents)) if r.parents else len(r.draft_token_ids)
        assert len(r.q_rows) in (0, num_groups)
        assert r.masks is None or is_mask(r.masks, len(r.draft_token_ids) + 1, r.state.num_tokens)
        starts.append((len(numbers), len(rows)))
        numbers.extend(r.draft_token_ids)
        numbers.extend(r.parents)
        for row in r.q_rows:
            numbers.append(len(row.packed))
            rows += row.packed
    rows.append(0)  # never empty, so that it has an address
    noise = array("d", [u for chain in uniforms or () for u in chain])
    noise_at, _ = noise.buffer_info()
    numbers_at, _ = numbers.buffer_info()
    rows_at = ctypes.addressof(ctypes.c_char.from_buffer(rows))

    structs = (CRound * len(rounds))()
    for struct, r, (number, row_at) in zip(structs, rounds, starts, strict=True):
        count, num_parents = len(r.draft_token_ids), len(r.parents)
        struct.sampler = sampler_of(r.state)
        struct.token_ids, struct.num_tokens = numbers_at + 8 * number, count
        struct.start_row, struct.length = r.start_row, len(r.state)
        struct.acceptance = _ACCEPTANCE[r.rule] if r.state.params.temperature else _OWN_CHOICE
        struct.q = rows_at + row_at if r.q_rows else None
        struct.q_bytes = numbers_at + 8 * (number + count + num_parents)
        struct.uniforms = noise_at if uniforms else None
        struct.parents = numbers_at + 8 * (number + count) if num_parents else None
        if r.masks is not None:
            struct.masks, struct.mask_words = r.masks.data_ptr(), r.masks.shape[1]
        noise_at += 8 * (2 * count + num_parents + 1)
    decisions = (CDecision * len(rounds))()
    status = kernels.verify_rounds(
        logits.data_ptr(),
        logits.shape[1],
        ctypes.addressof(structs),
        len(rounds),
        ctypes.addressof(decisions),
        num_threads or torch.get_num_threads(),
    )
    if status == _MALFORMED:
        return None
    if status:
        raise MemoryError("working memory for verification")
    return [(decision.end, decision.token, bool(decision.valid)) for decision in decisions]


def is_mask(masks: torch.Tensor, num_rows: int, num_tokens: int) -> bool:
    """Whether they have a bit for each token of each row, as the kernels read them."""
    return (
        masks.dtype is torch.int32
        and masks.is_contiguous()
        and masks.shape[0] == num_rows
        and 32 * masks.shape[1] >= num_tokens
    )


def is_well_formed(
    kernels: NativeLibrary, token_ids: Sequence[int], q_rows: Sequence[SparseRow], num_tokens: int
) -> bool:
    """Whether a chain can be verified: ids below ``num_tokens``, and no q rows or one per id that names it."""
    count = len(token_ids)
    if len(q_rows) not in (0, count):
        return False
    try:
        numbers = array("q", token_ids)
    except OverflowError:
        return False
    numbers.extend([len(row.packed) for row in q_rows])
    at, _ = numbers.buffer_info()
    rows = b"".join([row.packed for row in q_rows]) if q_rows else None
    broken: int = kernels.check_draft(at, count, rows, at + 8 * count, num_tokens)
    return broken < 0
