"""How OpenMP's threads wait between two pieces of work.

By default they spin for milliseconds, on the very core that a draft or the event loop needs; a target and a draft on
one machine slow each other down several times over. A short spin keeps the wake-up cheap and frees the core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

#: GNU OpenMP (torch's on Linux) spins this many times before it sleeps: about the gap between two matrix products.
#: Intel's and LLVM's runtimes read the second.
SHORT_SPIN: Final[Mapping[str, str]] = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def quiet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment so that waiting threads sleep soon; nothing where the user has decided already."""
    if "OMP_WAIT_POLICY" in environment:
        return {}
    return {name: value for name, value in SHORT_SPIN.items() if name not in environment}


def wait_quietly() -> None:
    """The same for this process. Works only before torch is imported."""
    os.environ.update(quiet_environment(os.environ))
