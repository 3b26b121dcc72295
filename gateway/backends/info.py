"""What every model server tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from specdec import codec
from specdec.rpc.session_stream import call_unary
from specdec.types import ModelInfo, ServerLoad
from specdec.v1 import types_pb2 as pb

#: Seconds a server may take to describe itself.
INFO_TIMEOUT_S: Final = 10.0


class ServerInfo:
    """The part both backends share. ``method`` is the stub's GetModelInfo."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._get_model_info = method

    async def info(self) -> ModelInfo:
        """Describe the model."""
        return codec.decode_model_info((await self._ask()).model)

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        return codec.decode_load((await self._ask()).load)

    async def _ask(self) -> pb.GetModelInfoResponse:
        answer: pb.GetModelInfoResponse = await call_unary(
            self._get_model_info, pb.GetModelInfoRequest(), timeout_s=INFO_TIMEOUT_S
        )
        return answer
