"""The check a head on native kernels passes at load: fed ragged and in chunks, it must answer as its module does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Segment, build_batch
from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.native.eagle import NativeHead
from engine.kv_pool import KVPool
from engine.loading.self_check import TOLERANCES, Tolerance, disagreement
from engine.native.rounded import Int8Linear

#: Positions of each sequence per pass: first with the target's states, then one at a time on the head's own.
_CHUNKS: Final = ((1, 2, 29, 2), (5, 1, 1, 11))
_OWN_STEPS: Final = 3
#: As :data:`TOLERANCES`, for weights of 8 bits, whose activations are rounded to 16.
_INT8_TOLERANCE: Final = 1e-2
#: Bound of the worst row in half precision: a head attends without a norm before. A wrong draft is rejected.
_WORST: Final = 1.0


class HeadReference:
    """Random tokens and states, and what the module makes of them."""

    def __init__(self, head: EagleHead | Eagle3Head, limit: int) -> None:
        """Run the module, one sequence at a time, before its weights are packed.

        The sequences are cut to fit ``limit`` entries each.
        """
        generator = torch.Generator().manual_seed(20)
        self.vocab_size: int = head.config.vocab_size
        self.token_ids: list[list[int]] = []
        self.states: list[Tensor] = []
        #: For each sequence the module's logits, position after position: [T, outputs].
        self.logits: list[Tensor] = []
        with torch.inference_mode():
            for chunks in _CHUNKS:
                count = min(sum(chunks), max(1, limit - _OWN_STEPS))
                token_ids = torch.randint(self.vocab_size, (count + _OWN_STEPS,), generator=generator)
                states = torch.randn(count, head.num_features, generator=generator).to(head.dtype)
                features = head.fuse(states)
                for _ in range(_OWN_STEPS + 1):
                    length = len(features)
                    brought = head(token_ids[:length], features, torch.arange(length), _attend)
                    features = torch.cat((features, brought[-1:]))
                self.token_ids.append(token_ids.tolist())
                self.states.append(states)
                self.logits.append(head.logits(brought).float())
        self.tolerance = TOLERANCES[head.dtype]
        if isinstance(head.lm_head, Int8Linear):  # a head may attend without a norm before: sharply, so roundings grow
            self.tolerance = Tolerance.of(max(self.tolerance.usual, _INT8_TOLERANCE))
        if self.tolerance.share:
            self.tolerance = replace(self.tolerance, worst=_WORST)

    def difference(self, native: NativeHead, pool: KVPool) -> str | None:
        """Feed the same through the kernels; None if they agree, else what differs."""
        opened = [pool.open(len(ids)) for ids in self.token_ids]
        found: list[list[Tensor]] = [[] for _ in opened]
        own = [Tensor() for _ in opened]

        def feed(counts: Sequence[int], rows: Sequence[Tensor], *, are_features: bool) -> None:
            fed = [s for s, count in enumerate(counts) if count]
            segments = [Segment(opened[s], self.token_ids[s][opened[s].length :][: counts[s]], counts[s]) for s in fed]
            batch = build_batch(
                segments, block_size=pool.block_size, vocab_size=self.vocab_size, max_model_len=sum(map(sum, _CHUNKS))
            )
            states = torch.cat([rows[s] for s in fed])
            logits, brought = native.forward(
                batch.input_ids[0], states, batch.plan, batch.logit_rows, are_features=are_features
            )
            end = 0
            for s in fed:
                end += counts[s]
                opened[s].length += counts[s]
                found[s].append(logits[end - counts[s] : end])
                own[s] = brought[end - 1 : end]

        try:
            for step in zip(*_CHUNKS, strict=True):
                left = [len(states) - sequence.length for states, sequence in zip(self.states, opened, strict=True)]
                counts = [min(count, rest) for count, rest in zip(step, left, strict=True)]
                rows = [
                    states[len(states) - rest :][:count]
                    for states, rest, count in zip(self.states, left, counts, strict=True)
                ]
                if any(counts):
                    feed(counts, rows, are_features=True)
            for _ in range(_OWN_STEPS):
                feed([1] * len(opened), own, are_features=False)
        finally:
            for sequence in reversed(opened):
                pool.release(sequence)
        answers = torch.cat([torch.cat(parts) for parts in found])
        return disagreement(answers, torch.cat(self.logits), self.tolerance)


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    """Causal attention of one sequence, [T, heads, D] each."""
    rows, keys, values = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
