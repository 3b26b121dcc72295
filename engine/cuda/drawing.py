"""Drafted tokens of a GPU in one copy to it and three launches, where drawing one depends on the logits as they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.cuda import choices
from engine.cuda.choices import Walk
from engine.sampling.drafting import Drafted, draft
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import SEEDED_RULE, Rule

logger = logging.getLogger(__name__)

#: Tokens of the vocabulary of the check: more than one part.
_CHECKED_TOKENS = 5000


def draw(logits: Tensor, rows: Rows, rules: Sequence[Rule]) -> Drafted | None:
    """:func:`engine.sampling.drafting.draft`; None where torch must draw."""
    walks = []
    for i, (state, position, rule) in enumerate(zip(rows.states, rows.positions, rules, strict=True)):
        sampling = rule.sampling_at(state.params.temperature)
        if state.edits or sampling.sends_q or (sampling.shares_noise and state.truncates):
            return None
        keys = [state.noise_key(Stream.COUPLING, position)] if sampling.shares_noise else []
        walks.append(Walk([i], (), (), state.params.temperature, keys))
    if all(state.params.greedy for state in rows.states) or not _is_right(logits.device):
        return None  # the largest logit is one launch of torch's
    return Drafted(choices.walk(logits, walks, rows.states[0].num_tokens)[1].long())


@cache
def _is_right(device: torch.device) -> bool:
    """Whether the kernels draw as torch does; else the log says once why not."""
    try:
        with torch.inference_mode():
            logits = torch.randn(4, _CHECKED_TOKENS, generator=torch.Generator().manual_seed(7)).to(device)
            params = [SamplingParams(temperature=i / 2, seed=i) for i in range(4)]
            states = [SamplingState(own, [1], 1, _CHECKED_TOKENS, device=device) for own in params]
            rows, rules = Rows.after(states), [SEEDED_RULE] * 4
            keys = [state.noise_key(Stream.COUPLING, 1) for state in states]
            walks = [Walk([i], (), (), own.temperature, [keys[i]]) for i, own in enumerate(params)]
            found = choices.walk(logits, walks, _CHECKED_TOKENS)[1].tolist()
            wanted = draft(logits, rows, rules).token_ids.tolist()
    except Exception as error:  # compilers of kernels raise anything
        logger.warning("drafts are drawn without kernels: %s: %s", type(error).__name__, error)
        return False
    if found != wanted:
        logger.warning("drafts are drawn without kernels: they draw other tokens")
    return found == wanted
