"""The page at ``/``: files of the package, served to everybody. What they show is asked for with the caller's key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
#: A model may write anything: no script but the files' own, no markup made of text, nothing from elsewhere.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, PageFile]:
    """The page's files by path."""
    result = {}
    for entry in (files("gateway") / "playground").iterdir():
        content, (_, _, kind) = entry.read_bytes(), entry.name.rpartition(".")
        path = "/" if entry.name == "index.html" else f"/playground/{entry.name}"
        result[path] = PageFile(content, _TYPES[kind], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return result


class Playground:
    """ASGI middleware that answers with the page's files; ``/`` is the page for those who accept HTML."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = read_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, or pass the call on."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or scope["path"] not in self._files:
            await self._app(scope, receive, send)
            return
        file, asked = self._files[scope["path"]], Headers(scope=scope)
        if scope["path"] == "/" and "text/html" not in asked.get("accept", ""):
            await self._app(scope, receive, send)
            return
        is_known = asked.get("if-none-match") == file.etag
        response = Response(
            b"" if is_known else file.content,
            304 if is_known else 200,
            {**HEADERS, "ETag": file.etag},
            media_type=file.media_type,
        )
        await response(scope, receive, send)
