"""The ranks of a split target as processes: rank 0 starts the others on its own host, or all are started together."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from transformers.utils import logging as transformers_logging

from engine.device import resolve_device
from engine.engine import LARGE_PASS_ROWS, Engine
from engine.loading.load import load_engine
from engine.loading.memory import LargestStep
from engine.parallel.follower import follow
from engine.parallel.ranks import PRESENT, STORE_PORT, Place, Ranks, listen
from specdec.errors import TandemError, Unavailable
from specdec.flags import flags_of
from specdec.process.lifecycle import STOP_SIGNALS
from specdec.process.logs import LEVELS, start_log
from specdec.settings import ModelSettings

logger = logging.getLogger(__name__)

OnLoss = Callable[[str], object]
#: Seconds that ranks get to import what they need and come to the store; 4 s of one core.
START_S: Final = 300.0
#: gloo listens there alone; it knows no authentication.
_LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


class RankProcesses:
    """Ranks 1 to N - 1, on this host."""

    def __init__(self, settings: ModelSettings, num_rows: int = LARGE_PASS_ROWS) -> None:
        """Start them; they load the model as soon as rank 0 joins them. ``num_rows``: of the largest step.

        Raises:
            Unavailable: one cannot be started.
        """
        self.size = settings.tensor_parallel_size
        self.store = listen()
        self._closing = False
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, self.size):
                self._children.append(self._start(settings, rank, num_rows))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise Unavailable(f"rank {len(self._children) + 1} cannot be started: {error}") from error
            raise

    def wait(self) -> None:
        """Return once all are at the store.

        Raises:
            Unavailable: one has ended, or they do not come.
        """
        until = time.monotonic() + START_S
        while (num_present := self.store.add(PRESENT, 0)) < self.size - 1:
            for rank, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    raise Unavailable(_describe(rank, child.returncode))
            if time.monotonic() > until:
                raise Unavailable(f"{num_present} of {self.size - 1} ranks have started within {START_S:g} s")
            time.sleep(0.02)

    def watch(self, on_end: OnLoss) -> None:
        """Call ``on_end`` when one ends before :meth:`close`."""

        def wait(rank: int, child: subprocess.Popen[bytes]) -> None:
            code = child.wait()
            if not self._closing:
                on_end(_describe(rank, code))

        for rank, child in enumerate(self._children, 1):
            threading.Thread(target=wait, args=(rank, child), name=f"rank-{rank}", daemon=True).start()

    def close(self, within_s: float = 0.0) -> None:
        """Wait for their end, and kill those that still run then. Idempotent."""
        self._closing = True
        until = time.monotonic() + within_s
        for rank, child in enumerate(self._children, 1):
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                if within_s:
                    logger.warning("rank %d does not end; killing it", rank)
                child.kill()
                child.wait()

    def _start(self, settings: ModelSettings, rank: int, num_rows: int) -> subprocess.Popen[bytes]:
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        level = level if level in LEVELS else LEVELS[-1]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), STORE_PORT: str(self.store.port), _INTERFACE: _LOOPBACK}
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "target_service", *flags_of(settings), "--log-level", level),
                *("--max-num-batched-tokens", str(num_rows)),
            ],
            env={**os.environ, **place},
            stdin=subprocess.DEVNULL,
        )


def load(
    settings: ModelSettings,
    place: Place | None,
    on_loss: OnLoss = logger.error,
    largest: LargestStep = LargestStep(),
) -> Engine:
    """The engine of a target, or of its rank 0; called on the device thread.

    With several ranks and no ``place`` this starts the others; the engine ends them when it is closed. ``on_loss`` is
    called on any thread when one is lost.

    Raises as :func:`~engine.loading.load.load_engine`, and Unavailable where a rank ends.
    """
    if settings.tensor_parallel_size == 1:
        return load_engine(settings, largest=largest)
    if place is not None:
        return load_engine(settings, lambda: _join(settings, place, on_loss), largest)
    return load_engine(settings, lambda: _start_others(settings, on_loss, largest.num_rows), largest)


def run_follower(
    settings: ModelSettings,
    place: Place,
    *,
    log_level: str,
    log_format: str,
    num_rows: int = LARGE_PASS_ROWS,
) -> int:
    """Be one of the ranks that follow, until rank 0 stops or is gone; returns the exit status. ``num_rows``: of the
    largest step, as rank 0 has it.
    """
    start_log(log_level, log_format)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first
    try:
        follow(load_engine(settings, lambda: _join(settings, place, logger.error), LargestStep(num_rows)))
    except TandemError as error:
        logger.error("rank %d ends: %s", place.rank, error)
        return 1
    return 0


def _start_others(settings: ModelSettings, on_loss: OnLoss, num_rows: int) -> Ranks:
    processes = RankProcesses(settings, num_rows)
    try:
        processes.wait()
        with _on_loopback():
            ranks = Ranks(
                Place(0, processes.size, 0, processes.size),
                resolve_device(settings.device),
                store=processes.store,
                timeout_s=settings.tensor_parallel_timeout_s,
                on_loss=on_loss,
                end_others=processes.close,
            )
    except BaseException:
        processes.close()
        raise
    processes.watch(ranks.lose)
    return ranks


def _join(settings: ModelSettings, place: Place, on_loss: OnLoss) -> Ranks:
    device = resolve_device(settings.device, place.local_rank)
    return Ranks(place, device, timeout_s=settings.tensor_parallel_timeout_s, on_loss=on_loss)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """gloo's groups that are made meanwhile listen on the loopback interface."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = _LOOPBACK
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before


def _describe(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was ended by {signal.Signals(-code).name}"
    return f"rank {rank} exited with code {code}"
