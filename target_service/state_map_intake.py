"""How first layers of draft heads come to the target: read from its settings' folders, or sent to it in parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final

import torch

from engine.device_thread import DeviceThread
from engine.engine import Engine
from engine.heads.files.checkpoint import read_state_map
from engine.heads.files.packed_state_map import unpack_state_map
from engine.loading.memory import free_bytes
from engine.native.linears import pack_linears
from engine.state_map import StateMap
from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded
from specdec.settings import TargetSettings
from specdec.v1.types_pb2 import StateMapPart
from target_service.state_maps import StateMaps

logger = logging.getLogger(__name__)

#: Seconds in which all parts of a head's first layer must come.
MAP_TIMEOUT_S: Final = 300.0


class StateMapIntake:
    """Takes what drafts send into the maps of one target."""

    def __init__(self, maps: StateMaps, engine: Engine, device: DeviceThread, settings: TargetSettings) -> None:
        """``device``: the thread of the engine's device."""
        self._maps = maps
        self._engine = engine
        self._device = device
        self._settings = settings

    async def take(self, parts: AsyncIterator[StateMapPart], in_use: Callable[[], Collection[str]]) -> None:
        """See :class:`specdec.backends.StateMapTaker`. ``in_use``: fingerprints of the maps of open sessions."""
        reserved = ""
        try:
            async with asyncio.timeout(MAP_TIMEOUT_S):
                if (first := await anext(parts, None)) is None:
                    raise InvalidRequest("no part came; send the first layer of a head", param="data")
                if not self._maps.wants(first.fingerprint):
                    return
                self._maps.reserve(
                    first.fingerprint,
                    first.num_bytes,
                    client=first.client,
                    max_share=first.max_share if first.HasField("max_share") else 1.0,
                    in_use=in_use(),
                    free_bytes=free_bytes(self._engine.device),
                )
                reserved = first.fingerprint
                data = await _joined(first, parts)
            state_map = await asyncio.to_thread(unpack_state_map, data, reserved)
            del data
            self._check(state_map)
            await self._device.run(_place_state_map, state_map, self._engine, self._settings)
            self._maps.store(reserved, state_map)
            logger.info("took the first layer %s… of a head: %d bytes", reserved[:12], first.num_bytes)
            reserved = ""
        except TimeoutError:
            raise DeadlineExceeded(f"the first layer did not come within {MAP_TIMEOUT_S:g} s; send it again") from None
        except torch.OutOfMemoryError as error:
            raise Overloaded(f"the device has no memory for the first layer of a head ({error})") from error
        finally:
            if reserved:
                self._maps.give_up(reserved)

    def _check(self, state_map: StateMap) -> None:
        """Raise :class:`InvalidRequest` unless the target has the states that the map reads."""
        self._engine.check_state_layers(state_map.layers)
        if state_map.linear.in_features != (width := len(state_map.layers) * self._engine.hidden_size):
            raise InvalidRequest(
                f"the first layer reads {state_map.linear.in_features} numbers, and the states of its layers have"
                f" {width}: the head is another target's",
                param="data",
            )


def read_state_maps(settings: TargetSettings, engine: Engine) -> dict[str, StateMap]:
    """The first layers of the heads that the settings name, on the engine's device and kernels."""
    read = [read_state_map(folder, settings.model.model, engine.device) for folder in settings.hidden_state_maps]
    maps = dict(each for each in read if each is not None)
    for state_map in maps.values():
        _place_state_map(state_map, engine, settings)
    return maps


def _place_state_map(state_map: StateMap, engine: Engine, settings: TargetSettings) -> None:
    """On the engine's device and kernels."""
    state_map.to(device=engine.device, dtype=state_map.linear.weight.dtype)
    if engine.device.type == "cpu" and not settings.model.enforce_eager:
        pack_linears(state_map, engine.num_threads, settings.model.autotune)


async def _joined(first: StateMapPart, parts: AsyncIterator[StateMapPart]) -> bytes:
    """The data of all parts.

    Raises:
        InvalidRequest: it is not as long as the first one says.
    """
    data = bytearray(first.data)
    async for part in parts:
        data += part.data
        if len(data) > first.num_bytes:
            break
    if len(data) != first.num_bytes:
        raise InvalidRequest(
            f"the parts have {len(data)} bytes and num_bytes is {first.num_bytes}; send it again", param="num_bytes"
        )
    return bytes(data)
