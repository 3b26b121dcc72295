"""``python -m tests.reliability.fuzz.trial``: invented inputs for every interface; none may crash, hang or leak.

``--cases`` inputs are shared out among the parts (:mod:`tests.reliability.fuzz.parts`); ``--seed`` selects them.
Hypothesis reduces an input that fails to a small one and prints it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import uvloop
from hypothesis import HealthCheck, Phase, given, settings

from tests.reliability.fuzz.liars import Liars
from tests.reliability.fuzz.parts import Part, parts_of
from tests.reliability.fuzz.services import Services

#: Inputs of one run of Hypothesis, which remembers each to give none twice.
CHUNK = 1000


class Trial:
    """The services, and a count of the inputs that they took."""

    def __init__(self, loop: asyncio.AbstractEventLoop, services: Services, parts: list[Part]) -> None:
        self.parts = parts
        self.num_cases = 0
        self._loop = loop
        self._services = services

    def run(self, part: Part, num_cases: int, seed: int) -> None:
        """Try so many inputs; raises what the first bad one raises, reduced."""

        @hypothesis.seed(seed)
        @settings(
            max_examples=num_cases,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(part.inputs)
        def check(case: Any) -> None:
            self.num_cases += 1
            complaints = self._services.complaints.records
            complaints.clear()
            self._loop.run_until_complete(part.check(case))
            assert not complaints, "\n".join(complaints)

        check()

    def check_free(self) -> None:
        """No service holds a session or a block."""
        for core in (self._services.target, *self._services.drafts.values()):
            load = self._loop.run_until_complete(core.load())
            assert load.open_sessions == load.waiting_sessions == load.used_blocks == 0, load
        assert self._services.gateway.generation.num_requests == 0


@contextmanager
def trial() -> Iterator[Trial]:
    """Start every service in this process, and stop it at the end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, tempfile.TemporaryDirectory() as folder:
        services, liars = Services(Path(folder)), Liars()
        loop = runner.get_loop()
        lying = liars.serving()
        try:
            loop.run_until_complete(services.start())
            loop.run_until_complete(lying.__aenter__())
            liars.tokenizer = services.gateway.generation.tokenizer
            yield Trial(loop, services, parts_of(services, liars))
        finally:
            loop.run_until_complete(lying.__aexit__(None, None, None))
            loop.run_until_complete(services.close())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", help="only parts whose name contains this")
    args = parser.parse_args()
    with trial() as running:
        parts = [part for part in running.parts if (args.part or "") in part.name]
        for part in parts:
            share = math.ceil(args.cases * part.weight / sum(each.weight for each in parts))
            started, before = time.monotonic(), running.num_cases
            for first in range(0, share, CHUNK):
                running.run(part, min(CHUNK, share - first), seed=args.seed * 1_000_003 + first)
            running.check_free()
            took_s = time.monotonic() - started
            print(f"{part.name}: {running.num_cases - before} inputs in {took_s:.0f} s", flush=True)
        print(f"{running.num_cases} inputs, none crashed, hung or leaked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
