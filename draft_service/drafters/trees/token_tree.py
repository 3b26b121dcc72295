"""The token tree of one session while it is drafted, level by level.

Li, Wei, Zhang, Zhang 2024, "EAGLE-2: Faster inference of language models with dynamic draft trees" (arXiv 2406.16858).

    score of a token = sum of log q along its path
    level 0: the top_k likeliest tokens
    level l: the top_k likeliest children of each token of the frontier; the top_k of them with the best scores are the
             next frontier
    at the end: of all tokens of all levels the best by score

A token's score is no better than its parent's, so what is chosen is a tree, and so are its first tokens: the order is
that of the scores. Static trees (``TreeShape.nodes``) take the ranks they name instead.

Pure bookkeeping on the host. Who calls it feeds the frontier and brings the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.tree_shape import Ranks, TreeShape


@dataclass(frozen=True, slots=True)
class Node:
    """One candidate."""

    token_id: int
    #: Index of the node it follows; -1: the prefix.
    parent: int
    score: float
    ranks: Ranks


class TokenTree:
    """Candidates of all levels so far."""

    def __init__(self, shape: TreeShape, num_tokens: int) -> None:
        """``num_tokens``: tokens of the finished tree at most."""
        self._shape = shape
        self._num_tokens = num_tokens
        self._nodes: list[Node] = []
        self._fed: list[int] = []
        #: Nodes whose children are wanted next; before the first level that is the prefix, -1.
        self.frontier: list[int] = [-1]
        self._level = 0

    @property
    def is_complete(self) -> bool:
        """Whether no more children are wanted."""
        return not self.frontier

    def add_level(self, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        """Children of each node of the frontier, the likeliest first: ``top_k`` or fewer each, and their log q.

        Children of log q -inf are none.
        """
        first = len(self._nodes)
        for parent, ids, values in zip(self.frontier, token_ids, logprobs, strict=True):
            score, ranks = (0.0, ()) if parent < 0 else (self._nodes[parent].score, self._nodes[parent].ranks)
            for rank, (token_id, logprob) in enumerate(zip(ids, values, strict=True)):
                if logprob > -float("inf"):
                    self._nodes.append(Node(token_id, parent, score + min(logprob, 0.0), (*ranks, rank)))
        grown = range(first, len(self._nodes))
        self._level += 1
        if self._level >= self._shape.depth:
            self.frontier = []
        elif self._shape.nodes:
            inner = self._shape.inner(self._level - 1)
            self.frontier = [index for index in grown if self._nodes[index].ranks in inner]
        else:
            self.frontier = sorted(grown, key=self._order)[: self._shape.top_k]
        self._fed += self.frontier

    @property
    def fed(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of all nodes that were in a frontier; the current frontier is last. Feed them after the
        prefix to get the children of the frontier.
        """
        return self._without_gaps(self._fed)

    def finish(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and parents of the finished tree, parents first; its first tokens are the best tree of so many."""
        chosen = sorted(range(len(self._nodes)), key=self._order)
        if self._shape.nodes:
            at = {node.ranks: index for index, node in enumerate(self._nodes)}
            chosen = [at[ranks] for ranks in self._shape.nodes if ranks in at]
        token_ids, parents = self._without_gaps(chosen[: self._num_tokens])
        return tuple(token_ids), tuple(parents)

    def _order(self, index: int) -> tuple[float, int]:
        return -self._nodes[index].score, index

    def _without_gaps(self, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents of some of the nodes, with the parents' places among them."""
        place = {index: at for at, index in enumerate(chosen)} | {-1: -1}
        nodes = [self._nodes[index] for index in chosen]
        return [node.token_id for node in nodes], [place[node.parent] for node in nodes]
