"""For ``make test-stalls``: Python processes stand still for 100 ms about twice a second, and drafts open 150 ms late.

No test may depend on how far something has got by then. Python imports this module at the start of every process.
"""

import asyncio
import ctypes
import importlib.abc
import importlib.machinery
import os
import random
import sys
import threading
import time

STALL_S, MEAN_PAUSE_S, LATE_S = 0.1, 0.5, 0.15
DRAFTS = "gateway.backends.draft"


def stand_still_often(sleep=time.sleep):
    """Sleep without releasing the interpreter's lock."""
    hold, rng = ctypes.PyDLL(None).usleep, random.Random()  # the shared one belongs to the tests
    while True:
        sleep(rng.uniform(0, 2 * MEAN_PAUSE_S))
        hold(int(STALL_S * 1e6))


class LateDrafts(importlib.abc.MetaPathFinder):
    """Delays the opening of sessions in the gateway's client of drafts, once that is imported."""

    def find_spec(self, name, path, target=None):
        if name != DRAFTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            open_draft = module.GrpcDraft.open

            async def open_late(self, spec):
                await asyncio.sleep(LATE_S)
                return await open_draft(self, spec)

            module.GrpcDraft.open = open_late

        spec.loader.exec_module = exec_module
        return spec


def start():
    """A process and each fork of it, whose threads are gone, stand still at times of their own."""
    threading.Thread(target=stand_still_often, daemon=True).start()


sys.meta_path.insert(0, LateDrafts())
start()
os.register_at_fork(after_in_child=start)
