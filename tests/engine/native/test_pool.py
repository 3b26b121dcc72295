"""Threads of a pass."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import pytest

from tests.engine.native.test_attention import Case

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores and Linux")
def test_a_worker_does_not_stay_on_the_core_of_its_caller() -> None:
    """Linux may wake it there, and does not move it soon."""
    current_core, cores = ctypes.CDLL(None).sched_getcpu, os.sched_getaffinity(0)
    case, moved_to = Case(), []

    def compute() -> None:
        others = set(os.listdir("/proc/self/task"))
        case.attend([1] * 4)
        worker = max(map(int, set(os.listdir("/proc/self/task")) - others))
        for _ in range(500):
            os.sched_setaffinity(worker, {core := current_core()})
            case.attend([1] * 4)
            time.sleep(0.001)  # it wakes there, though the pass is over
            case.attend([1] * 4)
            if os.sched_getaffinity(worker) == cores - {core}:
                moved_to.append(core)

    thread = threading.Thread(target=compute)  # with a pool of its own
    thread.start()
    thread.join()
    assert moved_to
