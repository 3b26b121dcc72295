"""Threads of a pass."""

from __future__ import annotations

import os
import threading

import pytest

from tests.engine.native.test_attention import Case

pytestmark = pytest.mark.usefixtures("kernels")


def test_a_worker_does_not_stay_on_the_core_of_its_caller() -> None:
    """Linux may wake it there, and does not move it soon."""
    cores = os.sched_getaffinity(0)
    assert len(cores) > 1, "the test needs two cores"
    case, moved_to = Case(), []

    def compute() -> None:
        others = set(os.listdir("/proc/self/task"))
        case.attend([1] * 4)
        (worker,) = set(os.listdir("/proc/self/task")) - others
        mine = min(cores)
        os.sched_setaffinity(0, {mine})
        os.sched_setaffinity(int(worker), {mine})
        for _ in range(200):
            case.attend([1] * 4)
        moved_to.append(os.sched_getaffinity(int(worker)))

    thread = threading.Thread(target=compute)  # with a pool of its own
    thread.start()
    thread.join()
    assert moved_to == [cores - {min(cores)}]
