"""Faults of processes and of links, drawn from a seed: what is hurt, how, and for how long."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.e2e.servers import ServerProcess
from tests.reliability.proxy import FaultyProxy
from tests.reliability.rig import Rig


@dataclass(frozen=True)
class Fault:
    """One fault of one part; no part has two at a time."""

    part: str
    kind: str
    hurt: Callable[[], Awaitable[object] | object]
    mend: Callable[[], Awaitable[object] | object]
    #: How often it is drawn, against the others, and for how many seconds at most.
    weight: float = 1.0
    longest_s: float = 2.0


def faults_of(rig: Rig, rng: random.Random) -> list[Fault]:
    """Everything that can happen to the services of a rig. Where links speak TLS, single bits flip, too, and pieces
    vanish: without TLS, TCP alone keeps bytes right and complete.
    """
    faults = []
    for name, process in rig.processes.items():
        # A gateway that dies takes every stream with it: rarely.
        faults += _process_faults(name, process, weight=0.3 if name == "gateway" else 1.0)
    for name, link in rig.links.items():
        faults += _link_faults(f"link to {name}", link, rng, is_sealed=rig.certificates is not None)
    return faults


def _process_faults(name: str, process: ServerProcess, weight: float) -> list[Fault]:
    async def start_again() -> None:
        await asyncio.to_thread(process.restart_on_same_port)

    async def stop() -> None:
        process.signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait)

    def freeze() -> None:
        process.signal(signal.SIGSTOP)

    def thaw() -> None:
        process.signal(signal.SIGCONT)

    return [
        Fault(name, "killed", process.kill, start_again, weight),
        Fault(name, "restarted", stop, start_again, weight),
        Fault(name, "stopped", freeze, thaw, weight),
    ]


def _link_faults(part: str, link: FaultyProxy, rng: random.Random, *, is_sealed: bool) -> list[Fault]:
    def set_to(**fields: float) -> Callable[[], None]:
        def change() -> None:
            for field, value in fields.items():
                setattr(link, field, value)

        return change

    def nothing() -> None:
        pass

    subtle = [
        Fault(part, "flipped", set_to(flipped_share=rng.choice([0.01, 0.1])), link.heal),
        Fault(part, "lossy", set_to(lost_share=rng.choice([0.01, 0.1])), link.heal),
    ]
    return [
        *(subtle if is_sealed else ()),
        Fault(part, "delayed", set_to(delay_s=rng.choice([0.005, 0.05, 0.2])), link.heal),
        Fault(part, "throttled", set_to(bytes_per_s=rng.choice([200, 2000, 20_000])), link.heal),
        Fault(part, "partitioned", link.hold, link.heal, longest_s=4.0),
        Fault(part, "garbled", set_to(garbled_share=rng.choice([0.01, 0.1, 1.0])), link.heal),
        Fault(part, "reset", link.reset, nothing),
        Fault(part, "half-closed", link.half_close, nothing),
        Fault(part, "refused", _both(link.refuse, link.reset), link.start),
    ]


def _both(*actions: Callable[[], object]) -> Callable[[], None]:
    def act() -> None:
        for action in actions:
            action()

    return act


class Disturbance:
    """Draws faults one after the other, a few at the same time, and counts them."""

    def __init__(self, faults: list[Fault], rng: random.Random, *, pause_s: float = 0.8, at_once: int = 2) -> None:
        """``pause_s``: seconds between two faults on average; ``at_once``: how many may last at the same time."""
        self._faults = faults
        self._rng = rng
        self._pause_s = pause_s
        self._at_once = at_once
        self._lasting: dict[str, asyncio.Task[None]] = {}
        self.counts: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self):
        """Disturb until the block ends; every fault is mended then."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.gather(*self._lasting.values())

    async def _run(self) -> None:
        while True:
            free = [fault for fault in self._faults if fault.part not in self._lasting]
            if len(self._lasting) < self._at_once:
                fault = self._rng.choices(free, [fault.weight for fault in free])[0]
                self._lasting[fault.part] = asyncio.create_task(self._inflict(fault))
            await asyncio.sleep(2 * self._pause_s * self._rng.random())

    async def _inflict(self, fault: Fault) -> None:
        seconds = fault.longest_s * self._rng.random()
        self.counts[f"{fault.part.split()[0]} {fault.kind}"] += 1
        try:
            await _do(fault.hurt)
            await asyncio.sleep(seconds)
            await _do(fault.mend)
        finally:
            del self._lasting[fault.part]


async def _do(action: Callable[[], Awaitable[object] | object]) -> None:
    result = action()
    if isinstance(result, Awaitable):
        await result
