"""Server-sent events, as engines stream them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Final

from specdec.errors import Unavailable

#: Bytes of a line. An event holds the tokens of one step with their log-probabilities.
MAX_LINE_BYTES: Final = 2**20
DONE: Final = b"[DONE]"


async def read_events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event. OpenAI's events have one line each; fields but ``data`` and comments are left out.

    Raises:
        Unavailable: a line is too long.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            raise Unavailable(f"the engine sent a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
