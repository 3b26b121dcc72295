"""What forward passes a core runs."""

from __future__ import annotations

import threading
import time


class Watch:
    """Counts and records the forward passes of a core; may hold or break them."""

    def __init__(self, core):
        self.batches = []
        self.delay_s = 0.0
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
        if self.error is not None:
            raise self.error
        return self._forward(segments)
