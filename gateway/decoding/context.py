"""What all decoding loops of a gateway share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from gateway.decoding.drafters import Drafters
from gateway.pacing.lookup_pacer import LookupPace, LookupPacer
from gateway.pacing.pace import FixedPace, Pace, Pacer
from gateway.pacing.stats import PacingStats
from gateway.pacing.target_pacer import TargetPacer
from gateway.placement.routing import Replica, Router
from specdec.backends import TargetBackend
from specdec.errors import DeadlineExceeded, InvalidRequest, TandemError
from specdec.lookup.base import AnyLookup
from specdec.lookup.registry import make_lookup
from specdec.settings import GatewaySettings

logger = logging.getLogger(__name__)


class DecodingContext:
    """The targets and drafts, how many decoding loops are open on them, and what these learned."""

    def __init__(
        self,
        router: Router,
        settings: GatewaySettings | None = None,
        *,
        make_pacer: Callable[[LookupPacer], Pacer] = TargetPacer,
    ) -> None:
        """``make_pacer`` is called once for each target; a benchmark compares other policies by it.

        Raises:
            InvalidRequest: a lookup cannot be used on this machine.
        """
        self.router = router
        self.settings = settings or GatewaySettings()
        self.open_sessions = 0
        #: What drafts for requests that leave it to the gateway.
        self.drafters = Drafters(self.settings.lookup)
        #: By their methods, once they are needed. Past outputs are shared by the sessions.
        self.lookups: dict[str, AnyLookup] = {
            method: make_lookup(method, self.settings.lookup_settings) for method in self.settings.lookup
        }
        #: Methods of lookups that could not be made here; nobody tries again.
        self.failed_lookups: set[str] = set()
        self._making: dict[str, asyncio.Task[None]] = {}
        self._make_pacer = make_pacer
        # Replicas may leave for good.
        self._pacers: WeakKeyDictionary[Replica[TargetBackend], Pacer] = WeakKeyDictionary()
        self._lookup_pacers: WeakKeyDictionary[Replica[TargetBackend], LookupPacer] = WeakKeyDictionary()
        #: Closings that outlive their caller (a cancelled one); kept so that they are not collected.
        self.closings: set[asyncio.Task[None]] = set()

    @property
    def crowded(self) -> bool:
        """Whether so many sequences are open that drafting would slow them down."""
        limit = self.settings.disable_by_batch_size
        return limit is not None and self.open_sessions > limit

    async def make_lookups(self, methods: Iterable[str], deadline: float | None = None) -> None:
        """Make those that no request needed before, without holding up others: C++ may have to be compiled.

        ``deadline``: moment of the event loop's clock until which the caller waits.

        Raises:
            InvalidRequest: one cannot be used on this machine; the log says why.
            DeadlineExceeded: one is not made yet; the work goes on for later requests.
        """
        for method in methods:
            if method in self.lookups:
                continue
            if method not in self._making:
                self._making[method] = asyncio.create_task(self._make_lookup(method))
            try:
                async with asyncio.timeout_at(deadline):
                    await asyncio.shield(self._making[method])
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the request's deadline passed while method {method} was made ready; try again later"
                ) from None
            if method in self.failed_lookups:
                raise InvalidRequest(
                    f"method {method} cannot be used on this server, whose log says why; name another one",
                    param="method",
                )

    async def _make_lookup(self, method: str) -> None:
        try:
            self.lookups[method] = await asyncio.to_thread(make_lookup, method, self.settings.lookup_settings)
        except Exception as error:
            self.failed_lookups.add(method)
            unexpected = None if isinstance(error, TandemError) else error
            logger.error("method %s is not offered any more: %s", method, error, exc_info=unexpected)

    def pace(self, replica: Replica[TargetBackend], limit: int, drafter: str = "") -> Pace:
        """What decides the number of drafted tokens of one session on a target, ``limit`` at most; ``drafter``: the
        method that drafts them.
        """
        if self.settings.fixed_draft_length:
            return FixedPace(limit)
        if replica not in self._pacers:
            self._pacers[replica] = self._make_pacer(self._lookup_pacer(replica))
        return self._pacers[replica].session(limit, drafter)

    def lookup_pace(
        self, replica: Replica[TargetBackend], methods: tuple[str, ...] = (), *, is_predicted: bool = False
    ) -> LookupPace:
        """What decides how many tokens that were looked up by ``methods``, or ``is_predicted``, one session drafts on a
        target.
        """
        pacer = self._lookup_pacer(replica)
        return LookupPace(pacer, methods, is_fixed=self.settings.fixed_draft_length, is_predicted=is_predicted)

    def _lookup_pacer(self, replica: Replica[TargetBackend]) -> LookupPacer:
        return self._lookup_pacers.setdefault(replica, LookupPacer())

    @property
    def pacing_stats(self) -> dict[str, PacingStats]:
        """What pacing did on each target, by its name."""
        return {replica.name: pacer.stats for replica, pacer in self._pacers.items()}
