"""Who is at the other end of a gRPC connection."""

from __future__ import annotations


def address_of(peer: str) -> str:
    """``ipv4:10.0.0.1:4711`` → ``10.0.0.1``, ``ipv6:%5B::1%5D:4711`` → ``::1``; other kinds as they are."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
