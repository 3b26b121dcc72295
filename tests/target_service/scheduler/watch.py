"""What forward passes a core runs."""

from __future__ import annotations

import asyncio
import threading
import time

#: Iterations in which the event loop takes a step's result and passes it on.
NUM_ITERATIONS = 8


class Watch:
    """Counts and records the forward passes of a core; may hold or break them. Made in the core's event loop."""

    def __init__(self, core):
        self.batches = []
        #: Seconds that a pass takes at least; it then waits for the event loop, too, however busy the machine is.
        self.delay_s = 0.0
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self.error = None
        #: While cleared, forward passes wait.
        self.gate = threading.Event()
        self.gate.set()
        self._forward = core.engine.forward
        core.engine.forward = self

    def __call__(self, segments):
        self.batches.append([(len(segment.token_ids), segment.num_logits) for segment in segments])
        self.gate.wait(10)
        if self.delay_s:
            time.sleep(self.delay_s)
            self._let_the_loop_run()
        if self.error is not None:
            raise self.error
        return self._forward(segments)

    def _let_the_loop_run(self):
        if threading.get_ident() == self._loop_thread:
            return
        has_run = threading.Event()

        def count(num_left):
            if num_left:
                self._loop.call_soon(count, num_left - 1)
            else:
                has_run.set()

        self._loop.call_soon_threadsafe(count, NUM_ITERATIONS)
        has_run.wait(10)
