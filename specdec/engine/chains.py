"""Chains of drafted tokens: feed what is pending, then draw and feed one token after the other, for many sequences.

Only what a chain depends on enters it: a chain is the same whatever is drafted beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    On a CPU all of this is one native call where the model's passes are native, too.

    Returns one chain per job, in order, empty where none was asked for. Raises like :meth:`Engine.forward`, after
    which sequences may have grown: roll them back.
    """
    if not jobs:
        return []
    decoder = engine.decoder
    if isinstance(decoder, NativeDecoder):
        engine.copy_blocks()
        size, limit = engine.pool.block_size, engine.info.max_model_len
        return native.draft_chains(decoder, jobs, stop, block_size=size, max_model_len=limit)
    return _draft_in_torch(engine, jobs, stop)


def _draft_in_torch(engine: Engine, jobs: Sequence[ChainJob], stop: StopFlags | None) -> list[DraftedChain]:
    """The same with a pass per step."""
    chains = [DraftedChain(())] * len(jobs)
    with torch.inference_mode():
        logits = engine.forward([Segment(job.sequence, job.token_ids, min(job.num_tokens, 1)) for job in jobs])
        drafting = [i for i, job in enumerate(jobs) if job.num_tokens]
        if drafting:
            is_stopped = (lambda at: False) if stop is None else (lambda at: bool(stop[drafting[at]]))
            steps, lengths = _steps(engine, logits, [jobs[i] for i in drafting], is_stopped)
            for i, chain in zip(drafting, collect(steps, lengths), strict=True):
                chains[i] = chain
    return chains


def _steps(
    engine: Engine, logits: torch.Tensor, jobs: Sequence[ChainJob], is_stopped: Callable[[int], bool]
) -> tuple[list[Drafted], list[int]]:
    """Draw, feed the drawn tokens, and so on; chains that end leave the batch.

    Tokens stay on the device. Every step's result has all rows: those of chains that ended are filler. Also returns
    the length of each chain.
    """
    rows = Rows.after([job.state for job in jobs], [job.assumed for job in jobs])
    num_candidates = max(job.num_candidates for job in jobs)
    lengths = [job.num_tokens for job in jobs]
    active = list(range(len(jobs)))
    steps: list[Drafted] = []
    while True:
        drafted = draft(logits, rows, [jobs[i].rule for i in active], num_candidates)
        steps.append(_spread(drafted, active, len(jobs)))
        going_on = []
        for at, i in enumerate(active):
            if is_stopped(i):
                lengths[i] = len(steps)
            elif lengths[i] > len(steps):
                going_on.append(at)
        if not going_on:
            return steps, lengths
        tokens, rows = drafted.token_ids, rows.extended(drafted.token_ids)
        if len(going_on) < len(active):
            rows = rows.select(going_on)
        logits = engine.forward([Segment(jobs[active[at]].sequence, tokens[at : at + 1], 1) for at in going_on])
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
