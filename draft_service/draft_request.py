"""A session's request for a draft, and the batch of requests that the drafter runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

from draft_service.drafters.base import Draft, DraftJob, S, Stop
from specdec.tree_shape import TreeShape


class DraftRequest(Generic[S]):
    """One session's request, from submission to its draft."""

    __slots__ = (
        "batch",
        "deliver",
        "draft_ns",
        "is_resolved",
        "is_stream",
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
        tree: TreeShape | None = None,
        is_stream: bool = False,
    ) -> None:
        self.state = state
        #: Tokens to draft; 0 only ingests what is pending.
        self.num_tokens = num_tokens
        #: Called once, unless the request is cancelled. The drafter has released the state by then.
        self.deliver = deliver
        #: The shape of the tree to draft; None: a chain.
        self.tree = tree
        #: Another one follows at once.
        self.is_stream = is_stream
        self.stop = Stop()
        self.is_resolved = False
        #: The batch that contains the request, while the drafter runs it.
        self.batch: InflightBatch | None = None
        self.submitted_ns = time.perf_counter_ns()
        self.queue_ns = 0
        self.draft_ns = 0

    def job(self, num_rows: int) -> DraftJob[S]:
        """The job for the drafter: ingest ``num_rows`` pending tokens, and draft if no other token is pending."""
        num_tokens = self.num_tokens if num_rows == self.state.num_pending else 0
        return DraftJob(self.state, num_rows, num_tokens, self.stop, self.tree, self.is_stream)

    def resolve(self, outcome: Draft | Exception) -> None:
        """Deliver the outcome, once."""
        if not self.is_resolved:
            self.is_resolved = True
            self.deliver(outcome)

    def cancel(self) -> None:
        """The draft is not needed any more: it does not start, or stops soon, and is not delivered."""
        self.is_resolved = True
        self.stop.request_stop()


class InflightBatch:
    """A batch that the drafter runs."""

    __slots__ = ("on_finished",)

    def __init__(self) -> None:
        #: Called once the outcomes are delivered.
        self.on_finished: list[Callable[[], None]] = []
