"""Simulate target, gateway and draft: when does each round start, if recorded rounds are replayed?

Times are in target steps. Each of a round's four hops (draft to gateway, gateway to target, and back) takes a quarter
of d, verification takes ``verify``, and a draft step c for one branch and c · ``slope`` more for each further one of
its batch. The draft drafts k tokens after each assumed verdict; where the verdict is none of those, it
drops what it is at within one step and starts again. What is drafted ahead, and in which order, is the policy:

    serial        nothing
    full accept   the chain of verdicts that accept all and add the best guess, as far ahead as ``depth``
    enumerated    the likeliest verdicts first, up to ``fan_out`` guesses of the bonus token and
                  fan_out · α^(j/2) (at least one) of the token after a rejection at j, several branches in a batch

A proposal that is drafted when its verdict comes waits at the gateway (the round starts half a d after the verdict), or
was forwarded to the target already (it starts at once).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from benchmarks.rounds import NUM_GUESSES, GuessOutcome, Statistics

#: A place in the tree of verdicts: those assumed since the start of the text.
Path = tuple[GuessOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCosts:
    """In target steps."""

    #: One draft step of one branch.
    c: float
    #: Network and serialisation of a round.
    d: float
    #: Verification of k drafts.
    verify: float = 1.0
    #: Share of a draft step that each further branch of a batch adds.
    slope: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is drafted ahead."""

    name: str
    #: Guesses of the bonus token; 0 drafts nothing ahead.
    fan_out: int = 0
    #: Guesses of the token after a rejection are made, too.
    rejections: bool = False
    #: Verdicts ahead of the last known one, at most.
    depth: int = 0
    #: PendingProposals drafted in one batch, and below one verdict, at most.
    batch: int = 1
    num_ahead_proposals: int = 16
    #: Proposals are sent to the target before the verdict.
    forward: bool = False

    def guesses(self, statistics: Statistics) -> list[tuple[float, GuessOutcome]]:
        """The verdicts worth drafting for, with their probabilities, likeliest first."""
        k, alpha = statistics.k, statistics.alpha
        widths = {k: self.fan_out}
        if self.rejections:
            widths |= {j: max(1, round(self.fan_out * alpha ** (j / 2))) for j in range(k)}
        outcomes = [GuessOutcome(j, rank) for j, width in widths.items() for rank in range(min(width, NUM_GUESSES))]
        weighed = [(statistics.likelihood(outcome), outcome) for outcome in outcomes]
        return sorted((each for each in weighed if each[0] > 0), key=lambda each: -each[0])


@dataclass(frozen=True, slots=True)
class Playback:
    """What a playback came to."""

    num_rounds: int
    num_tokens: int
    #: Target steps it took.
    steps: float
    #: Rounds, after each text's first, whose proposal was complete when the verdict before it was made.
    num_hits: int
    #: Proposals drafted, whole or in part, that no round used.
    num_wasted: int

    @property
    def speed(self) -> float:
        """Tokens per target step: speed over plain decoding."""
        return self.num_tokens / self.steps

    @property
    def hit_rate(self) -> float:
        """Share of the rounds that could be drafted ahead and were."""
        return self.num_hits / max(self.num_rounds, 1)

    def __add__(self, other: Playback) -> Playback:
        """Both, one after the other."""
        return Playback(
            self.num_rounds + other.num_rounds,
            self.num_tokens + other.num_tokens,
            self.steps + other.steps,
            self.num_hits + other.num_hits,
            self.num_wasted + other.num_wasted,
        )


def play(
    texts: Sequence[Sequence[GuessOutcome]], statistics: Statistics, costs: SimulatedCosts, policy: Policy
) -> Playback:
    """Play every text back on its own; the sum."""
    total = Playback(0, 0, 0.0, 0, 0)
    guesses = policy.guesses(statistics) if policy.depth else []
    for text in texts:
        total += _SimulatedSession(text, statistics.k, guesses, costs, policy).play()
    return total


class _SimulatedSession:
    """One text. The draft works, and when it completes the proposal of a round, the round's times follow."""

    def __init__(
        self,
        text: Sequence[GuessOutcome],
        k: int,
        guesses: Sequence[tuple[float, GuessOutcome]],
        costs: SimulatedCosts,
        policy: Policy,
    ) -> None:
        self._text = tuple(text)
        self._k = k
        self._guesses = guesses
        self._costs = costs
        self._policy = policy
        self._hop = costs.d / 4
        #: When the verdict of each round was made; the first verdict is that of prefilling, at 0.
        self._verdicts: list[float] = []
        #: Paths whose proposals are complete, those that verdicts ruled out included.
        self._drafted: set[Path] = set()
        self._num_hits = self._num_started = 0

    def play(self) -> Playback:
        """Draft until every round has its verdict."""
        now, known = 2 * self._hop, 0  # verdicts the draft knows of; that of prefilling arrived
        while len(self._verdicts) < len(self._text):
            root = self._text[:known]
            batch = [root] if root not in self._drafted else self._next_batch(root)
            if batch:
                now, known = self._draft(batch, now, known)
            else:
                now, known = self._arrival(known), known + 1
        num_rounds = len(self._text)
        return Playback(
            num_rounds=num_rounds,
            num_tokens=sum(outcome.accepted + 1 for outcome in self._text),
            steps=self._verdicts[-1],
            num_hits=self._num_hits,
            num_wasted=self._num_started - num_rounds,
        )

    def _arrival(self, number: int) -> float:
        """When the draft learns of verdict ``number``; infinite while its round has no proposal."""
        return self._verdicts[number] + 2 * self._hop if number < len(self._verdicts) else inf

    def _draft(self, batch: list[Path], now: float, known: int) -> tuple[float, int]:
        """Draft after each path of the batch, step by step; verdicts that arrive drop the branches they rule out."""
        self._num_started += len(batch)
        with_bonus = any(path and path[-1].accepted == self._k and len(path) > known for path in batch)
        for _ in range(self._k + with_bonus):
            now += self._costs.c * (1.0 + self._costs.slope * (len(batch) - 1))
            while self._arrival(known) <= now:
                known += 1
                batch = [path for path in batch if path[:known] == self._text[:known]]
            if not batch:
                return now, known
        for path in batch:
            self._drafted.add(path)
            if path == self._text[: len(path)] and len(path) == len(self._verdicts):
                self._start_round(now)
        return now, known

    def _start_round(self, drafted: float) -> None:
        """The proposal of the next round is complete: when its round starts and what follows from that."""
        before = self._verdicts[-1] if self._verdicts else 0.0
        self._num_hits += bool(self._verdicts) and drafted <= before
        round_trip = 2 * self._hop
        start = max(before, drafted + round_trip) if self._policy.forward else max(before, drafted) + round_trip
        self._verdicts.append(start + self._costs.verify)

    def _next_batch(self, root: Path) -> list[Path]:
        """The likeliest paths below the root that are not drafted but continue one that is."""
        found: list[Path] = []
        for looked_at, path in enumerate(self._likeliest_first(root)):
            if looked_at == self._policy.num_ahead_proposals or len(found) == self._policy.batch:
                break
            if path not in self._drafted:
                found.append(path)
        return found

    def _likeliest_first(self, root: Path) -> Iterator[Path]:
        """Paths below the root by falling probability; below a path that is not drafted nothing is looked at."""
        heap: list[tuple[float, int, Path]] = []
        count = 0

        def push_children(path: Path, likelihood: float) -> None:
            nonlocal count
            if len(path) - len(root) < self._policy.depth and len(path) + 1 < len(self._text):
                for share, outcome in self._guesses:
                    heappush(heap, (-likelihood * share, count, (*path, outcome)))
                    count += 1

        push_children(root, 1.0)
        while heap:
            negative, _, path = heappop(heap)
            yield path
            if path in self._drafted:
                push_children(path, -negative)
