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

from specdec.engine.device import resolve_device
from specdec.engine.engine import Engine
from specdec.engine.follower import follow
from specdec.engine.parallel.ranks import PRESENT, STORE_PORT, Place, Ranks, listen
from specdec.errors import TandemError, Unavailable
from specdec.flags import flags_of
from specdec.lifecycle import STOP_SIGNALS
from specdec.logs import LEVELS, start_log
from specdec.settings import ModelSettings

logger = logging.getLogger(__name__)

OnLoss = Callable[[str], object]
#: Seconds that ranks get to end by themselves once rank 0 has told them to.
_STOP_S: Final = 10.0
#: gloo listens there alone; it knows no authentication.
_LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


class RankProcesses:
    """Ranks 1 to N - 1, on this host."""

    def __init__(self, settings: ModelSettings) -> None:
        """Start them; they load the model as soon as rank 0 joins them."""
        self.size = settings.tensor_parallel_size
        self.store = listen()
        self._closing = False
        self._children = [self._start(settings, rank) for rank in range(1, self.size)]

    def wait(self) -> None:
        """Return once all are at the store.

        Raises:
            Unavailable: one has ended.
        """
        while self.store.add(PRESENT, 0) < self.size - 1:
            for rank, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    raise Unavailable(_describe(rank, child.returncode))
            time.sleep(0.02)

    def watch(self, on_end: OnLoss) -> None:
        """Call ``on_end`` when one ends before :meth:`close`."""

        def wait(rank: int, child: subprocess.Popen[bytes]) -> None:
            code = child.wait()
            if not self._closing:
                on_end(_describe(rank, code))

        for rank, child in enumerate(self._children, 1):
            threading.Thread(target=wait, args=(rank, child), name=f"rank-{rank}", daemon=True).start()

    def close(self, within_s: float = _STOP_S) -> None:
        """Wait for their end, and kill those that still run then. Idempotent."""
        self._closing = True
        until = time.monotonic() + within_s
        for rank, child in enumerate(self._children, 1):
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d does not end; killing it", rank)
                child.kill()
                child.wait()

    def _start(self, settings: ModelSettings, rank: int) -> subprocess.Popen[bytes]:
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        level = level if level in LEVELS else LEVELS[-1]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), STORE_PORT: str(self.store.port), _INTERFACE: _LOOPBACK}
        return subprocess.Popen(
            [sys.executable, "-m", "target_service", *flags_of(settings), "--log-level", level],
            env={**os.environ, **place},
            stdin=subprocess.DEVNULL,
        )


def load(
    settings: ModelSettings, place: Place | None, on_loss: OnLoss = logger.error
) -> tuple[Engine, RankProcesses | None]:
    """The engine of a target, or of its rank 0; called on the device thread.

    With several ranks and no ``place`` this starts the others. ``on_loss`` is called on any thread when one is lost.

    Raises as :meth:`~specdec.engine.engine.Engine.load`, and Unavailable where a rank ends.
    """
    if settings.tensor_parallel_size == 1:
        return Engine.load(settings), None
    if place is not None:
        return Engine.load(settings, lambda: _join(settings, place, on_loss)), None
    processes: list[RankProcesses] = []

    def join() -> Ranks:
        processes.append(RankProcesses(settings))
        (started,) = processes
        started.wait()
        ranks = Ranks(
            Place(0, started.size, 0, started.size),
            resolve_device(settings.device),
            store=started.store,
            timeout_s=settings.tensor_parallel_timeout_s,
            on_loss=on_loss,
        )
        started.watch(ranks.lose)
        return ranks

    try:
        with _on_loopback():
            engine = Engine.load(settings, join)
        return engine, processes[0]
    except BaseException:
        for started in processes:
            started.close(within_s=0.0)
        raise


def run_follower(settings: ModelSettings, place: Place, *, log_level: str, log_format: str) -> int:
    """Be one of the ranks that follow, until rank 0 stops or is gone; returns the exit status."""
    start_log(log_level, log_format)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first
    try:
        follow(Engine.load(settings, lambda: _join(settings, place, logger.error)))
    except TandemError as error:
        logger.error("rank %d ends: %s", place.rank, error)
        return 1
    return 0


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
