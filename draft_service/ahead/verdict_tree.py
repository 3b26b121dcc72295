"""The verdict tree of one session: the verdicts that may come, and the proposals drafted for them.

The root is the proposal whose verdict is awaited. The children of a proposal are the verdicts it may get. A verdict
accepts some of a proposal's tokens and adds one of the target's own; the tokens it commits identify it. Its probability
is that of accepting exactly so many (acceptance by position), times that of the guess of the target's token. A node's
probability is the product along its path. Drafting for the most likely nodes first decides width and depth by itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from draft_service.ahead.acceptance_stats import SessionStats
from draft_service.common_prefix import common_prefix_len
from draft_service.drafters.base import Draft

#: Verdicts less likely than this are not drafted for.
FLOOR: Final = 0.02


@dataclass(slots=True, eq=False)
class VerdictNode:
    """A possible verdict, and the proposal drafted for it."""

    parent: VerdictNode | None
    #: What the verdict commits after the parent's path: drafts of the parent's proposal, then the target's own token.
    token_ids: tuple[int, ...]
    #: The target's own token is not among ``token_ids`` yet: it is guessed while drafting.
    assumes_next: bool
    #: Committed length after the verdict.
    committed_len: int
    #: Estimated probability of the verdict.
    likelihood: float
    #: Tokens to draft for it.
    num_tokens: int = 0
    #: The proposal; None: not drafted yet.
    draft: Draft | None = None
    #: Guesses of the token the target puts after the whole proposal; empty until a draft for that verdict exists.
    next_guesses: tuple[int, ...] = ()
    #: The verdicts on the proposal, by their tokens.
    children: dict[tuple[int, ...], VerdictNode] = field(default_factory=dict)

    @property
    def path(self) -> tuple[int, ...]:
        """All tokens it assumes to be committed after the root's prefix."""
        tokens, node = self.token_ids, self.parent
        while node is not None:
            tokens, node = node.token_ids + tokens, node.parent
        return tokens

    def is_possible_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the verdict is still possible, or the latest one, when these tokens follow the root's prefix."""
        path = self.path
        if len(token_ids) > len(path) + self.assumes_next:
            return False
        return common_prefix_len(path, token_ids) == min(len(path), len(token_ids))


class VerdictTree:
    """The verdict tree of one session; empty if nothing may be drafted ahead."""

    def __init__(
        self, stats: SessionStats, stop_token_ids: frozenset[int], max_tokens_at: Callable[[int], int]
    ) -> None:
        """``max_tokens_at`` tells how many tokens may be drafted at a committed length."""
        self._stats = stats
        self._stop_token_ids = stop_token_ids
        self._max_tokens_at = max_tokens_at
        self.root: VerdictNode | None = None
        #: Nodes to draft for, the most likely first.
        self.undrafted: list[VerdictNode] = []
        #: How many of them may still be drafted for before the next verdict.
        self.budget = 0

    def reset_root(self, committed_len: int, draft: Draft) -> None:
        """Start with the proposal whose verdict is awaited."""
        self.root = VerdictNode(None, (), False, committed_len, 1.0, draft=draft)
        self.undrafted = []
        self._expand(self.root)

    @property
    def num_drafted(self) -> int:
        """Tokens of the proposal whose verdict is awaited."""
        return 0 if self.root is None or self.root.draft is None else len(self.root.draft.token_ids)

    def clear(self) -> None:
        """Forget everything."""
        self.root = None
        self.undrafted = []

    def mark_started(self, node: VerdictNode) -> None:
        """A draft for the node was started. If it fails, the node stays undrafted until the next verdict."""
        self.undrafted.remove(node)
        self.budget -= 1

    def add_draft(self, node: VerdictNode, draft: Draft) -> None:
        """Add the proposal drafted for a node, and the verdicts it may get."""
        parent = node.parent
        assert parent is not None
        node.draft = draft
        if node.assumes_next:
            del parent.children[node.token_ids]
            node.token_ids += draft.next_guesses[:1]
            node.assumes_next = False
            parent.children[node.token_ids] = node
            parent.next_guesses = draft.next_guesses
            self._expand(parent)
        self._expand(node)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Tokens were committed: count what they show, and make the node of this verdict the root.

        False if no proposal was drafted for exactly these tokens; the tree is empty then.
        """
        node, left = self.root, tuple(token_ids)
        while node is not None and left:
            self._count(node, left)
            node = next(
                (c for c in node.children.values() if c.draft and left[: len(c.token_ids)] == c.token_ids), None
            )
            left = left[len(node.token_ids) :] if node is not None else ()
        if node is None:
            self.clear()
            return False
        self.root, node.parent, node.token_ids = node, None, ()
        self.undrafted = []
        self._rescale(node, 1.0 / node.likelihood)
        return True

    def _count(self, node: VerdictNode, token_ids: tuple[int, ...]) -> None:
        """Count what a verdict did with a proposal."""
        draft = node.draft
        assert draft is not None
        accepted, num_drafted = common_prefix_len(draft.token_ids, token_ids), len(draft.token_ids)
        is_rejection = accepted < min(num_drafted, len(token_ids))
        self._stats.count(accepted, accepted + is_rejection)
        if is_rejection and draft.guesses:
            self._stats.after_rejection.count(token_ids[accepted], _others(draft, accepted))
        elif accepted == num_drafted < len(token_ids) and node.next_guesses:
            self._stats.after_all.count(token_ids[accepted], node.next_guesses)

    def _rescale(self, node: VerdictNode, factor: float) -> None:
        """Scale all likelihoods after a verdict; nodes that were too unlikely before may be added now."""
        node.likelihood *= factor
        if node.draft is None:
            self._enqueue(node)
            return
        for child in tuple(node.children.values()):
            self._rescale(child, factor)
        self._expand(node)

    def _expand(self, node: VerdictNode) -> None:
        """Add the likely verdicts on a proposal that the tree does not have yet."""
        draft = node.draft
        assert draft is not None
        reach = node.likelihood
        for at, token in enumerate(draft.token_ids):
            acceptance = self._stats.acceptance(at)
            if draft.guesses:
                rejected = reach * (1.0 - acceptance)
                for guess, probability in zip(
                    _others(draft, at), self._stats.after_rejection.probabilities, strict=False
                ):
                    self._add_child(node, (*draft.token_ids[:at], guess), rejected * probability)
            reach *= acceptance
            if token in self._stop_token_ids or reach < FLOOR:
                return
        probabilities = self._stats.after_all.probabilities
        if not node.next_guesses:
            self._add_child(node, draft.token_ids, reach * probabilities[0], assumes_next=True)
        for guess, probability in zip(node.next_guesses, probabilities, strict=False):
            self._add_child(node, (*draft.token_ids, guess), reach * probability)

    def _add_child(
        self, node: VerdictNode, token_ids: tuple[int, ...], likelihood: float, *, assumes_next: bool = False
    ) -> None:
        if likelihood < FLOOR or not token_ids or token_ids in node.children:
            return
        if not assumes_next and token_ids[-1] in self._stop_token_ids:
            return  # that verdict is the last one
        length = node.committed_len + len(token_ids) + assumes_next
        child = VerdictNode(node, token_ids, assumes_next, length, likelihood)
        node.children[token_ids] = child
        self._enqueue(child)

    def _enqueue(self, node: VerdictNode) -> None:
        node.num_tokens = self._max_tokens_at(node.committed_len)
        if node.num_tokens > 0 and node.likelihood >= FLOOR:
            insort(self.undrafted, node, key=_unlikeliness)


def _others(draft: Draft, at: int) -> list[int]:
    """Guesses of the token the target puts in the place of a rejected one."""
    return [guess for guess in draft.guesses[at] if guess != draft.token_ids[at]]


def _unlikeliness(node: VerdictNode) -> float:
    return -node.likelihood
