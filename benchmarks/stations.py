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

#: How rounds go: "direct", "frames" or "grpc"; with the latter two the gateway asks the draft.
ROUTE: Final = "TANDEM_BENCHMARK_ROUTE"

#: The service, its function, and whether the moment is that of the call or of its return.
Stations = Mapping[str, tuple[str, str, str]]
_STEP: Final[Stations] = {
    "target: step begins": ("target_service", "target_service.core:run_steps", "call"),
    "target: step ends": ("target_service", "target_service.core:run_steps", "return"),
}
_DRAFT: Final[Stations] = {
    "draft: request read": ("draft_service", "draft_service.session:CoreSession.advance", "call"),
    "draft: drafted": ("draft_service", "draft_service.session:CoreSession._send", "call"),
    "draft: proposal encoded": ("draft_service", "draft_service.servicer:_response", "return"),
}
#: Where a round passes, in this order from step to step.
DIRECT: Final[Stations] = {
    **_STEP,
    "target: draft asked": ("target_service", "specdec.rpc.draft_stream:DraftStream.post_advance", "return"),
    **_DRAFT,
    "target: proposal read": ("target_service", "target_service.session.session:Session.offer", "call"),
}
RELAYED: Final[Stations] = {
    **_STEP,
    "target: verdict encoded": ("target_service", "target_service.servicer:_response", "return"),
    "gateway: verdict read": ("gateway", "gateway.backends.target:GrpcTargetSession.receive", "return"),
    "gateway: draft asked": ("gateway", "specdec.rpc.draft_stream:DraftStream.post_advance", "return"),
    **_DRAFT,
    "gateway: proposal read": ("gateway", "specdec.rpc.draft_stream:DraftStream.receive", "return"),
    "gateway: round asked": ("gateway", "gateway.backends.target:GrpcTargetSession.offer", "return"),
    "target: round read": ("target_service", "target_service.session.session:Session.offer", "call"),
}

_events: list[tuple[str, int]] = []


def watch(module: str) -> None:
    """Wrap the functions of this service's stations."""
    stations = DIRECT if os.environ[ROUTE] == "direct" else RELAYED
    for station, (service, place, moment) in stations.items():
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
    if module == "gateway" and (route := os.environ[ROUTE]) != "direct":
        loop: Any = import_module("gateway.decoding.loop")
        loop.Decoding._is_direct = lambda *_: False
        if route == "grpc":
            info: Any = import_module("gateway.backends.info")
            info.framed_path = lambda address: None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        log.write_text(json.dumps(_events))


if __name__ == "__main__":
    main()
