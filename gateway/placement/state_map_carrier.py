"""Brings the first layers of drafts' heads to targets that lack them, beside the sessions that asked for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from specdec.backends import StateMapSource, StateMapTaker
from specdec.errors import TandemError
from specdec.types import SessionSpec
from specdec.v1.types_pb2 import StateMapPart

logger = logging.getLogger(__name__)

#: Seconds that one may take on its way.
CARRY_TIMEOUT_S: Final = 600.0
#: Seconds after which one that was refused is offered again.
RETRY_S: Final = 60.0


class StateMapCarrier:
    """Carries each map to each target once at a time. Where that fails the states are sent as they are."""

    def __init__(self) -> None:
        #: By the names of target and map.
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        #: When it may be offered again for a client.
        self._retry_at_s: dict[tuple[str, str, str], float] = {}
        self._logged: set[str] = set()

    def carry(self, name: str, target: Any, draft: Any, spec: SessionSpec) -> None:
        """Begin to bring the map of a session from a draft to the target ``name``, unless that is being done."""
        key = name, spec.hidden_state_map
        if not isinstance(target, StateMapTaker) or not isinstance(draft, StateMapSource) or key in self._tasks:
            return
        now_s = time.monotonic()
        self._retry_at_s = {each: at_s for each, at_s in self._retry_at_s.items() if at_s > now_s}
        if (*key, spec.client) in self._retry_at_s:
            return
        self._tasks[key] = task = asyncio.create_task(self._carry(name, target, draft, spec), name="state-map")
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def _carry(self, name: str, target: StateMapTaker, draft: StateMapSource, spec: SessionSpec) -> None:
        fingerprint = spec.hidden_state_map
        try:
            async with asyncio.timeout(CARRY_TIMEOUT_S):
                await target.put_state_map(_addressed(draft.state_map(fingerprint), spec))
            logger.info("target %s runs the first layer %s… of the draft's head from now on", name, fingerprint[:12])
        except (TandemError, TimeoutError) as error:
            self._retry_at_s[name, fingerprint, spec.client] = time.monotonic() + RETRY_S
            text = f"target {name} cannot run the first layer of the draft's head: {error or 'it takes too long'}"
            logger.log(logging.DEBUG if text in self._logged else logging.WARNING, "%s", text)
            self._logged.add(text)


async def _addressed(parts: AsyncIterator[StateMapPart], spec: SessionSpec) -> AsyncIterator[StateMapPart]:
    """The parts, the first of which names whose they are."""
    is_first = True
    async for part in parts:
        if is_first:
            part.client, is_first = spec.client, False
            if spec.max_kv_share is not None:
                part.max_share = spec.max_kv_share
        yield part
