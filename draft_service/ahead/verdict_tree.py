"""Guesses at the coming verdicts of one session, as a tree: proposals, and under each the verdicts it may get.

Pure bookkeeping. The root is the proposal whose verdict is awaited. A verdict accepts some of a proposal's tokens and
adds one of the target's own, so it is named by the tokens it commits. Its probability is that of accepting just so many
(acceptance by position), times that of the guess of the target's token; along the tree probabilities multiply. Ordered
by them, fan-out falls geometrically with the number of accepted tokens by itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from draft_service.ahead.acceptance_stats import SessionOdds
from draft_service.drafters.base import Draft
from draft_service.prefixes import common_prefix_len

#: Verdicts less likely than this are not drafted for.
FLOOR: Final = 0.02


@dataclass(slots=True, eq=False)
class Hypothesis:
    """A verdict that may come, and what is drafted for it."""

    parent: Hypothesis | None
    #: What the verdict commits after what the parent assumes: drafts of the parent's, then the target's own token.
    token_ids: tuple[int, ...]
    #: The target's own token is not among ``token_ids`` yet: it is guessed while drafting.
    assumes_next: bool
    #: Committed length after the verdict.
    committed_len: int
    #: Probability, as far as it is known now, that this comes true.
    likelihood: float
    #: Tokens to draft for it.
    num_tokens: int = 0
    #: What was drafted; None before.
    draft: Draft | None = None
    #: Guesses of the token the target puts after the whole of what was drafted; empty before that was drafted after.
    next_guesses: tuple[int, ...] = ()
    #: The verdicts on what was drafted, by their tokens.
    children: dict[tuple[int, ...], Hypothesis] = field(default_factory=dict)

    @property
    def path(self) -> tuple[int, ...]:
        """All tokens it assumes to be committed after the root's prefix."""
        tokens, node = self.token_ids, self.parent
        while node is not None:
            tokens, node = node.token_ids + tokens, node.parent
        return tokens

    def may_follow(self, token_ids: Sequence[int]) -> bool:
        """Whether it can still come true, and is not over yet, when these tokens follow the root's prefix."""
        path = self.path
        if len(token_ids) > len(path) + self.assumes_next:
            return False
        return common_prefix_len(path, token_ids) == min(len(path), len(token_ids))


class VerdictTree:
    """The hypotheses of one session; empty where nothing may be drafted ahead."""

    def __init__(self, odds: SessionOdds, stop_token_ids: frozenset[int], num_tokens_at: Callable[[int], int]) -> None:
        """``num_tokens_at`` tells how many tokens are to be drafted at a committed length."""
        self._odds = odds
        self._stop_token_ids = stop_token_ids
        self._num_tokens_at = num_tokens_at
        self._root: Hypothesis | None = None
        #: Hypotheses to draft for, the likeliest first.
        self.open: list[Hypothesis] = []
        #: How many of them may still be drafted for before the next verdict.
        self.budget = 0

    def plant(self, committed_len: int, draft: Draft) -> None:
        """Begin anew with the proposal whose verdict is awaited."""
        self._root = Hypothesis(None, (), False, committed_len, 1.0, draft=draft)
        self.open = []
        self._expand(self._root)

    @property
    def num_drafted(self) -> int:
        """Tokens of the proposal whose verdict is awaited."""
        return 0 if self._root is None or self._root.draft is None else len(self._root.draft.token_ids)

    def clear(self) -> None:
        """Forget everything."""
        self._root = None
        self.open = []

    def start(self, hypothesis: Hypothesis) -> None:
        """It is being drafted for. If that comes to nothing, it is left alone until the next verdict."""
        self.open.remove(hypothesis)
        self.budget -= 1

    def grow(self, hypothesis: Hypothesis, draft: Draft) -> None:
        """It was drafted for: the verdicts on that are hypotheses, too."""
        parent = hypothesis.parent
        assert parent is not None
        hypothesis.draft = draft
        if hypothesis.assumes_next:
            del parent.children[hypothesis.token_ids]
            hypothesis.token_ids += draft.next_guesses[:1]
            hypothesis.assumes_next = False
            parent.children[hypothesis.token_ids] = hypothesis
            parent.next_guesses = draft.next_guesses
            self._expand(parent)
        self._expand(hypothesis)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Tokens were committed: learn from them, and go on from the hypothesis they make true.

        False where none was drafted for exactly these; the tree is empty then.
        """
        node, left = self._root, tuple(token_ids)
        while node is not None and left:
            self._learn(node, left)
            node = next(
                (c for c in node.children.values() if c.draft and left[: len(c.token_ids)] == c.token_ids), None
            )
            left = left[len(node.token_ids) :] if node is not None else ()
        if node is None:
            self.clear()
            return False
        self._root, node.parent, node.token_ids = node, None, ()
        self.open = []
        self._rescale(node, 1.0 / node.likelihood)
        return True

    def _learn(self, node: Hypothesis, token_ids: tuple[int, ...]) -> None:
        """Count what a verdict did with a proposal."""
        draft = node.draft
        assert draft is not None
        accepted, num_drafted = common_prefix_len(draft.token_ids, token_ids), len(draft.token_ids)
        is_rejection = accepted < min(num_drafted, len(token_ids))
        self._odds.count(accepted, accepted + is_rejection)
        if is_rejection and draft.guesses:
            self._odds.after_rejection.count(token_ids[accepted], _others(draft, accepted))
        elif accepted == num_drafted < len(token_ids) and node.next_guesses:
            self._odds.after_all.count(token_ids[accepted], node.next_guesses)

    def _rescale(self, node: Hypothesis, factor: float) -> None:
        """Adapt all likelihoods to what came true; what was too unlikely before may be worth it now."""
        node.likelihood *= factor
        if node.draft is None:
            self._offer(node)
            return
        for child in tuple(node.children.values()):
            self._rescale(child, factor)
        self._expand(node)

    def _expand(self, node: Hypothesis) -> None:
        """Add the likely verdicts on a proposal, as far as they are not there yet."""
        draft = node.draft
        assert draft is not None
        reach = node.likelihood
        for at, token in enumerate(draft.token_ids):
            acceptance = self._odds.acceptance(at)
            if draft.guesses:
                rejected = reach * (1.0 - acceptance)
                for guess, chance in zip(_others(draft, at), self._odds.after_rejection.chances, strict=False):
                    self._add(node, (*draft.token_ids[:at], guess), rejected * chance)
            reach *= acceptance
            if token in self._stop_token_ids or reach < FLOOR:
                return
        chances = self._odds.after_all.chances
        if not node.next_guesses:
            self._add(node, draft.token_ids, reach * chances[0], assumes_next=True)
        for guess, chance in zip(node.next_guesses, chances, strict=False):
            self._add(node, (*draft.token_ids, guess), reach * chance)

    def _add(
        self, node: Hypothesis, token_ids: tuple[int, ...], likelihood: float, *, assumes_next: bool = False
    ) -> None:
        if likelihood < FLOOR or not token_ids or token_ids in node.children:
            return
        if not assumes_next and token_ids[-1] in self._stop_token_ids:
            return  # that verdict is the last one
        length = node.committed_len + len(token_ids) + assumes_next
        child = Hypothesis(node, token_ids, assumes_next, length, likelihood)
        node.children[token_ids] = child
        self._offer(child)

    def _offer(self, node: Hypothesis) -> None:
        node.num_tokens = self._num_tokens_at(node.committed_len)
        if node.num_tokens > 0 and node.likelihood >= FLOOR:
            insort(self.open, node, key=_unlikeliness)


def _others(draft: Draft, at: int) -> list[int]:
    """Guesses of the token the target puts in the place of a rejected one."""
    return [guess for guess in draft.guesses[at] if guess != draft.token_ids[at]]


def _unlikeliness(hypothesis: Hypothesis) -> float:
    return -hypothesis.likelihood
