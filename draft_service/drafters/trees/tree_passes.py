"""Token trees of a draft model: one forward pass a level, all sessions together.

The tokens of a level follow different tokens, so they are fed as a tree, together with the levels before. That costs
little beside reading the weights. Nothing of the tree stays in the cache: after the verdict the accepted tokens are
fed like any committed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, float32

from draft_service.drafters.trees.token_tree import TokenTree
from engine.batch import Segment
from engine.device import has_triton
from engine.kv_sequence import KVSequence
from engine.native import library
from engine.native.sampling import knows, likeliest
from engine.sampling.candidates import Find, candidates
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from engine.sampling.transfer import send
from specdec.rules import Rule
from specdec.tree_shape import TreeShape


@dataclass(frozen=True, slots=True)
class TreeJob:
    """One session's tree."""

    sequence: KVSequence
    #: Fed first, at least one; the tree follows them.
    token_ids: Sequence[int]
    shape: TreeShape
    #: Tokens of the tree at most.
    num_tokens: int
    sampling: SamplingState
    rule: Rule


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """The drafted tokens of one session, parents first and the best ones first."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]


class Passes(Protocol):
    """Forward passes over trees: by an engine, or by a draft head with its features."""

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """As :meth:`Engine.forward <engine.engine.Engine.forward>`. Of a tree all rows are fed at every level
        again, the first ones as before; logits are wanted of the new ones.
        """
        ...


def draft_trees(passes: Passes, jobs: Sequence[TreeJob], stopped: Callable[[], Sequence[bool]]) -> list[DraftedTree]:
    """Draft every tree; each sequence grows by its ``token_ids`` alone. A job that is stopped ends with the levels it
    has, and so does one whose next level has no room in its sequence.

    Called where passes are run.
    """
    trees = [TokenTree(job.shape, job.num_tokens) for job in jobs]
    ends = [job.sequence.length + len(job.token_ids) for job in jobs]
    width = max(job.shape.top_k for job in jobs)
    logits = passes.forward([Segment(job.sequence, job.token_ids, 1) for job in jobs])
    active, rows = list(range(len(jobs))), Rows.after([job.sampling for job in jobs])
    while True:
        counts = [len(trees[i].frontier) for i in active]
        rules = [jobs[i].rule for i, count in zip(active, counts, strict=True) for _ in range(count)]
        ids, logprobs = _candidates(logits, rows, rules, width)
        first = 0
        for i, count in zip(active, counts, strict=True):
            some, top_k = slice(first, first + count), jobs[i].shape.top_k
            trees[i].add_level([row[:top_k] for row in ids[some]], [row[:top_k] for row in logprobs[some]])
            first += count
        stop = stopped()
        fed = {
            i: trees[i].fed
            for i in active
            if not (trees[i].is_complete or stop[i]) and ends[i] + len(trees[i].fed[0]) <= jobs[i].sequence.capacity
        }
        active = list(fed)
        if not active:
            return [DraftedTree(*tree.finish()) for tree in trees]
        segments = []
        for i, (token_ids, parents) in fed.items():
            jobs[i].sequence.length = ends[i]
            segments.append(Segment(jobs[i].sequence, token_ids, len(trees[i].frontier), parents=parents))
        try:
            logits = passes.forward(segments)
        finally:
            for i in active:
                jobs[i].sequence.length = ends[i]
        rows = _rows_of([jobs[i].sampling for i in active], list(fed.values()), [trees[i] for i in active])


def _candidates(
    logits: Tensor, rows: Rows, rules: Sequence[Rule], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Children of every row and their log q; by the native kernels on a CPU, if they are available. A GPU is waited for
    once.
    """
    if logits.device.type == "cpu" and logits.dtype is float32 and logits.is_contiguous():
        kernels = library.load()
        if kernels is not None and all(map(knows, rows.states)):
            return likeliest(kernels, logits, rows, rules, min(count, logits.shape[1]))
    token_ids, logprobs = candidates(logits, rows, rules, count, finder(logits.device))
    ids, values = torch.stack([token_ids.double(), logprobs]).tolist()
    return [[int(token_id) for token_id in row] for row in ids], values


def finder(device: torch.device) -> Find | None:
    """What finds candidates on a GPU with kernels; None: torch's operations do."""
    if device.type != "cuda" or not has_triton():
        return None
    from engine.cuda.drawing import find  # noqa: PLC0415 - there is no Triton without a GPU

    return find


def _rows_of(
    states: Sequence[SamplingState], fed: Sequence[tuple[list[int], list[int]]], trees: Sequence[TokenTree]
) -> Rows:
    """The rows of the frontiers: the last ones that were fed."""
    rows = Rows.along(states, [ids for ids, _ in fed], [parents for _, parents in fed])
    wanted: list[int] = []
    end = 0
    for (ids, _), tree in zip(fed, trees, strict=True):
        end += len(ids) + 1
        wanted += range(end - len(tree.frontier), end)
    return rows.select(wanted)


def new_rows(rows: Tensor, segments: Sequence[Segment]) -> Sequence[Tensor]:
    """The new rows of each segment."""
    return torch.split(rows, [segment.num_logits for segment in segments])


def rows_of_parents(states: Tensor, parents: Sequence[int]) -> Tensor:
    """The rows of the nodes with these indices, -1 for the root: row 0."""
    return states.index_select(0, send([parent + 1 for parent in parents], states.device))
