"""Chains of a head of several prediction layers, each of which drafts one token (arXiv 2412.19437, section 2.2).

Row t of layer i reads the token at t + 1 + i. So the last rows of all layers but the first stand on drafted tokens, and
the entries of a position are complete once the n tokens after it are committed: the others are dropped after a chain,
and fed again with the next one (transformers' ``MTPCandidateGenerator`` does the same after a rejection).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from engine.batch import Segment
from engine.chain_job import ChainJob, StopFlags
from engine.chains import draw_chains
from engine.sampling.drafting import DraftedChain
from engine.sampling.transfer import send


def draft_layered_chains(  # noqa: PLR0917
    run: Callable[[Sequence[Segment], Tensor, int], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    num_layers: int,
    jobs: Sequence[ChainJob],
    features: Sequence[Tensor],
    stop: StopFlags | None,
) -> list[DraftedChain]:
    """Ingest what the jobs feed and draft a chain of ``num_layers`` tokens at most; in inference mode.

    ``run`` feeds segments to a layer: with features [T, H] to outputs [T, H]. ``logits_of``: outputs to logits [N, V].
    ``features`` [rows, H] of every job, on the device. Sequences grow by the rows whose entries are complete.
    """
    rows = LayeredRows(run, jobs, features, num_layers)
    drafting = [i for i, job in enumerate(jobs) if job.num_tokens]

    def step(continuing: Sequence[int], token_ids: Tensor | None = None) -> Tensor:
        last = rows.feed(continuing, token_ids)
        return logits_of(torch.stack(last)) if last else features[0].new_zeros(0)

    chains = draw_chains(step(drafting), jobs, step, stop)
    while rows.layer < num_layers:
        rows.feed(())
    rows.end()
    return chains


class LayeredRows:
    """The rows of one batch on their way through the layers."""

    def __init__(
        self,
        run: Callable[[Sequence[Segment], Tensor, int], Tensor],
        jobs: Sequence[ChainJob],
        features: Sequence[Tensor],
        num_layers: int,
    ) -> None:
        """See :func:`draft_layered_chains`."""
        #: The layer that is next.
        self.layer = 0
        self._run = run
        self._sequences = [job.sequence for job in jobs]
        self._lengths = [job.sequence.length for job in jobs]
        self._num_complete = [sum(p + num_layers < len(job.state) for p in job.positions) for job in jobs]
        device = features[0].device
        #: The tokens after the first row's position, and the place of each row's one there.
        self._texts = [send(list(job.state.token_ids[job.positions[0] + 1 :]), device) for job in jobs]
        self._places = [send([p - job.positions[0] for p in job.positions], device) for job in jobs]
        self._outputs = list(features)

    def feed(self, drafting: Collection[int], drawn: Tensor | None = None) -> list[Tensor]:
        """Feed the next layer: all rows of the jobs of these numbers, whose newest tokens are ``drawn``; of the others
        the rows whose entries will be complete. Returns the last outputs [H] of the former.
        """
        for at, i in enumerate(drafting if drawn is not None else ()):
            assert drawn is not None
            self._texts[i] = torch.cat((self._texts[i], drawn[at : at + 1]))
        segments, fed = [], []
        for i, sequence in enumerate(self._sequences):
            sequence.length = self._lengths[i]
            if count := len(self._places[i]) if i in drafting else self._num_complete[i]:
                ids = self._texts[i].index_select(0, self._places[i][:count] + self.layer)
                segments.append(Segment(sequence, ids, 0))
                fed.append((i, count))
        if fed:
            features = torch.cat([self._outputs[i][:count] for i, count in fed])
            out = torch.split(self._run(segments, features, self.layer), [count for _, count in fed])
            for (i, _), rows in zip(fed, out, strict=True):
                self._outputs[i] = rows
        self.layer += 1
        return [self._outputs[i][-1] for i in drafting]

    def end(self) -> None:
        """Keep the complete entries."""
        for sequence, length, count in zip(self._sequences, self._lengths, self._num_complete, strict=True):
            sequence.length = length + count
