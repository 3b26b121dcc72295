"""PARD: a small model that learns to draft several tokens in one pass (An et al. 2025, arXiv 2504.18583).

A chain that starts at position s is fed [tokens up to s, mask, mask, …] at consecutive positions. Each mask sees the
tokens up to s and the masks of its own chain before it, and answers to the target's distribution one position further
on. All chains of a row share one pass: their masks stand behind the row's tokens, and an attention mask keeps them
apart.

COD (conditional drop-token, section 3.3): of the chains that have a mask at one depth, a share have one at the next.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tandem.training.lesson import Lessons
from tandem.training.unroll import Guess

#: Share of the chains at one depth that go on to the next, and the least share of all chains at any depth.
RETENTION: Final = 0.7
LEAST_SHARE: Final = 0.2
#: Groups that all chains are measured in, so that their masks fit.
_NUM_GROUPS: Final = 4
#: The field of ``config.json`` with the mask's id.
FIELD: Final = "pard_token"


def as_parallel(model: LlamaForCausalLM, mask_token_id: int) -> LlamaForCausalLM:
    """The model with a mask token: its configuration names one, and its embeddings have a row for it.

    A new row starts as the mean of all. A model that has a mask token keeps it.
    """
    if getattr(model.config, FIELD, None) is None:
        size = max(model.config.vocab_size, mask_token_id + 1)
        if size > model.config.vocab_size:
            model.resize_token_embeddings(size, mean_resizing=False)
        table = model.model.embed_tokens.weight.data
        table[mask_token_id] = table[:mask_token_id].mean(0)
        setattr(model.config, FIELD, mask_token_id)
        model.config.spd_type = "pard"
    return model


def unroll_parallel(model: LlamaForCausalLM, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
    """All steps of the chains in one pass; while the model trains, of the chains that COD keeps."""
    size = lesson.rows.shape[1] - num_steps
    if model.training:
        starts = kept_starts(size, num_steps, int(lesson.rows.sum()))
        for step, logits in enumerate(parallel_logits(model, lesson.rows, [each + 1 for each in starts])):
            yield Guess(logits, step + 1, starts=starts[step].to(logits.device))
        return
    groups = [torch.arange(first, size, _NUM_GROUPS) for first in range(_NUM_GROUPS)]
    parts = [parallel_logits(model, lesson.rows, [group + 1] * num_steps) for group in groups]
    order = torch.cat(groups).argsort()
    for step in range(num_steps):
        yield Guess(torch.cat([part[step] for part in parts], 1)[:, order], step + 1)


def kept_starts(size: int, num_steps: int, seed: int) -> list[Tensor]:
    """Starts of the chains that have each step, ascending, int64: of the first step all, then some of those before."""
    generator = torch.Generator().manual_seed(seed)
    starts = [torch.arange(size)]
    for step in range(1, num_steps):
        count = max(1, round(size * max(RETENTION**step, LEAST_SHARE)))
        before = starts[-1]
        kept = torch.randperm(len(before), generator=generator)[:count]
        starts.append(before[kept.sort().values])
    return starts


def parallel_logits(model: LlamaForCausalLM, rows: Tensor, anchors: Sequence[Tensor]) -> list[Tensor]:
    """Logits [B, A_j, V] of each depth j for rows int64 [B, T].

    ``anchors[j]`` int64 [A_j], ascending: the last tokens before the chains that have this depth; depth 0 is the token
    itself, depth j its j-th mask. Those of a depth are among those of the one before.
    """
    length, mask_id = rows.shape[1], getattr(model.config, FIELD)
    masks = list(anchors[1:])
    roots = torch.cat([torch.arange(length), *masks])  # the last token that each row of the pass sees
    depths = torch.cat([torch.zeros(length).long(), *(torch.full((len(m),), j + 1) for j, m in enumerate(masks))])
    is_token = depths == 0
    sees_tokens = is_token & (roots <= roots[:, None])
    sees_own = ~is_token & (roots == roots[:, None]) & (depths <= depths[:, None])
    fed = torch.cat([rows, rows.new_full((len(rows), len(roots) - length), mask_id)], 1)
    device = rows.device
    logits = model(
        input_ids=fed,
        position_ids=(roots + depths)[None].expand(len(rows), -1).to(device),
        attention_mask=(sees_tokens | sees_own)[None, None].expand(len(rows), -1, -1, -1).to(device),
        use_cache=False,
    ).logits
    bounds = torch.tensor([length, *map(len, masks)]).cumsum(0).tolist()
    return [
        logits[:, anchors[0].to(device)],
        *(logits[:, start:end] for start, end in pairwise(bounds)),
    ]
