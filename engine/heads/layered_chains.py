"""Chains of a head of several prediction layers, each of which drafts one token (arXiv 2412.19437, section 2.2).

Row t of layer i reads the token at t + 1 + i. So the last rows of all layers but the first stand on drafted tokens, and
the entries of a position are complete once the n tokens after it are committed: the others are dropped after a chain,
and fed again with the next one (transformers' ``MTPCandidateGenerator`` does the same after a rejection).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from engine.batch import Segment
from engine.chain_job import ChainJob, StopFlags
from engine.chains import draw_chains
from engine.sampling.drafting import DraftedChain
from engine.sampling.transfer import send

#: A pass of some segments through the layer of a number: features [T, H] to outputs [T, H] and logits [N, V].
Run: TypeAlias = Callable[[Sequence[Segment], Tensor, int], tuple[Tensor, Tensor]]


def draft_layered_chains(
    run: Run,
    num_layers: int,
    jobs: Sequence[ChainJob],
    features: Sequence[Tensor],
    stop: StopFlags | None,
) -> list[DraftedChain]:
    """Ingest what the jobs feed and draft a chain of ``num_layers`` tokens at most; in inference mode.

    ``run`` feeds segments to a layer: with features [T, H] to outputs [T, H], which last until the layer is run again,
    and logits [N, V]. ``features`` [rows, H] of every job, on the device. Sequences grow by the rows whose entries are
    complete.
    """
    rows = LayeredRows(run, jobs, features, num_layers)
    drafting = [i for i, job in enumerate(jobs) if job.num_tokens]

    def step(continuing: Sequence[int], token_ids: Tensor | None = None) -> Tensor:
        logits = rows.feed(continuing, token_ids)
        return features[0].new_zeros(0) if logits is None else logits

    chains = draw_chains(step(drafting), jobs, step, stop)
    while rows.layer < num_layers:
        rows.feed(())
    rows.end()
    return chains


class LayeredRows:
    """The rows of one batch on their way through the layers."""

    def __init__(
        self,
        run: Run,
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
        texts = [job.state.token_ids[job.positions[0] + 1 :] for job in jobs]
        width = max(map(len, texts)) + num_layers
        #: Of each job the tokens after the first row's position, then room for those drawn; one after another.
        self._texts = send([[*ids, *[0] * (width - len(ids))] for ids in texts], features[0].device).flatten()
        #: Where its drawn tokens come, and the place of each row's token.
        self._ends = [i * width + len(ids) for i, ids in enumerate(texts)]
        self._places = [[i * width + p - job.positions[0] for p in job.positions] for i, job in enumerate(jobs)]
        self._outputs = list(features)

    def feed(self, drafting: Collection[int], drawn: Tensor | None = None) -> Tensor | None:
        """Feed the next layer: all rows of the jobs of these numbers, whose newest tokens are ``drawn``; of the others
        the rows whose entries will be complete. Returns the logits [n, V] after the former; None: nothing was fed.
        """
        logits = None
        device = self._texts.device
        if drawn is not None:
            self._texts.index_copy_(0, send([self._ends[i] + self.layer - 1 for i in drafting], device), drawn)
        fed = []
        for i, sequence in enumerate(self._sequences):
            sequence.length = self._lengths[i]
            if count := len(self._places[i]) if i in drafting else self._num_complete[i]:
                fed.append((i, count))
        if fed:
            places = [place + self.layer for i, count in fed for place in self._places[i][:count]]
            ids = torch.split(self._texts.index_select(0, send(places, device)), [count for _, count in fed])
            segments = [
                Segment(self._sequences[i], own, int(i in drafting)) for (i, _), own in zip(fed, ids, strict=True)
            ]
            features = torch.cat([self._outputs[i][:count] for i, count in fed])
            out, logits = self._run(segments, features, self.layer)
            for (i, _), rows in zip(fed, torch.split(out, [count for _, count in fed]), strict=True):
                self._outputs[i] = rows
        self.layer += 1
        return logits

    def end(self) -> None:
        """Keep the complete entries."""
        for sequence, length, count in zip(self._sequences, self._lengths, self._num_complete, strict=True):
            sequence.length = length + count
