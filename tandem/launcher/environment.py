"""Environment variables of OpenMP and gRPC whose defaults are slow here; set before they start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

#: How OpenMP's threads wait between two pieces of work. By default they spin for milliseconds, on the very core that a
#: draft or the event loop needs; a target and a draft on one machine slow each other down several times over. A short
#: spin, about the gap between two matrix products, keeps the wake-up cheap and frees the core. GNU's runtime (torch's
#: on Linux) reads the first, Intel's and LLVM's the second.
SHORT_SPIN: Final[Mapping[str, str]] = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
#: gRPC's older I/O loop has fewer hand-overs between threads: a call on loopback takes 0.17 ms instead of 0.28.
QUICK_LOOP: Final[Mapping[str, str]] = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def tuned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment; nothing where the user has decided already."""
    spin = {} if "OMP_WAIT_POLICY" in environment else SHORT_SPIN
    return {name: value for name, value in {**spin, **QUICK_LOOP}.items() if name not in environment}


def tune_environment() -> None:
    """The same for this process. Works only before torch and grpc are imported."""
    os.environ.update(tuned_environment(os.environ))
