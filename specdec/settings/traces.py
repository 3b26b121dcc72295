"""Where the traces of requests go."""

from __future__ import annotations

from typing import Final

from specdec.settings.option import require

ENDPOINT: Final = "collector of OpenTelemetry that gets traces, by OTLP over gRPC: http://host:4317"
#: OpenTelemetry's variables of the environment, the one that counts first.
VARIABLES: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_EXPORTER_OTLP_ENDPOINT"


def check_endpoint(endpoint: str | None) -> None:
    """Refuse an endpoint without a scheme, which says whether it takes TLS.

    Raises:
        InvalidRequest: there is none.
    """
    require(
        endpoint is None or endpoint.startswith(("http://", "https://")),
        "otlp_traces_endpoint",
        f"otlp_traces_endpoint is {endpoint!r}; write http://host:port, or https://host:port for TLS",
    )
