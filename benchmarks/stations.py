"""A service that notes when a round passes its stations: ``python -m benchmarks.stations LOG MODULE ARGUMENT…``.

The stations are functions of the services, wrapped from outside; the services know nothing of it. Times are of the
monotonic clock, which all processes of a machine share. They are written to LOG, as JSON, when the service ends.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

#: Set, the gateway uses gRPC on sockets, too.
GRPC_ONLY: Final = "TANDEM_BENCHMARK_GRPC_ONLY"

#: Where a round passes, in this order from verdict to verdict: the service, its function, and whether the moment is
#: that of the call or of its return.
STATIONS: Final[Mapping[str, tuple[str, str, str]]] = {
    "gateway: verdict read": ("gateway", "gateway.backends.target:GrpcTargetSession.receive", "return"),
    "gateway: draft asked": ("gateway", "specdec.rpc.draft_stream:DraftStream.advance", "return"),
    "draft: request read": ("draft_service", "draft_service.session:CoreSession.advance", "call"),
    "draft: drafted": ("draft_service", "draft_service.session:CoreSession.send", "call"),
    "draft: proposal encoded": ("draft_service", "draft_service.servicer:_response", "return"),
    "gateway: proposal read": ("gateway", "specdec.rpc.draft_stream:DraftStream.receive", "return"),
    "gateway: round asked": ("gateway", "gateway.backends.target:GrpcTargetSession.offer", "return"),
    "target: round read": ("target_service", "target_service.session.session:Session.offer", "call"),
    "target: step begins": ("target_service", "target_service.core:run_steps", "call"),
    "target: step ends": ("target_service", "target_service.core:run_steps", "return"),
    "target: verdict encoded": ("target_service", "target_service.servicer:_response", "return"),
}

_events: list[tuple[str, int]] = []


def watch(module: str) -> None:
    """Wrap the functions of this service's stations."""
    for station, (service, place, moment) in STATIONS.items():
        if service == module:
            owner_name, _, path = place.partition(":")
            *names, name = path.split(".")
            owner = functools.reduce(getattr, names, import_module(owner_name))
            setattr(owner, name, _watched(getattr(owner, name), station, at_call=moment == "call"))


def _watched(function: Callable[..., Any], station: str, *, at_call: bool) -> Callable[..., Any]:
    def note() -> None:
        _events.append((station, time.perf_counter_ns()))

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if at_call:
            note()
        result = await function(*args, **kwargs)
        if not at_call:
            note()
        return result

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if at_call:
            note()
        result = function(*args, **kwargs)
        if not at_call:
            note()
        return result

    return awaited if inspect.iscoroutinefunction(function) else called


def main() -> None:
    """Run the module, then write what was noted."""
    log, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    watch(module)
    if os.environ.get(GRPC_ONLY):
        info: Any = import_module("gateway.backends.info")
        info.has_socket = lambda path: False
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        log.write_text(json.dumps(_events))


if __name__ == "__main__":
    main()
