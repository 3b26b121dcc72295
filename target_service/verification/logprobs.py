"""Log-probabilities under the model's raw distribution, before any transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.sampling.transfer import send
from specdec.types import PositionLogprobs, TokenLogprob

#: Rows of a prompt that are scored together.
_ROWS: Final = 64


def score(logits: Tensor, token_ids: Tensor, num_top: int, num_tokens: int) -> Tensor:
    """Log-probabilities of N positions, packed for :func:`read`: float64 [N, 2 + 2 num_top], on the device.

    ``logits`` float32 [N, V] raw; ``token_ids`` int64 [N], the tokens that stand there. Ids from ``num_tokens`` on
    (padding of the vocabulary) count in the normalisation, as the model has them, but are never reported.
    """
    logprobs = logits.float().log_softmax(-1)[:, :num_tokens]
    own = logprobs.gather(1, token_ids[:, None])  # [N, 1]
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    top = logprobs.topk(num_top, dim=-1)
    return torch.cat([own.double(), rank.double(), top.indices.double(), top.values.double()], dim=1)


def read(packed: Sequence[float], token_id: int, num_top: int) -> PositionLogprobs:
    """Unpack one position of :func:`score`; ``num_top`` may be below the number scored."""
    width = (len(packed) - 2) // 2
    ids, values = packed[2 : 2 + num_top], packed[2 + width : 2 + width + num_top]
    top = tuple(TokenLogprob(int(v), lp, i) for i, (v, lp) in enumerate(zip(ids, values, strict=True), start=1))
    return PositionLogprobs(TokenLogprob(token_id, packed[0], int(packed[1])), top)


def position_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int, num_tokens: int
) -> list[PositionLogprobs]:
    """The log-probabilities of tokens already known, such as a prompt's; arguments as :func:`score`. Syncs once."""
    at = send(token_ids, logits.device, torch.int64)
    packed = [
        score(some, own, min(num_top, num_tokens), num_tokens)
        for some, own in zip(torch.split(logits, _ROWS), torch.split(at, _ROWS), strict=True)
    ]
    return [read(row, token_id, num_top) for row, token_id in zip(torch.cat(packed).tolist(), token_ids, strict=True)]
