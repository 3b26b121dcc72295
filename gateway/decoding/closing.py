"""Closing the sessions of a decoding loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

logger = logging.getLogger(__name__)

#: Seconds a session may take to close before it is given up.
CLOSE_TIMEOUT_S: Final = 5.0


class Closable(Protocol):
    """An open session, on a target or a draft."""

    async def close(self) -> None:
        """Release the cache."""
        ...


async def close_session(session: Closable) -> None:
    """Close a session; one that fails or hangs is logged and given up."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await session.close()
    except Exception:
        logger.exception("closing a session failed")
