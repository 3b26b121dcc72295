"""Lessons: rows of tokens with the target's distribution after each, and the hidden states a head reads there.

Computing them once lets a drafter pass over the rows many times for little more than its own cost. Of a distribution
the top tokens are kept; the probability beyond them is one number, the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from specdec.errors import ModelNotSupported
from tandem.training.loss_weights import LossWeights

TOP = 32


@dataclass(frozen=True)
class Lessons:
    """What a drafter learns from, for N rows of T tokens.

    `rows` int32 [N, T]; `top_ids` int32 and `top_probs` float16, both [N, T, TOP], the most likely first; `states`
    bfloat16 [N, T, F]: of each position the states asked for, one after another (F is 0 where none were).
    """

    rows: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    states: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: torch.Tensor, device: torch.device | str = "cpu") -> "Lessons":
        """The rows at `index` int64 [M] on a device, ids widened to int64, probabilities and states to float32."""
        return Lessons(
            self.rows[index].to(device).long(),
            self.top_ids[index].to(device).long(),
            self.top_probs[index].to(device).float(),
            self.states[index].to(device).float(),
        )

    def window(self, start: int, length: int) -> "Lessons":
        """The positions from `start` on, `length` of them."""
        return Lessons(*(getattr(self, field.name)[:, start : start + length] for field in fields(self)))

    def at(self, positions: torch.Tensor) -> "Lessons":
        """The positions int64 [M], in this order."""
        return Lessons(*(getattr(self, field.name)[:, positions] for field in fields(self)))

    def restrict(self, to_draft: torch.Tensor) -> "Lessons":
        """The same over a draft's smaller vocabulary: its ids for the target's, -1 where it has none.

        `to_draft` int64 [V] maps the target's ids. The probabilities are the target's given that its token is one the
        draft has; what lies beyond the top tokens is taken for such.
        """
        ids = to_draft[self.top_ids]
        dropped = (self.top_probs * (ids < 0)).sum(-1, keepdim=True)
        probs = self.top_probs * (ids >= 0) / (1 - dropped).clamp_min(1e-6)
        return replace(self, top_ids=ids, top_probs=probs)


@torch.inference_mode()
def write_lessons(
    target: PreTrainedModel,
    rows: torch.Tensor,
    layers: Sequence[int] = (),
    batch_tokens: int = 8192,
    top: int = TOP,
) -> Lessons:
    """Runs the target over rows int [N, T] and keeps `top` probabilities and the states `layers` of each position.

    States are numbered as `output_hidden_states` numbers them: i is the input of layer i, -1 what the language head
    reads, after the final norm. All that is returned is on the CPU.
    """
    batch_rows = max(1, batch_tokens // rows.shape[1])
    parts = []
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows].to(target.device).long()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.float32):
            output = target(input_ids=batch, use_cache=False, output_hidden_states=bool(layers))
        best = output.logits.float().softmax(-1).topk(top, dim=-1)
        states = [output.hidden_states[layer] for layer in layers] or [output.logits[..., :0]]
        parts.append(
            (
                rows[start : start + batch_rows].to("cpu", torch.int32),
                best.indices.to("cpu", torch.int32),
                best.values.to("cpu", torch.float16),
                torch.cat(states, -1).to("cpu", torch.bfloat16),
            )
        )
    return Lessons(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@torch.inference_mode()
def check_states(target: PreTrainedModel, layers: Sequence[int]) -> None:
    """Refuses a target whose states are not what heads expect, by one short forward pass.

    Raises:
        ModelNotSupported: there is no such layer, or the last state is not what the language head reads.
    """
    name = type(target).__name__
    ids = torch.arange(16, device=target.device)[None] % target.config.get_text_config().vocab_size
    output = target(input_ids=ids, use_cache=False, output_hidden_states=True)
    states, head = output.hidden_states, target.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not states or not isinstance(head, nn.Module):
        raise ModelNotSupported(f"{name} gives no hidden states or has no language head: no head can be trained for it")
    for layer in layers:
        if not -1 <= layer < len(states) - 1:
            raise ModelNotSupported(f"{name} has no hidden state {layer}: there are 0 to {len(states) - 2}, and -1")
    if -1 in layers:
        choices = head(states[-1].to(output.logits.dtype)).argmax(-1)
        if (choices == output.logits.argmax(-1)).float().mean() < 0.75:
            raise ModelNotSupported(
                f"the last hidden state of {name} is not what its language head reads: no head can be trained for it"
            )


def distillation_loss(
    logits: torch.Tensor, lesson: Lessons, weights: LossWeights, confidence: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean loss of the draft's logits float32 [B, T, V] against a selected lesson.

    `confidence` float32 [B, T], logits: their binary cross entropy with what a sampled round accepts is added (DSpark).

    Ids of -1 (`Lessons.restrict`) are no tokens of the draft. Positions where the target's first choice is one of
    them are left out, as in EAGLE-3.
    """
    log_probs = logits.log_softmax(-1)
    known = lesson.top_ids >= 0
    top_log_q = log_probs.gather(-1, lesson.top_ids.clamp_min(0))  # [B, T, TOP]
    top_q = top_log_q.exp() * known
    rest_q = (1 - top_q.sum(-1)).clamp_min(1e-6)
    rest_p = (1 - lesson.top_probs.sum(-1)).clamp_min(1e-6)
    safe_p = lesson.top_probs.clamp_min(1e-7)
    divergence = (safe_p * (safe_p.log() - top_log_q) * known).sum(-1)
    divergence = divergence + rest_p * (rest_p.log() - rest_q.log())
    greedy = -top_log_q[..., 0]
    variation = ((top_q - lesson.top_probs).abs().sum(-1) + (rest_q - rest_p).abs()) / 2
    loss = weights.divergence * divergence + weights.greedy * greedy + weights.variation * variation
    if confidence is not None:
        accepted = (1 - variation).clamp(0, 1).detach()
        loss = loss + binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    counted = known[..., 0]
    return (loss * counted).sum() / counted.sum().clamp_min(1)
