"""Log-probabilities under the model's raw distribution, before any transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.transfer import send
from specdec.logprobs import ENTRY_BYTES, PositionLogprobs

_ENTRY: Final = np.dtype([("id", "<u4"), ("logprob", "<f4")])
#: Rows of a prompt that are scored together.
_ROWS: Final = 64


def score(logits: Tensor, token_ids: Tensor, num_top: int, num_tokens: int) -> Tensor:
    """Log-probabilities of N positions for :func:`read`: float64 [N, 2 + 2 num_top], on the device.

    ``logits`` float32 [N, V] raw; ``token_ids`` int64 [N], the tokens that stand there. Ids from ``num_tokens`` on
    (padding of the vocabulary) count in the normalisation, as the model has them, but are never reported.
    """
    logprobs = logits.float().log_softmax(-1)[:, :num_tokens]
    own = logprobs.gather(1, token_ids[:, None])  # [N, 1]
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    top = logprobs.topk(num_top, dim=-1)
    return torch.cat([own.double(), rank.double(), top.indices.double(), top.values.double()], dim=1)


def read(scored: npt.NDArray[np.float64], token_ids: Sequence[int], num_tops: Sequence[int]) -> list[PositionLogprobs]:
    """The positions of :func:`score`, on the host; of each ``num_tops`` may be below the number scored."""
    width = (scored.shape[1] - 2) // 2
    entries = np.empty((len(scored), width), _ENTRY)
    entries["id"], entries["logprob"] = scored[:, 2 : 2 + width], scored[:, 2 + width :]
    packed, positions = entries.tobytes(), []
    for i, (token_id, num_top, (logprob, rank)) in enumerate(
        zip(token_ids, num_tops, scored[:, :2].tolist(), strict=True)
    ):
        start = i * width * ENTRY_BYTES
        top = packed[start : start + min(num_top, width) * ENTRY_BYTES]
        positions.append(PositionLogprobs(token_id, logprob, int(rank), top))
    return positions


def position_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int, num_tokens: int
) -> list[PositionLogprobs]:
    """The log-probabilities of tokens already known, such as a prompt's; arguments as :func:`score`. Syncs once."""
    at = send(token_ids, logits.device, torch.int64)
    packed = [
        score(some, own, min(num_top, num_tokens), num_tokens)
        for some, own in zip(torch.split(logits, _ROWS), torch.split(at, _ROWS), strict=True)
    ]
    return read(torch.cat(packed).cpu().numpy(), token_ids, [num_top] * len(token_ids))
