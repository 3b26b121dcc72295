"""A target service on slower hardware: passes take a certain time at least, without using a core meanwhile.

``python -m benchmarks.padded_target 28 …`` with the flags of ``tandem target``: 28 ms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.command import run

T = TypeVar("T")


def main() -> int:
    """Serve."""
    from engine.batch import Segment  # noqa: PLC0415 (torch)
    from engine.engine import Engine  # noqa: PLC0415
    from target_service.main import main as serve  # noqa: PLC0415

    pad_s = float(sys.argv[1]) / 1e3

    def padded(forward: Callable[..., T]) -> Callable[..., T]:
        def pass_of(engine: Engine, segments: Sequence[Segment]) -> T:
            until_s = time.perf_counter() + pad_s
            result = forward(engine, segments)
            time.sleep(max(0.0, until_s - time.perf_counter()))
            return result

        return pass_of

    for name in ("forward", "forward_with_states"):
        setattr(Engine, name, padded(getattr(Engine, name)))
    return serve(sys.argv[2:])


if __name__ == "__main__":
    run("benchmarks.padded_target", main)
