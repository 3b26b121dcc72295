"""Greedy and coupled verdicts on a GPU: a copy to the device, one of masks, and two launches, whatever the rounds; and
the weights of distributions, which other verdicts need, in one launch that reads the logits once.
"""

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
    #: Of each row the tokens that may be chosen: bit t % 32 of word t // 32, int32 [places, W]; None: all.
    masks: torch.Tensor | None = None


def walk(logits: torch.Tensor, walks: Sequence[Walk], num_tokens: int) -> torch.Tensor:
    """Of each of B walks the place where it ends, the token chosen there and whether it is valid: float64 [3, B] on the
    device; ``logits`` float32 [N, V], of whose tokens the first ``num_tokens`` may be chosen. Nothing waits for it.
    """
    rows: list[tuple[int, int, int, int, int, int]] = []
    num_masks = 0
    rounds: list[tuple[int, int]] = []
    for one in walks:
        temperature = int(np.float64(one.temperature).view(np.int64))
        rounds.append((len(rows), len(one.token_ids)))
        drafted = (-1, *one.token_ids)
        follows = (-1, *(parent + 1 for parent in one.parents))
        keys = one.noise_keys or [0] * len(drafted)
        masked_by = [-1] * len(drafted) if one.masks is None else range(num_masks, num_masks + len(drafted))
        num_masks += 0 if one.masks is None else len(drafted)
        rows += [
            (row, key, temperature, token, place, mask)
            for row, key, token, place, mask in zip(one.logit_rows, keys, drafted, follows, masked_by, strict=True)
        ]
    numbers = [number for row in rows for number in row] + [number for pair in rounds for number in pair]
    lists = send(numbers, logits.device, torch.int64)
    num_parts = -(-num_tokens // _TILE)
    scores = logits.new_empty(len(rows), num_parts, dtype=torch.float64)
    ids = logits.new_empty(len(rows), num_parts, dtype=torch.int64)
    out = logits.new_empty(3, len(rounds), dtype=torch.float64)
    at = 6 * len(rows)
    masks = [one.masks for one in walks if one.masks is not None]
    words = send(torch.cat(masks), logits.device) if masks else lists[:0].view(torch.int32)
    kernels.choose[(len(rows), num_parts)](
        logits,
        lists[:at],
        words,
        scores,
        ids,
        num_tokens,
        logits.stride(0),
        words.shape[-1],
        TILE=_TILE,
        num_warps=8,
    )
    kernels.walk[(len(rounds),)](
        lists[:at], lists[at:], scores, ids, out, num_parts, PADDED_PARTS=padded_size(num_parts), num_warps=1
    )
    return out


def forbid(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[torch.Tensor], num_tokens: int) -> None:
    """Write -inf where masks, int32 [M, W] together, have no bit: each of them to one of the rows of ``logits``."""
    words, places = send(torch.cat(list(masks)), logits.device), send(rows, logits.device, torch.int64)
    kernels.forbid[(len(rows), -(-num_tokens // _TILE))](
        logits, places, words, num_tokens, logits.stride(0), words.shape[1], TILE=_TILE, num_warps=8
    )


def weights(
    logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """exp((logit - top) / T) float64 [R, V], ``logits`` float32; ``top`` float32 and ``temperature`` float64 [R, 1].
    With ``keys`` int64 [R] of noise its race (:func:`engine.sampling.draws.race`).
    """
    out = logits.new_empty(logits.shape, dtype=torch.float64)
    _weigh(logits, top, temperature, None, out, keys, SUMS=False)
    return out


def mass(
    logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor | None
) -> torch.Tensor:
    """Sums of these weights, of those that are at least ``min_p`` float64 [R, 1]: float64 [R, 1]."""
    out = logits.new_empty(len(logits), -(-logits.shape[1] // _TILE), dtype=torch.float64)
    _weigh(logits, top, temperature, min_p, out, SUMS=True)
    return out.sum(-1, keepdim=True)


def _weigh(  # noqa: PLR0917
    logits: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    out: torch.Tensor,
    keys: torch.Tensor | None = None,
    **kind: bool,
) -> None:
    kernels.weigh[(len(logits), -(-logits.shape[1] // _TILE))](
        logits,
        top.contiguous(),
        temperature.contiguous(),
        temperature if min_p is None else min_p.contiguous(),
        temperature if keys is None else keys,
        out,
        logits.shape[1],
        logits.stride(0),
        HAS_MIN_P=min_p is not None,
        HAS_NOISE=keys is not None,
        **kind,
        TILE=_TILE,
        num_warps=8,
    )
