"""Client channels: one set of options for everyone who calls a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio

from specdec.rpc.certificates import Certificates, role_name

#: Largest message in either direction, on servers and channels. A prompt of a million tokens is about 4 MiB; q rows,
#: prompt log-probabilities and metadata stay well below the rest.
MAX_MESSAGE_BYTES: Final = 64 * 2**20
#: Of a message that brings a predicted text.
MAX_PREDICTION_BYTES: Final = 2**20

#: Servers answer pings faster than this with GOAWAY.
MIN_PING_INTERVAL_MS: Final = 10_000
#: How often either side asks a silent peer for a sign of life, and how long it waits for it. A peer that vanished
#: without closing its connection is noticed after the sum of the two.
KEEPALIVE_TIME_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
#: How long an attempt to connect may take, TLS included, on a busy machine or a slow network.
CONNECT_TIMEOUT_MS: Final = 10_000

MESSAGE_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
KEEPALIVE_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # What gRPC 1.82 waits for instead, by default 60 s.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: Final = (
    *MESSAGE_OPTIONS,
    *KEEPALIVE_OPTIONS,
    # A session that broke is opened again with what was committed; a replay of its messages would be wrong.
    ("grpc.enable_retries", 0),
    # A replica that comes back is found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # In spite of its name no pause: gRPC gives an attempt so much time, and never less than the pauses above.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    # Channels to one address do not share a connection, so one of them can be lost or closed alone.
    ("grpc.use_local_subchannel_pool", 1),
)

#: To a socket of this machine, where an attempt costs next to nothing. The gateway of ``tandem serve`` sees the draft
#: 0.1 to 0.3 s before the ready line (10 of 10 starts; 7 of 10 with the pauses above): the first request is drafted.
LOCAL_OPTIONS: Final = (("grpc.max_reconnect_backoff_ms", 100),)


def open_channel(
    address: str,
    options: Sequence[tuple[str, Any]] = (),
    *,
    certificates: Certificates | None = None,
    host_name: str = "",
    role: str = "",
) -> grpc.aio.Channel:
    """A channel to ``host:port`` or to a Unix domain socket (``unix:/path``, ``unix-abstract:name``).

    With ``certificates`` it speaks TLS, but not to a socket of this machine. The server's certificate must be for
    ``host_name``, by default the address's host, and where the certificates tell roles, for ``role`` there.
    ``options`` are added to ours and win over them. Close it when done.
    """
    if role and certificates is not None and certificates.tell_roles:
        host_name = role_name(role, host_name or address.rpartition(":")[0])
    names = {"grpc.ssl_target_name_override": host_name, "grpc.default_authority": host_name} if host_name else {}
    local = dict(LOCAL_OPTIONS) if address.startswith("unix") else {}
    ours = list((dict(CHANNEL_OPTIONS) | local | names | dict(options)).items())
    if certificates is None or local:
        return grpc.aio.insecure_channel(address, options=ours)
    return grpc.aio.secure_channel(address, certificates.channel_credentials(), options=ours)
