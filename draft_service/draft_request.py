"""A session's request for a draft, and the batch of requests that the drafter runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

from draft_service.drafters.base import Draft, DraftJob, S, Stop
from specdec.tree_shape import TreeShape


class DraftRequest(Generic[S]):
    """One session's request, from submission to its draft."""

    __slots__ = (
        "assumed",
        "assumes_next",
        "batch",
        "deliver",
        "draft_ns",
        "is_resolved",
        "likelihood",
        "num_guesses",
        "num_tokens",
        "queue_ns",
        "state",
        "stop",
        "submitted_ns",
        "tree",
    )

    def __init__(
        self,
        state: S,
        num_tokens: int,
        deliver: Callable[[Draft | Exception], None],
        *,
        num_guesses: int = 0,
        assumed: tuple[int, ...] = (),
        assumes_next: bool = False,
        likelihood: float = 1.0,
        tree: TreeShape | None = None,
    ) -> None:
        self.state = state
        #: Tokens to draft; 0 only ingests what is pending.
        self.num_tokens = num_tokens
        #: Called once, unless the request is cancelled. The drafter has released the state by then.
        self.deliver = deliver
        self.num_guesses = num_guesses
        self.assumed = assumed
        self.assumes_next = assumes_next
        #: Probability that the draft will be used; 1 for one that a session waits for.
        self.likelihood = likelihood
        #: The shape of the tree to draft; None: a chain.
        self.tree = tree
        self.stop = Stop()
        self.is_resolved = False
        #: The batch that contains the request, while the drafter runs it.
        self.batch: InflightBatch | None = None
        self.submitted_ns = time.perf_counter_ns()
        self.queue_ns = 0
        self.draft_ns = 0

    def job(self, num_rows: int) -> DraftJob[S]:
        """The job for the drafter: ingest ``num_rows`` pending tokens, and draft if no other token is pending."""
        num_tokens = self.num_tokens if self.assumed or num_rows == self.state.num_pending else 0
        return DraftJob(
            self.state, num_rows, num_tokens, self.num_guesses, self.assumed, self.assumes_next, self.stop, self.tree
        )

    def resolve(self, outcome: Draft | Exception) -> None:
        """Deliver the outcome, once."""
        if not self.is_resolved:
            self.is_resolved = True
            self.deliver(outcome)

    def cancel(self) -> None:
        """The draft is not needed any more: it does not start, or stops soon, and is not delivered."""
        self.is_resolved = True
        self.likelihood = 0.0
        self.stop.request_stop()


class InflightBatch:
    """A batch that the drafter runs."""

    __slots__ = ("is_speculative", "num_waiting", "on_finished", "requests")

    def __init__(self, requests: Sequence[DraftRequest[Any]]) -> None:
        self.requests = requests
        #: Every request is drafted ahead of a verdict: no session waits for any of them.
        self.is_speculative = all(request.assumed for request in requests)
        #: Sessions of the batch that will submit a request when it has finished.
        self.num_waiting = 0
        #: Called once the outcomes are delivered.
        self.on_finished: list[Callable[[], None]] = []

    def preempt_speculative(self, num_waiting: int) -> None:
        """Stop the unconfirmed drafts of a speculative batch if more sessions wait for its end than it will serve.

        The drafts that a verdict has confirmed continue: a session waits for them.
        """
        if self.is_speculative and num_waiting > sum(
            request.likelihood for request in self.requests if not request.stop.is_requested
        ):
            for request in self.requests:
                if request.likelihood < 1.0:
                    request.stop.request_stop()
