"""What a drafter proposes from every position of a row at once, token after token: the training-time test.

A chain that starts at position s knows the target's states up to s and the tokens up to s + 1, and drafts the tokens
s + 2, s + 3, … Its own tokens are taken to be right, as those of a chain that is still accepted are, but from the
second step on a head reads its own features instead of the target's, as it will when it serves (EAGLE-3, Li et al.
2025, arXiv 2503.01840, section 3.2). All chains of a row share one causal pass a step.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.medusa import MedusaHeads
from engine.heads.mlp_speculator import MlpSpeculator
from tandem.training.lesson import Lessons


@dataclass(frozen=True)
class Guess:
    """One step of all chains: `logits` [B, S, Vd] of the token at s + offset + 1, for s in 0…S-1.

    They answer to the target's distribution at position s + offset. `features` [B, S, H], where a head predicts the
    target's state there, are its prediction. `starts` int64 [S]: where only some chains have this step, their s.
    `confidence` [B, S], logits: where a head estimates the chance that the token is accepted.
    """

    logits: Tensor
    offset: int
    features: Tensor | None = None
    starts: Tensor | None = None
    confidence: Tensor | None = None

    def answers(self, lesson: Lessons) -> Lessons:
        """The positions of a lesson that the logits answer to."""
        if self.starts is None:
            return lesson.window(self.offset, self.logits.shape[1])
        return lesson.at(self.starts + self.offset)


class ChainAttention:
    """Attention of the chains: each sees the target's positions up to its start, and its own later steps.

    Called once a step by each layer. The first step's keys stand for all positions of the row, causally; those of a
    later step belong to one chain each.
    """

    def __init__(self) -> None:
        #: Keys and values of each layer, step after step.
        self._steps: defaultdict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """[B, S, Hq, D], [B, S, Hkv, D] and [B, S, Hkv, D] to [B, S, Hq, D]."""
        repeats = query.shape[2] // key.shape[2]
        all_keys, all_values = self._steps[layer]
        all_keys.append(key.repeat_interleave(repeats, 2))
        all_values.append(value.repeat_interleave(repeats, 2))
        query = query * query.shape[-1] ** -0.5
        size = query.shape[1]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, all_keys[0])
        later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        own = [torch.einsum("bqhd,bqhd->bhq", query, keys)[..., None] for keys in all_keys[1:]]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(value.dtype)  # [B, Hq, S, S + steps before]
        out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :size], all_values[0])
        for step, values in enumerate(all_values[1:]):
            out = out + weights[..., size + step].transpose(1, 2)[..., None] * values
        return out


def unroll_eagle(head: EagleHead | Eagle3Head, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
    """EAGLE-1, -2 and -3: the features of a step are the input of the next."""
    size = lesson.rows.shape[1] - num_steps
    features = head.fuse(lesson.states[:, :size])
    positions = torch.arange(size, device=features.device)
    attend = ChainAttention()
    for step in range(num_steps):
        token_ids = lesson.rows[:, step + 1 : step + 1 + size]
        features = head(token_ids, features, positions + step, attend)
        yield Guess(head.logits(features), step + 1, features)


def unroll_medusa(heads: MedusaHeads, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
    """Medusa: all steps from the one state."""
    states = lesson.states[:, : lesson.rows.shape[1] - num_steps]
    for step, head in enumerate(list(heads)[:num_steps]):
        yield Guess(head(states), step + 1)


def unroll_mlp(head: MlpSpeculator, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
    """MLP speculator: a state that ingests one token a step."""
    size = lesson.rows.shape[1] - num_steps
    state = head.start(lesson.states[:, :size])
    for step in range(num_steps):
        state = head(lesson.rows[:, step + 1 : step + 1 + size], state, step)
        yield Guess(head.logits(state, step), step + 1)


def unroll_draft(model: PreTrainedModel, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
    """A small model: one pass over the row says all, for it reads tokens only."""
    size = lesson.rows.shape[1] - num_steps
    logits = model(input_ids=lesson.rows, use_cache=False).logits
    for step in range(num_steps):
        yield Guess(logits[:, step + 1 : step + 1 + size], step + 1)
