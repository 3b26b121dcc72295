"""A running server, ours or any other with OpenAI's completions API: only what its client can see is measured."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

from gateway.placement.routing import Router
from specdec.errors import InvalidRequest, TandemError, Unavailable
from specdec.params import SamplingParams
from specdec.rpc.channel import open_channel
from specdec.rules import Rule
from tandem.bench.answers import Piece
from tandem.bench.systems import GrpcSystem, System
from tandem.rest_client import RestClient

GRPC_SCHEME: Final = "grpc://"
#: Seconds without a byte after which a server counts as gone.
_SILENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server to measure."""

    system: System
    #: What it serves, for the title.
    name: str
    #: Whether it is one of ours: then speculation can be switched, and it reports what speculation did.
    is_tandem: bool


@asynccontextmanager
async def connect(
    url: str, model: str | None, api_key: str | None = None, extra_body: Mapping[str, Any] | None = None
) -> AsyncIterator[RemoteServer]:
    """The server at ``http://host:port`` or ``grpc://host:port``; ``model`` None takes the first it serves.

    ``extra_body`` are fields of every HTTP request, over our own. Raises :class:`Unavailable` where nothing answers.
    """
    if url.startswith(GRPC_SCHEME):
        if extra_body:
            raise InvalidRequest(f"--extra-body is for HTTP, and the url is {url}", param="extra_body")
        channel = open_channel(url.removeprefix(GRPC_SCHEME))
        try:
            system = GrpcSystem(channel, api_key=api_key)
            target, draft = await system.models()
            name = target.name + (f", drafted by {draft.name}" if draft is not None else " (no draft)")
            yield RemoteServer(system, name, is_tandem=True)
        finally:
            await channel.close()
        return
    server = RestClient(url, api_key=api_key, timeout_s=_SILENCE_S)
    listed = (await asyncio.to_thread(server.get, "/v1/models"))["data"]
    chosen = next((entry for entry in listed if model in (None, entry["id"])), None)
    if chosen is None:
        names = ", ".join(entry["id"] for entry in listed)
        raise InvalidRequest(f"{server.url} serves {names or 'nothing'}, not {model}", param="model")
    is_tandem = chosen.get("owned_by") == "tandem"
    rest = RestSystem(server, chosen["id"], is_tandem=is_tandem, extra_body=extra_body)
    yield RemoteServer(rest, chosen["id"], is_tandem=is_tandem)


class RestSystem:
    """``POST /v1/completions``, streamed; each call reads in a thread of its own."""

    router: Router | None = None

    def __init__(
        self, server: RestClient, model: str, *, is_tandem: bool, extra_body: Mapping[str, Any] | None = None
    ) -> None:
        self._server, self._model, self._is_tandem, self._salt = server, model, is_tandem, token_hex(8)
        self._extra_body = extra_body or {}

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, rule: Rule | None, k: int | None
    ) -> AsyncGenerator[Piece, None]:
        """One streamed call. Read to its end: a call that is left early continues in the background."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece | TandemError | None] = asyncio.Queue()

        def put(item: Piece | TandemError | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def read() -> None:
            try:
                for event in self._server.stream("/v1/completions", self._body(prompt, params, rule, k)):
                    if (piece := _piece_of(event)) is not None:
                        put(piece)
                put(None)
            except TandemError as error:
                put(error)
            except Exception as error:
                put(Unavailable(f"{self._server.url} sent what is no completion: {type(error).__name__}: {error}"))

        threading.Thread(target=read, daemon=True).start()
        while (item := await queue.get()) is not None:
            if isinstance(item, TandemError):
                raise item
            yield item

    def _body(
        self, prompt: str | Sequence[int], params: SamplingParams, rule: Rule | None, k: int | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream_options": {"include_usage": True},
        }
        if params.top_p < 1:
            body["top_p"] = params.top_p
        if params.structured_outputs is not None:
            schema = {"name": "answer", "schema": json.loads(str(params.structured_outputs.json))}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if not self._is_tandem:
            return {**body, **self._extra_body}
        speculation = {"num_speculative_tokens": k, "verification": None if rule is None else str(rule)}
        return {
            **body,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,
            "speculation": speculation,
            "cache_salt": f"{self._salt} {k} {rule}",
            **self._extra_body,
        }


def _piece_of(event: Mapping[str, Any]) -> Piece | None:
    """The piece of one event; None where it holds nothing. A server that sends no token ids sends a token an event."""
    now = time.perf_counter()
    choice = (event.get("choices") or [{}])[0]
    text = str(choice.get("text") or "")
    token_ids = choice.get("token_ids")  # vLLM sends null
    count = int(bool(text)) if token_ids is None else len(token_ids)
    usage = event.get("usage")
    if usage is None:
        return Piece(now, count, text) if count or text else None
    metrics = (event.get("metrics") or {}).get("speculative_decoding") or {}
    return Piece(now, count, text, metrics, num_tokens_in_all=int(usage["completion_tokens"]))
