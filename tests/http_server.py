"""A web server in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Gives its address, ``http://host:port``; it ends with the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how often it looks whether it is to end
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
