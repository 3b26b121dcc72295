"""The draft's side of sampling: one drafted token per session, under the rule its target will verify it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.sampling.rows import Rows
from specdec.sessions import Rule, SparseRow


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """One drafted token per row, still on the device."""

    #: int64 [R].
    token_ids: Tensor
    #: int64 [R, K], or None where no row needs q.
    q_token_ids: Tensor | None = None
    #: int64 [R, K]; all 0 in rows that need no q.
    q_weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """The drafted tokens of one session, in Python; ``q_rows`` is empty or holds one row per token."""

    token_ids: tuple[int, ...]
    q_rows: tuple[SparseRow, ...] = ()


def draft(logits: Tensor, rows: Rows, rules: Sequence[Rule]) -> Drafted:
    """Draw one token per row of ``logits`` (float32 [R, V]); ``rules`` names each row's rule. Nothing syncs on CUDA.

    Greedy: the argmax. Coupled: argmin E_v / q_v with the noise the target will use at that position. Token and
    block: drawn from the quantised top of q, which comes with the token. A row whose tokens are all masked gives some
    token that the target will reject. The next step's rows are ``rows.extended(drafted.token_ids)``.
    """
    raise NotImplementedError


def collect(steps: Sequence[Drafted], counts: Sequence[int] | None = None) -> list[DraftedChain]:
    """Bring the drafted tokens of successive steps (the same rows in each) to Python, in one transfer.

    ``counts`` cuts each chain to its own length.
    """
    raise NotImplementedError


def candidates(logits: Tensor, rows: Rows, rules: Sequence[Rule], count: int) -> Tensor:
    """The draft's best guesses of the token the *target* will put at each row: int64 [R, count], best first.

    For drafting ahead of the verdict. Greedy: by logit; coupled: by E_v / q_v (the first is the drafted token);
    token and block: by q.
    """
    raise NotImplementedError
