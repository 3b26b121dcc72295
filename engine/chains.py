"""Chains of drafted tokens: feed what is pending, then draw and feed one token after the other, for many sequences.

Only what a chain depends on enters it: a chain is the same whatever is drafted beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import torch

from engine.chain_job import ChainJob, Drawing, StopFlags
from engine.device import has_triton
from engine.engine import Engine, Segment
from engine.sampling.drafting import Drafted, DraftedChain, collect, draft
from engine.sampling.rows import Rows
from engine.sampling.transfer import send
from specdec.rules import Rule

__all__ = ["ChainJob", "Drawing", "Extend", "Feed", "StopFlags", "draft_chains", "draw_chains"]

#: Feeds the tokens just drawn, int64 [n], of the jobs of these numbers: to the logits after them, float32 [n, V].
Feed: TypeAlias = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
#: Feeds the tokens just drawn of all chains, and draws and feeds so many more, by the rows and rules that come next.
#: None: it cannot, and nothing was fed.
Extend: TypeAlias = Callable[[torch.Tensor, Rows, Sequence[Rule], int], list[Drafted] | None]


def draft_chains(engine: Engine, jobs: Sequence[ChainJob], stop: StopFlags | None = None) -> list[DraftedChain]:
    """Draft a chain for every job; called on the device thread.

    The first pass feeds all jobs' tokens in one ragged batch; then every step draws a token per chain and feeds those
    of chains that continue. The last token drawn is not fed: a sequence grows by ``len(token_ids)`` and one less than
    the tokens drawn (by ``len(token_ids)`` where none were, or all were drafted in parallel). Chains whose ``stop``
    flag is raised end at the next step with the tokens they have.

    Of one batch, all jobs have a ``mask_token_id`` or none has. With it there is one pass: the token after the i-th
    mask is drawn from its row. A row depends on the tokens drawn before only where the session's parameters edit its
    logits; so q is what the token was drawn from, given those tokens.

    All of this is one call where the engine's runner can make it.

    Returns one chain per job, in order, empty where none was asked for. Raises like :meth:`Engine.forward`, after
    which sequences may have grown: roll them back.
    """
    if not jobs:
        return []
    engine.copy_blocks()
    chains = engine.runner.draft_chains(jobs, stop)
    return draft_in_torch(engine, jobs, stop) if chains is None else chains


def draft_in_torch(engine: Engine, jobs: Sequence[ChainJob], stop: StopFlags | None) -> list[DraftedChain]:
    """The same with a pass per step."""
    if any(job.num_masks or job.features is not None for job in jobs):
        return _draft_in_parallel(engine, jobs, stop)
    with torch.inference_mode():
        logits = engine.forward([Segment(job.sequence, job.token_ids, min(job.num_tokens, 1)) for job in jobs])

        def feed(continuing: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
            return engine.forward(
                [Segment(jobs[i].sequence, token_ids[at : at + 1], 1) for at, i in enumerate(continuing)]
            )

        captured, sequences = engine.runner.captured_chains, [job.sequence for job in jobs if job.num_tokens]
        extend = None if captured is None else partial(captured.extend, sequences)
        return draw_chains(logits, jobs, feed, stop, extend)


def _draft_in_parallel(engine: Engine, jobs: Sequence[ChainJob], stop: StopFlags | None) -> list[DraftedChain]:
    """The same with one pass, over masks behind the tokens."""
    with torch.inference_mode():
        fed = [[*job.token_ids, *[job.mask_token_id or 0] * job.num_masks] for job in jobs]
        segments = [Segment(job.sequence, ids, job.num_tokens) for job, ids in zip(jobs, fed, strict=True)]
        with nullcontext() if engine.added is None else engine.added.adding(_added_rows(jobs)):
            logits = engine.forward(segments)
        for job in jobs:
            job.sequence.length -= job.num_masks  # what is fed next replaces their entries
        firsts = [0, *accumulate(job.num_tokens for job in jobs)]
        step = 0

        def rows(of: Sequence[int]) -> torch.Tensor:
            return logits.index_select(0, send([firsts[i] + step for i in of], logits.device))

        def feed(continuing: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
            nonlocal step
            step += 1
            return rows(continuing)

        return draw_chains(rows([i for i, job in enumerate(jobs) if job.num_tokens]), jobs, feed, stop)


def _added_rows(jobs: Sequence[ChainJob]) -> torch.Tensor:
    """What the rows of the jobs, masks included, read beside their tokens, [T, H]."""
    parts = []
    for job in jobs:
        assert job.features is not None, "all jobs of such a model bring rows"
        parts += [job.features, job.features[-1:].expand(job.num_masks, -1)]
    return torch.cat(parts)


def draw_chains(
    logits: torch.Tensor, jobs: Sequence[Drawing], feed: Feed, stop: StopFlags | None, extend: Extend | None = None
) -> list[DraftedChain]:
    """Draw a chain for every job that wants tokens, empty for the others; in inference mode.

    ``logits`` float32 [those jobs, V] of the first token. Tokens stay on the device until all chains are drawn. Chains
    of one length may be extended by ``extend``: once it is called, none is stopped.
    """
    chains = [DraftedChain(())] * len(jobs)
    drafting = [i for i, job in enumerate(jobs) if job.num_tokens]
    if drafting:
        steps, lengths = _steps(logits, jobs, drafting, feed, stop, extend=extend)
        for i, chain in zip(drafting, collect(steps, lengths), strict=True):
            chains[i] = chain
    return chains


def _steps(
    logits: torch.Tensor,
    jobs: Sequence[Drawing],
    drafting: Sequence[int],
    feed: Feed,
    stop: StopFlags | None,
    *,
    extend: Extend | None,
) -> tuple[list[Drafted], list[int]]:
    """Draw, feed the drawn tokens, and so on; chains that end leave the batch.

    Every step's result has all rows: those of chains that ended are filler. Also returns the length of each chain.
    """
    rows = Rows.after([jobs[i].state for i in drafting])
    lengths = [jobs[i].num_tokens for i in drafting]
    active = list(range(len(drafting)))
    steps: list[Drafted] = []
    while True:
        drafted = drawn(logits, rows, [jobs[drafting[i]].rule for i in active])
        steps.append(_spread(drafted, active, len(drafting)))
        continuing = []
        for at, i in enumerate(active):
            if stop is not None and stop[drafting[i]]:
                lengths[i] = len(steps)
            elif lengths[i] > len(steps):
                continuing.append(at)
        if not continuing:
            return steps, lengths
        tokens, rows = drafted.token_ids, rows.extended(drafted.token_ids)
        if len(continuing) < len(active):
            rows = rows.select(continuing)
            tokens = tokens.index_select(0, send(continuing, tokens.device))
        active = [active[at] for at in continuing]
        if len(steps) == 1 and extend is not None and len(set(lengths)) == 1:
            more = extend(tokens, rows, [jobs[i].rule for i in drafting], lengths[0] - 1)
            if more is not None:
                return steps + more, lengths
        logits = feed([drafting[i] for i in active], tokens)


def drawn(logits: torch.Tensor, rows: Rows, rules: Sequence[Rule]) -> Drafted:
    """A token of each row, by kernels of a GPU where they know how."""
    if logits.device.type != "cuda" or not has_triton():
        return draft(logits, rows, rules)
    from engine.cuda.drawing import draw  # noqa: PLC0415 - there is no Triton without a GPU

    return draw(logits, rows, rules)


def _spread(drafted: Drafted, active: Sequence[int], num_rows: int) -> Drafted:
    """The same result with a row for every chain; those that ended get filler."""
    if len(active) == num_rows:
        return drafted
    at = send(active, drafted.token_ids.device)

    def spread(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.new_zeros(num_rows, *part.shape[1:]).index_copy_(0, at, part)

    token_ids = spread(drafted.token_ids)
    assert token_ids is not None
    return Drafted(token_ids, spread(drafted.q_token_ids), spread(drafted.q_weights))
