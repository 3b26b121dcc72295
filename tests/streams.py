"""Session streams that are closed at the end of a test's block."""

from contextlib import asynccontextmanager

from specdec.rpc.session_stream import SessionStream


@asynccontextmanager
async def streaming(method):
    """An open stream over a stub's bidirectional method."""
    stream = SessionStream(method)
    try:
        yield stream
    finally:
        await stream.close()
