"""Blocks of a DFlash or DSpark head from many positions of a row in one pass (DFlash, arXiv 2602.06036; DSpark).

A block whose first row is the token at s + 1 knows the target's states up to s. All blocks of a row share the keys and
values of the states; each sees those before its first row, and its own rows. The token before each one is taken to be
right, as those of a chain that is still accepted are. While the head trains, the blocks begin at random positions.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.heads.dflash import DFlashHead, Reach
from engine.heads.dspark import DSparkHead
from tandem.training.lesson import Lessons
from tandem.training.unroll import Guess

#: Blocks of a row that are trained in a step, by default.
NUM_ANCHORS: Final = 48
#: Groups that all positions are measured in.
_NUM_GROUPS: Final = 4


class BlockAttention:
    """Attention of the blocks of a row: `starts` int64 [A] are the last positions whose states they see."""

    def __init__(self, reaches: Sequence[Reach], starts: Tensor, length: int, num_rows: int) -> None:
        """`length` states, `num_rows` of each block."""
        places = torch.arange(num_rows, device=starts.device)
        own = places[:, None] - places  # rows between two of a block
        position = starts[:, None] + 1 + places  # [A, R]
        between = position.flatten()[:, None] - torch.arange(length, device=starts.device)  # [A R, T]
        is_before = torch.arange(length, device=starts.device) <= starts.repeat_interleave(num_rows)[:, None]
        self._length, self._num_rows = length, num_rows
        self._masks = []
        for reach in reaches:
            sees = is_before if reach.window is None else is_before & (between < reach.window)
            self._masks.append((sees, own >= 0 if reach.is_causal else torch.ones_like(own, dtype=torch.bool)))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """[B, A R, Hq, D], [B, T + A R, Hkv, D] and [B, T + A R, Hkv, D] to [B, A R, Hq, D]."""
        length, rows = self._length, self._num_rows
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        query = query * query.shape[-1] ** -0.5
        blocks, own_keys, own_values = (
            part.reshape(len(part), -1, rows, *part.shape[2:]) for part in (query, key[:, length:], value[:, length:])
        )  # [B, A, R, H, D]
        sees, sees_own = self._masks[layer]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key[:, :length]).masked_fill(~sees, -torch.inf)
        own = torch.einsum("barhd,bakhd->bhark", blocks, own_keys).masked_fill(~sees_own, -torch.inf)
        weights = torch.cat([scores, own.flatten(2, 3)], -1).float().softmax(-1).to(value.dtype)
        out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], value[:, :length])
        inner = weights[..., length:].reshape(*weights.shape[:2], -1, rows, rows)
        return out + torch.einsum("bhark,bakhd->barhd", inner, own_values).flatten(1, 2)


def unroll_blocks(head: DFlashHead, lesson: Lessons, num_steps: int, num_anchors: int = NUM_ANCHORS) -> Iterator[Guess]:
    """The tokens of the blocks, one after the other; while the head trains, of `num_anchors` blocks a row."""
    size = lesson.rows.shape[1] - num_steps
    device = lesson.rows.device
    if head.training:
        generator = torch.Generator().manual_seed(int(lesson.rows.sum()))
        starts = torch.randperm(size, generator=generator)[:num_anchors].sort().values.to(device)
        for step, (logits, confidence) in enumerate(block_logits(head, lesson, [starts], num_steps)):
            yield Guess(logits, step + 1, starts=starts, confidence=confidence)
        return
    groups = [torch.arange(first, size, _NUM_GROUPS, device=device) for first in range(_NUM_GROUPS)]
    order = torch.cat(groups).argsort()
    for step, (logits, confidence) in enumerate(block_logits(head, lesson, groups, num_steps)):
        yield Guess(logits[:, order], step + 1, confidence=None if confidence is None else confidence[:, order])


def block_logits(
    head: DFlashHead, lesson: Lessons, groups: Sequence[Tensor], num_steps: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Of each step the logits [B, A, Vd] and, where the head has them, confidences [B, A] (logits) of its token.

    `groups`: int64 [A_i], the last positions whose states the blocks know; A are those of all groups in order. Each
    group takes a pass.
    """
    config, rows = head.config, lesson.rows
    length = rows.shape[1]
    context = head.fuse(lesson.states)
    count = num_steps + config.num_given
    parts = []
    for starts in groups:
        fed = rows.new_full((len(rows), len(starts), count), config.mask_token_id)
        fed[..., 0] = rows[:, starts + 1]
        own = (starts[:, None] + 1 + torch.arange(count, device=rows.device)).flatten()
        positions = torch.cat([torch.arange(length, device=rows.device), own])
        attend = BlockAttention(config.reaches, starts, length, count)
        places = torch.arange(count, device=rows.device).repeat(len(starts))
        out: Tensor = head(fed.flatten(1), context, positions, attend, places)
        parts.append(out.reshape(*fed.shape, -1))
    h = torch.cat(parts, 1)[:, :, config.num_given :]  # [B, A, steps, H]
    starts = torch.cat(list(groups))
    before = torch.stack([rows[:, starts + 1 + step] for step in range(num_steps)], -1)  # the token before each one
    confidences = bias = None
    if isinstance(head, DSparkHead):
        embedded = head.markov_head.markov_w1(before) if head.config.markov_rank else None
        bias = None if embedded is None else head.markov_head.along(h, embedded)
        confidences = head.confidence(h, embedded) if head.config.has_confidence else None
    for step in range(num_steps):
        logits = head.logits(h[:, :, step])
        if bias is not None and isinstance(head, DSparkHead):
            logits = logits + F.linear(bias[:, :, step], head.markov_head.markov_w2.weight)
        yield logits, None if confidences is None else confidences[..., step]
