"""Greedy and coupled verdicts on a GPU: one copy to the device and two launches, whatever the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from engine.cuda import choice_kernels as kernels
from engine.cuda.attention import padded_size
from engine.sampling.transfer import send

#: Tokens of a program of ``choose``.
_TILE: Final = 2048


@dataclass(frozen=True, slots=True)
class Walk:
    """A round whose text depends on no draft: of every row a token is chosen, and drafted ones are accepted while they
    are the choice.
    """

    #: Of each place the row of the logits that decides there: the first, then one for each drafted token.
    logit_rows: Sequence[int]
    token_ids: Sequence[int]
    #: Of each drafted token the one it follows, -1 for the committed tokens.
    parents: Sequence[int]
    #: 0: the most likely token is chosen.
    temperature: float
    #: Of each row the key of its noise; empty at temperature 0.
    noise_keys: Sequence[int] = ()


def walk(logits: torch.Tensor, walks: Sequence[Walk], num_tokens: int) -> torch.Tensor:
    """Of each of B walks the place where it ends, the token chosen there and whether it is valid: float64 [3, B] on the
    device; ``logits`` float32 [N, V], of whose tokens the first ``num_tokens`` may be chosen. Nothing waits for it.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    rounds: list[tuple[int, int]] = []
    for one in walks:
        temperature = int(np.float64(one.temperature).view(np.int64))
        rounds.append((len(rows), len(one.token_ids)))
        drafted = (-1, *one.token_ids)
        follows = (-1, *(parent + 1 for parent in one.parents))
        keys = one.noise_keys or [0] * len(drafted)
        rows += [
            (row, key, temperature, token, place)
            for row, key, token, place in zip(one.logit_rows, keys, drafted, follows, strict=True)
        ]
    numbers = [number for row in rows for number in row] + [number for pair in rounds for number in pair]
    lists = send(numbers, logits.device, torch.int64)
    num_parts = -(-num_tokens // _TILE)
    scores = logits.new_empty(len(rows), num_parts, dtype=torch.float64)
    ids = logits.new_empty(len(rows), num_parts, dtype=torch.int64)
    out = logits.new_empty(3, len(rounds), dtype=torch.float64)
    at = 5 * len(rows)
    kernels.choose[(len(rows), num_parts)](
        logits, lists[:at], scores, ids, num_tokens, logits.stride(0), TILE=_TILE, num_warps=8
    )
    kernels.walk[(len(rounds),)](
        lists[:at], lists[at:], scores, ids, out, num_parts, PADDED_PARTS=padded_size(num_parts), num_warps=1
    )
    return out
