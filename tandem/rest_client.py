"""A small client of the REST API, for the command line: standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from specdec.errors import InvalidRequest, NotFound, TandemError, Unauthenticated, Unavailable

#: Statuses below 500 that are not the caller's mistake: timeouts and overload.
_PASSING: Final = (408, 429, 499)


class RestClient:
    """A gateway reached over HTTP at ``url``, with or without a trailing ``/v1``. ``api_key`` None sends none."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url is {url!r}; write it as http://host:port", param="url")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """The JSON body of a GET, or None when the body is empty."""
        with self._request("GET", path) as response:
            body = response.read()
        return json.loads(body) if body.strip() else None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed POST, one object each.

        Raises :class:`Unavailable` when the connection breaks, and what the server reports in the stream.
        """
        with self._request("POST", path, {**body, "stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                event = json.loads(text)
                if "error" in event:
                    code = event["error"].get("code")  # the HTTP status, or the name of a mistake in the call
                    raise _error_of(code if isinstance(code, int) else 400 if code else 500, event)
                yield event
        raise Unavailable(f"{self.url} ended the answer before it was complete")

    def model(self) -> str:
        """Name of the first model served."""
        return str(self.get("/v1/models")["data"][0]["id"])

    @contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=self._timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, payload, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _error_of(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(f"{self.url} does not answer: {reason}") from None
        finally:
            connection.close()


def _error_of(status: int, body: bytes | Mapping[str, Any]) -> TandemError:
    try:
        content = json.loads(body) if isinstance(body, bytes) else body
        message = str(content["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {status}"
    if status == 401:
        return Unauthenticated(f"{message} (--api-key, or TANDEM_API_KEY)")
    if status == 404:
        return NotFound(message)
    wrong_call = 400 <= status < 500 and status not in _PASSING
    return InvalidRequest(message) if wrong_call else Unavailable(message)
