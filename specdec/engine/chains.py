"""Chains of drafted tokens: feed what is pending, then draw and feed one token after the other, for many sequences.

Only what a chain depends on enters it: a chain is the same whatever is drafted beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.engine.chain_job import ChainJob, StopFlags
from specdec.engine.engine import Engine, Segment
from specdec.engine.native import chains as native
from specdec.engine.native.decoder import NativeDecoder
from specdec.sampling.drafting import Drafted, DraftedChain, collect, draft
from specdec.sampling.rows import Rows
from specdec.sampling.transfer import send

__all__ = ["ChainJob", "StopFlags", "draft_chains"]


def draft_chains(engine: Engine, jobs: Sequence[ChainJob], stop: StopFlags | None = None) -> list[DraftedChain]:
    """Draft a chain for every job; called on the device thread.

    The first pass feeds all jobs' tokens in one ragged batch; then every step draws a token per chain and feeds those
    of chains that go on. The last token drawn is not fed, so a sequence grows by ``len(token_ids)`` and one less than
    the tokens drawn (by ``len(token_ids)`` where none were). Chains whose ``stop`` flag is raised end at the next step
    with the tokens they have.

    On a CPU all of this is one native call where the model's passes are native, too. Jobs whose parameters edit logits
    are drawn by torch.

    Returns one chain per job, in order, empty where none was asked for. Raises like :meth:`Engine.forward`, after
    which sequences may have grown: roll them back.
    """
    chains = [DraftedChain(())] * len(jobs)
    decoder = engine.decoder
    in_torch = list(range(len(jobs)))
    if isinstance(decoder, NativeDecoder):
        natively = [i for i, job in enumerate(jobs) if not job.num_tokens or native.can_draw(job.state)]
        in_torch = [i for i in in_torch if i not in set(natively)]
        for i, chain in zip(natively, _draft_natively(engine, decoder, jobs, natively, stop), strict=True):
            chains[i] = chain
    for i, chain in zip(in_torch, _draft_in_torch(engine, jobs, in_torch, stop), strict=True):
        chains[i] = chain
    return chains


def _draft_natively(
    engine: Engine, decoder: NativeDecoder, jobs: Sequence[ChainJob], numbers: Sequence[int], stop: StopFlags | None
) -> list[DraftedChain]:
    """Draft the jobs of these numbers, all steps in one native call."""
    if not numbers:
        return []
    chosen = [jobs[i] for i in numbers]
    with torch.inference_mode():
        batch = engine.prepare([Segment(job.sequence, job.token_ids, min(job.num_tokens, 1)) for job in chosen])
        for job, kv_len in zip(chosen, batch.kv_lens, strict=True):
            if kv_len + job.num_tokens - 1 > min(job.sequence.max_tokens, engine.info.max_model_len):
                raise ValueError(
                    f"{job.num_tokens} drafted tokens after {kv_len} entries exceed the {job.sequence.max_tokens} the"
                    f" sequence has room for (the model takes {engine.info.max_model_len})"
                )
        chains = native.draft_chains(decoder, batch, jobs, numbers, stop)
    for job, chain, kv_len in zip(chosen, chains, batch.kv_lens, strict=True):
        job.sequence.length = kv_len + max(0, len(chain.token_ids) - 1)
    return chains


def _draft_in_torch(
    engine: Engine, jobs: Sequence[ChainJob], numbers: Sequence[int], stop: StopFlags | None
) -> list[DraftedChain]:
    """Draft the jobs of these numbers, a pass per step."""
    if not numbers:
        return []
    chosen = [jobs[i] for i in numbers]
    chains = [DraftedChain(())] * len(chosen)
    with torch.inference_mode():
        logits = engine.forward([Segment(job.sequence, job.token_ids, min(job.num_tokens, 1)) for job in chosen])
        drafting = [i for i, job in enumerate(chosen) if job.num_tokens]
        if drafting:
            steps, lengths = _steps(engine, logits, jobs, [numbers[i] for i in drafting], stop)
            for i, chain in zip(drafting, collect(steps, lengths), strict=True):
                chains[i] = chain
    return chains


def _steps(
    engine: Engine, logits: torch.Tensor, jobs: Sequence[ChainJob], numbers: Sequence[int], stop: StopFlags | None
) -> tuple[list[Drafted], list[int]]:
    """Draw, feed the drawn tokens, and so on; chains that end leave the batch.

    Tokens stay on the device. Every step's result has all rows: those of chains that ended are filler. Also returns
    the length of each chain.
    """
    drafting = [jobs[i] for i in numbers]
    rows = Rows.after([job.state for job in drafting], [job.assumed for job in drafting])
    num_candidates = max(job.num_candidates for job in drafting)
    lengths = [job.num_tokens for job in drafting]
    active = list(range(len(drafting)))
    steps: list[Drafted] = []
    while True:
        drafted = draft(logits, rows, [drafting[i].rule for i in active], num_candidates)
        steps.append(_spread(drafted, active, len(drafting)))
        going_on = []
        for at, i in enumerate(active):
            if stop is not None and stop[numbers[i]]:
                lengths[i] = len(steps)
            elif lengths[i] > len(steps):
                going_on.append(at)
        if not going_on:
            return steps, lengths
        tokens, rows = drafted.token_ids, rows.extended(drafted.token_ids)
        if len(going_on) < len(active):
            rows = rows.select(going_on)
        logits = engine.forward([Segment(drafting[active[at]].sequence, tokens[at : at + 1], 1) for at in going_on])
        active = [active[at] for at in going_on]


def _spread(drafted: Drafted, active: Sequence[int], num_rows: int) -> Drafted:
    """The same result with a row for every chain; those that ended get filler."""
    if len(active) == num_rows:
        return drafted
    at = send(active, drafted.token_ids.device)

    def spread(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.new_zeros(num_rows, *part.shape[1:]).index_copy_(0, at, part)

    token_ids = spread(drafted.token_ids)
    assert token_ids is not None
    return Drafted(token_ids, spread(drafted.q_token_ids), spread(drafted.q_weights), spread(drafted.candidates))
