"""The first module of a service's process: it ties the process to its launcher, then runs the service.

``python -m tandem.launcher.child LAUNCHER_PID MODULE ARGUMENT…`` is ``python -m MODULE ARGUMENT…`` that is killed when
the launcher dies for any reason, and that leaves the cores to the target first.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
#: Services that interrupt no other one when they are woken. A pass of the target waits for the slowest of its threads,
#: and a message that woke gateway or draft stopped one of them at once. On two cores (AMD EPYC, 12 M in int8, rounds
#: of fixed length) 8 sessions give 1.01 to 1.33 times the tokens per second so, plain decoding 0.99 to 1.32 times (four
#: runs of windows in turn). In float32, servers side by side in both orders: 8 sessions 1.04 and 1.04, plain 1.08 and
#: 1.04; one session 0.99 and 1.06, plain 1.07 and 1.02.
_PATIENT: Final = ("draft_service", "gateway")


def follow_parent(parent_pid: int) -> None:
    """Ask Linux for SIGKILL at the parent's death, and leave at once when it is dead already.

    SIGTERM would stay pending in a process that is stopped, which would then keep its memory and its port.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the launcher is gone")


def main() -> None:
    """Follow the launcher, then become the module."""
    follow_parent(int(sys.argv[1]))
    module = sys.argv[2]
    if module in _PATIENT and sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
