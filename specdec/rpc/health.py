"""gRPC's health service, with ``List``, which grpcio's own servicer does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health import aio as health_aio


class HealthServicer(health_aio.HealthServicer):  # type: ignore[misc]
    """The state of every service of a server."""

    def list_handler(self) -> grpc.GenericRpcHandler:
        """The handler of ``List``, which answers with the states of all services by name."""
        method = grpc.unary_unary_rpc_method_handler(
            self._list, request_deserializer=bytes, response_serializer=encode_states
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"List": method})

    async def _list(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Mapping[str, int]:
        return dict(self._server_status)


def encode_states(states: Mapping[str, int]) -> bytes:
    """A ``HealthListResponse``: ``map<string, HealthCheckResponse> statuses = 1``. Names have below 100 bytes."""
    result = bytearray()
    for name, state in states.items():
        key, value = name.encode(), health_pb2.HealthCheckResponse(status=state).SerializeToString()
        entry = bytes([0x0A, len(key), *key, 0x12, len(value), *value])
        result += bytes([0x0A, len(entry)]) + entry
    return bytes(result)
