"""Simpler policies than the gateway's own, to compare it with, and a gateway that runs one of them.

``python -m benchmarks.pacing_baselines POLICY …`` takes the gateway's flags after the name of the policy.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final

import uvloop

from gateway.app import Gateway, serve
from gateway.main import add_arguments, settings_of
from gateway.pacing.pace import Pace, Pacer
from gateway.pacing.stats import Mode, PacingStats
from gateway.pacing.target_pacer import TargetPacer
from specdec.flags import Parser
from specdec.types import Verdict

#: The static rule: drafted tokens, and sessions from which on nothing is drafted.
STATIC_TOKENS: Final = 4
STATIC_SESSIONS: Final = 2
#: The bandit: drafted tokens of its arms, session time of a window, the weight of the newest one, and one window in so
#: many that tries an arm at random.
ARMS: Final = (0, 2, 4, 8)
WINDOW_NS: Final = 50_000_000
NEWEST: Final = 0.3
EXPLORE_EVERY: Final = 20


class SharedLengthPacer:
    """All sessions of a target draft the same number of tokens; subclasses choose it."""

    def __init__(self) -> None:
        self.stats = PacingStats()
        self.num_sessions = 0

    def session(self, limit: int, drafter: str = "") -> Pace:
        """See :class:`~gateway.pacing.pace.Pacer`."""
        return SharedLengthPace(self, limit)

    def num_draft_tokens(self) -> int:
        """What all sessions draft now."""
        raise NotImplementedError

    def record(self, cycle_ns: int, num_tokens: int) -> None:
        """A session took ``cycle_ns`` for ``num_tokens``."""


class SharedLengthPace:
    """A session of a :class:`SharedLengthPacer`."""

    speedup: Final = 1.0

    def __init__(self, target: SharedLengthPacer, limit: int) -> None:
        self.k = 0
        self._target, self._limit = target, limit
        self._last_ns: int | None = None
        self._is_open = True
        target.num_sessions += 1

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self.k = max(0, min(self._limit, num_remaining - 1, self._target.num_draft_tokens()))
        return self.k

    def record(self, verdict: Verdict, num_asked: int, now_ns: int, *, tree_depth: int | None = None) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is not None and self._limit:
            stats = self._target.stats
            stats.num_verdicts[Mode.SPECULATIVE if num_asked else Mode.PLAIN] += 1
            stats.num_draft_tokens += num_asked
            self._target.record(now_ns - last_ns, len(verdict.token_ids))

    def skip(self, now_ns: int) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self._last_ns = now_ns

    def leave(self) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self._target.num_sessions -= self._is_open
        self._is_open = False


class StaticPacer(SharedLengthPacer):
    """Draft while few sessions are open."""

    def num_draft_tokens(self) -> int:
        """A constant, or nothing."""
        return STATIC_TOKENS if self.num_sessions <= STATIC_SESSIONS else 0


class BanditPacer(SharedLengthPacer):
    """The length that brought most tokens per second at this load, and now and then another one."""

    def __init__(self) -> None:
        super().__init__()
        self._speeds: dict[tuple[int, int], float] = {}
        self._arm = self._num_windows = self._ns = self._num_tokens = 0

    def num_draft_tokens(self) -> int:
        """The arm of this window."""
        return self._arm

    def record(self, cycle_ns: int, num_tokens: int) -> None:
        """Add to the window; choose the next arm when it is over."""
        self._ns += cycle_ns
        self._num_tokens += num_tokens
        if self._ns < WINDOW_NS * self.num_sessions or self._num_tokens < 4 * self.num_sessions:
            return
        load, speed = round(math.log2(max(self.num_sessions, 1))), self._num_tokens / self._ns
        known = self._speeds.get((load, self._arm))
        self._speeds[load, self._arm] = speed if known is None else known + NEWEST * (speed - known)
        self._ns = self._num_tokens = 0
        self._num_windows += 1
        untried = [arm for arm in ARMS if (load, arm) not in self._speeds]
        if untried:
            self._arm = untried[0]
        elif self._num_windows % EXPLORE_EVERY == 0:
            self._arm = ARMS[self._num_windows // EXPLORE_EVERY % len(ARMS)]
        else:
            self._arm = max(ARMS, key=lambda arm: self._speeds[load, arm])


POLICIES: Final[Mapping[str, Callable[[], Pacer]]] = {
    "static": StaticPacer,
    "bandit": BanditPacer,
    "measured": TargetPacer,
}


def main() -> None:
    """Serve with the policy named first."""
    parser = Parser("benchmarks.pacing_baselines", description=__doc__)
    parser.add_argument("policy", choices=POLICIES)
    add_arguments(parser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    await serve(Gateway(settings_of(args), make_pacer=POLICIES[args.policy]))


if __name__ == "__main__":
    main()
