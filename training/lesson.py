"""Lessons: rows of tokens with the target's distribution after each, cut to its top tokens.

Computing them once lets the draft pass over the rows many times for little more than its own
cost. The probability beyond the top tokens is kept as one number, the rest.
"""

import time
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

TOP = 32


@dataclass(frozen=True)
class Lessons:
    """`rows` int16 [N, T]; `top_ids` int16 and `top_probs` float16, both [N, T, TOP]."""

    rows: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: torch.Tensor) -> "Lessons":
        """The rows at `index` int64 [M], ids widened to int64 and probabilities to float32."""
        return Lessons(self.rows[index].long(), self.top_ids[index].long(), self.top_probs[index].float())


@torch.inference_mode()
def write_lessons(target: LlamaForCausalLM, rows: torch.Tensor, batch_tokens: int = 8192, top: int = TOP) -> Lessons:
    """Runs the target over rows int [N, T] and keeps the `top` probabilities of each position."""
    batch_rows = max(1, batch_tokens // rows.shape[1])
    ids, probs = [], []
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows].long()
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(input_ids=batch, use_cache=False).logits  # [B, T, V]
        best = logits.float().softmax(-1).topk(top, dim=-1)
        ids.append(best.indices.to(torch.int16))
        probs.append(best.values.to(torch.float16))
        if start // batch_rows % 25 == 0:
            print(f"{time.strftime('%H:%M:%S')} lessons {start}/{len(rows)}", flush=True)
    return Lessons(rows.to(torch.int16), torch.cat(ids), torch.cat(probs))


def distillation_loss(
    logits: torch.Tensor, lesson: Lessons, *, greedy_weight: float, variation_weight: float
) -> torch.Tensor:
    """Mean loss of the draft's logits float32 [B, T, V] against a selected lesson.

    Kullback-Leibler divergence from the target over its top tokens and the rest, plus
    `greedy_weight` times the cross entropy of the target's first choice (what a greedy round
    accepts), plus `variation_weight` times the total variation (what a sampled round rejects:
    Leviathan et al. 2023, theorem 3.5).
    """
    log_probs = logits.log_softmax(-1)
    top_log_q = log_probs.gather(-1, lesson.top_ids)  # [B, T, TOP]
    top_q = top_log_q.exp()
    rest_q = (1 - top_q.sum(-1)).clamp_min(1e-6)
    rest_p = (1 - lesson.top_probs.sum(-1)).clamp_min(1e-6)
    safe_p = lesson.top_probs.clamp_min(1e-7)
    divergence = (safe_p * (safe_p.log() - top_log_q)).sum(-1)
    divergence = divergence + rest_p * (rest_p.log() - rest_q.log())
    greedy = -top_log_q[..., 0]
    variation = (top_q - lesson.top_probs).abs().sum(-1) + (rest_q - rest_p).abs()
    return (divergence + greedy_weight * greedy + variation_weight * variation / 2).mean()
