"""How long a round takes compared with a plain token at one load, and when the mode not in use is tried to learn it."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final, NamedTuple

from gateway.pacing.stats import Mode

#: Comparisons that count. A trial makes two, with the window before and the one after it: the median of five ignores a
#: trial in which the machine stalled.
MEMORY: Final = 5
#: A window lasts this long and has this many verdicts of each session; shorter ones measure the machine's hiccups.
WINDOW_NS: Final = 50_000_000
WINDOW_VERDICTS: Final = 4
#: Share of a window's time that rounds must take to be measured, and may take where plain tokens are. What the other
#: mode took is subtracted at its own price; where both take more, sessions miss each other's steps, which says nothing
#: of either mode. Few rounds slow down plain tokens more than they take themselves: with a fifth of the time, plain
#: tokens of 8 sessions took twice as long, and rounds looked cheap.
LEAST_ROUNDS: Final = 0.8
MOST_ROUNDS: Final = 0.05
#: A trial that was not measured ends after so many windows: sessions that decode many tokens on one request join late.
TRIAL_WINDOWS: Final = 8
#: Windows after a trial in which sessions may still be changing back: what is lost in them counts, too.
CHANGING_WINDOWS: Final = 2
#: The first trial is followed by its own length without one, each other one by more by this factor, until the bound on
#: what trials lose is reached: a server that has just started is slow in ways that pass.
PAUSE_GROWTH: Final = 4
#: Share of the time that trials may lose: a third of the 3 % that speculation may be slower than plain decoding.
ALLOWED_LOSS: Final = 0.01
#: A trial counts as if it lost so much at least: what a change of mode costs after it is not in what it lost.
LEAST_LOSS: Final = 0.1
#: Windows that tell whether drafting pays. With 4, drafting that gains a fifth is ended too often (simulated).
RECENT: Final = 8
#: Plain tokens whose time a round without drafted tokens takes, and what each drafted token adds to it, relatively:
#: assumed where no round was measured. Measured 1.3 and 0.1 on the bundled pair, less on larger targets; optimistic,
#: so that speculation is tried.
FIRST_ROUND: Final = 1.2
TOKEN: Final = 0.06


class Others(NamedTuple):
    """What other sessions of the target did meanwhile: tokens, and the time that they took, summed over sessions."""

    num_tokens: float = 0.0
    session_ns: float = 0.0


class RoundTimes:
    """What a round costs in plain tokens while about so many sessions are open.

    Only windows that follow each other are compared: other processes on the machine change from second to second what
    either takes. Times are sums over all sessions of the target: where rounds slow down the tokens of sessions that
    never draft, draft by another method or have another gateway (a step carries both, the draft takes a core), the
    rounds are charged with it. Otherwise each of several gateways gains by what the others lose more: two with two
    sessions each had 0.96 of plain decoding in place of 0.93 (bundled pair, means of six runs each), two with four
    0.995 in place of 0.919 (simulated, a large target).

    On two cores, embedded, two sessions have 1.0 to 1.1 of plain decoding where both draft, and 0.7 where one does. So
    :attr:`mixing` and :attr:`pays` say when they had better do the same.
    """

    def __init__(self, nearest: RoundTimes | None = None) -> None:
        """At a load that was not seen, rounds cost what they do at the ``nearest`` one, and trials begin as late."""
        #: The mode that all sessions use at the moment, to measure it; None: each uses what is better for it.
        self.trial: Mode | None = None
        #: Nanoseconds in the latest window of each mode: of a plain token, of a round without drafted tokens.
        self._ns: dict[Mode, float] = {}
        #: Tokens a nanosecond of session time in it.
        self._speeds: dict[Mode, float] = {}
        #: The mode that was measured last.
        self._mode: Mode | None = None
        #: Times of rounds without drafted tokens over those of plain tokens.
        self._ratios: deque[float] = deque(maxlen=MEMORY)
        self._round_cost: float = FIRST_ROUND if nearest is None else nearest._round_cost
        #: Session time since both modes were compared, and in this trial; that of others in it, and the tokens of all.
        self._since_ns = self._tried_ns = 0
        self._tried_others_ns = self._num_tried = 0.0
        #: Whether the draft streams chains.
        self.streams = False
        #: The latest trial, while sessions change back.
        self._ended: Mode | None = None
        #: Session time in the latest trial in which sessions took part, and that of the pauses before and after it.
        self._trial_ns: int = 0 if nearest is None else nearest._trial_ns
        self._pause_ns: float = 0.0 if nearest is None else nearest._pause_ns
        self._last_pause_ns = self._pause_ns
        self._num_windows = 0
        #: How many times as long as apart rounds and plain tokens take where sessions miss each other's steps.
        self.mixing = 1.0
        self._mixings: deque[float] = deque(maxlen=MEMORY)
        #: Speed over plain decoding of the latest windows, since a trial, in which sessions chose to draft.
        self._gains: deque[float] = deque(maxlen=RECENT)
        self._clear()

    @property
    def is_measured(self) -> bool:
        """Whether the time of a plain token is known."""
        return Mode.PLAIN in self._ns

    def round_cost(self, k: int) -> float:
        """Time of a round with ``k`` drafted tokens asked for, in plain tokens."""
        return self._round_cost * (1.0 + TOKEN * k)

    def record(
        self,
        num_sessions: int,
        cycle_ns: int,
        num_tokens: int,
        num_asked: int,
        others: Others,
        *,
        num_verdicts: int = 1,
    ) -> bool:
        """One of ``num_sessions`` took ``cycle_ns`` for verdicts with ``num_tokens`` tokens, those of a round with
        ``num_asked`` drafted tokens or plain ones; ``others``: its part of what other sessions of the target did
        meanwhile. Return whether a window is over after which sessions may choose otherwise: plain ones that change
        nothing cost 0.6 µs a token so.
        """
        self._own_ns += cycle_ns
        self._num_own += num_tokens
        self._others_ns += others.session_ns
        self._num_others += others.num_tokens
        self._num_verdicts += num_verdicts
        if num_asked:
            self._round_ns += cycle_ns
            self._num_rounds += 1.0 + TOKEN * num_asked
        else:
            self._num_plain += num_tokens
        self._since_ns += cycle_ns
        if self.trial is not None or self._ended is not None:
            self._tried_ns += cycle_ns
            self._tried_others_ns += others.session_ns
            self._num_tried += num_tokens + others.num_tokens
        is_long = not self.is_measured or self._own_ns >= WINDOW_NS * num_sessions
        is_over = is_long and self._num_verdicts >= WINDOW_VERDICTS * num_sessions
        if not is_over:
            return False
        has_rounds, before = self._num_rounds > 0, self._choice
        mode = self._measure(num_sessions)
        self._clear()
        self._try(mode)
        return has_rounds or self._choice != before

    @property
    def _choice(self) -> tuple[object, ...]:
        """What a session's choice depends on."""
        return self.trial, self.is_measured, self._round_cost, self.mixing, self.pays

    @property
    def pays(self) -> bool:
        """Whether several sessions were not slower than plain decoding, all together, since some of them drafted.

        Of one session, texts differ too much for that: over gRPC it had 1.06 of plain decoding in place of 1.20.
        """
        return len(self._gains) < RECENT or sum(self._gains) >= RECENT

    def _measure(self, num_sessions: int) -> Mode | None:
        """Take up what the window measured; None: nothing. What others decoded counts as plain tokens."""
        share, plain_ns = self._round_ns / max(self._own_ns, 1), self._ns.get(Mode.PLAIN, 0.0)
        total_ns, num_tokens = self._own_ns + self._others_ns, self._num_own + self._num_others
        num_plain = self._num_plain + self._num_others
        # One session, and no other one for half of the window.
        is_alone = num_sessions * total_ns < 1.5 * self._own_ns
        if not is_alone and self.trial is None and share > MOST_ROUNDS and plain_ns:
            self._gains.append(num_tokens / total_ns / self._speeds[Mode.PLAIN])
        if share <= MOST_ROUNDS and num_plain:
            mode, count, mode_ns = Mode.PLAIN, num_plain, total_ns - self._round_ns
            other_mode_ns = self._num_rounds * self._ns.get(Mode.SPECULATIVE, self._round_cost * plain_ns)
        elif share >= LEAST_ROUNDS and plain_ns:
            mode, count, mode_ns = Mode.SPECULATIVE, self._num_rounds, self._round_ns
            other_mode_ns = num_plain * plain_ns
        else:
            if plain_ns and Mode.SPECULATIVE in self._ns:
                expected = self._num_rounds * self._ns[Mode.SPECULATIVE] + num_plain * plain_ns
                self._mixings.append(total_ns / expected)
                self.mixing = max(1.0, median(self._mixings))
            return None
        self._ns[mode] = max(total_ns - other_mode_ns, 0.5 * mode_ns) / count
        self._speeds[mode] = num_tokens / total_ns
        if self._mode not in (None, mode):
            self._ratios.append(self._ns[Mode.SPECULATIVE] / self._ns[Mode.PLAIN])
            self._round_cost = median(self._ratios)
            self._since_ns = 0
        self._mode = mode
        return mode

    def _try(self, mode: Mode | None) -> None:
        """After a window that measured ``mode``: end the trial, or begin one that is due."""
        self._num_windows += 1
        if self.trial is not None:
            if mode is self.trial or self._num_windows >= TRIAL_WINDOWS:
                self._ended, self.trial = self.trial, None
                self._num_windows = self._since_ns = 0
                self._trial_ns = self._tried_ns or self._trial_ns
                self._last_pause_ns = self._pause_ns
                self._gains.clear()
                self._pause(self._ended)
            return
        if self._ended is not None and mode in (None, self._ended) and self._num_windows <= CHANGING_WINDOWS:
            self._pause(self._ended)
        else:
            self._ended = None
        if self._mode is not None and self._since_ns >= self._pause_ns:
            self.trial = Mode.SPECULATIVE if self._mode is Mode.PLAIN else Mode.PLAIN
            self._ended = None
            self._num_windows = self._tried_ns = 0
            self._tried_others_ns = self._num_tried = 0.0

    def _pause(self, trial: Mode) -> None:
        """Choose the time without a trial after this one. After the first ones it is shorter."""
        lost_ns = max(self._lost_ns(trial), LEAST_LOSS * self._trial_ns)
        self._pause_ns = min(PAUSE_GROWTH * max(self._last_pause_ns, self._trial_ns), lost_ns / ALLOWED_LOSS)

    def _lost_ns(self, trial: Mode) -> float:
        """How much less than all of a trial's time the other mode takes for the same tokens, as fast as it was in its
        latest window. It contains drafts that are opened and steps that wait.

        Embedded, sampled, 1.2 s windows, mean speed over plain decoding at 8 sessions 0.975 (24 windows), 0.953 where
        the loss was what the better texts' acceptance promised and trials came in the time of all sessions.
        """
        other = Mode.PLAIN if trial is Mode.SPECULATIVE else Mode.SPECULATIVE
        speed = self._speeds.get(other, 0.0)
        if self.streams and trial is Mode.PLAIN:
            return self._tried_ns  # streams come back a trip later
        return self._tried_ns + self._tried_others_ns - self._num_tried / speed if speed else 0.0

    def _clear(self) -> None:
        self._own_ns = self._round_ns = self._num_own = self._num_plain = 0
        self._num_verdicts = 0
        #: Of other sessions.
        self._others_ns = self._num_others = 0.0
        #: Each counts more the more it asked for.
        self._num_rounds = 0.0
