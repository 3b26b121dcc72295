"""The REST face: OpenAI's endpoints, Anthropic's and vLLM's beside them, health and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import cache, partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.access.keys import KeyRing
from gateway.generation import Generation
from gateway.rest.access import KeyCheck
from gateway.rest.answer_schemas import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    DetokenizeAnswer,
    HealthAnswer,
    ModelCard,
    ModelList,
    RootAnswer,
    ServicesAnswer,
    TokenizeAnswer,
    TokenizerAnswer,
    VersionAnswer,
)
from gateway.rest.chat import create_chat_completion
from gateway.rest.completions import create_completion
from gateway.rest.errors import HANDLERS
from gateway.rest.hosts import HostCheck
from gateway.rest.limits import BodyLimit
from gateway.rest.messages.answers import InputTokenCount, MessageAnswer, MessageEvent
from gateway.rest.messages.call import create_message
from gateway.rest.messages.schemas import CountTokensBody, MessagesBody
from gateway.rest.models import Models
from gateway.rest.openapi import describe
from gateway.rest.playground import Playground
from gateway.rest.responses.answers import InputItems, ResponseAnswer, ResponseDeleted, ResponseEvent
from gateway.rest.responses.routes import (
    cancel_response,
    create_response,
    delete_response,
    get_input_items,
    get_response,
)
from gateway.rest.responses.schemas import ResponseBody
from gateway.rest.responses.store import ResponseStore
from gateway.rest.route import ApiRoute, BodyRoute
from gateway.rest.schemas import AnsweredBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.rest.services import describe_services
from specdec import __version__
from specdec.errors import Unavailable

_ROOT: Final = {"name": "tandem", "version": __version__, "api": "/v1", "docs": "/openapi.json"}


def make_app(generation: Generation, keys: KeyRing) -> Starlette:
    """The ASGI application over one generation module, for the holders of ``keys``."""
    routes = api_routes(generation)
    return Starlette(
        routes=[
            *routes,
            Route("/health", partial(_health, generation), methods=["HEAD"]),
            Route("/openapi.json", _answer_with(cache(partial(describe, routes)))),
        ],
        middleware=list(_middleware(generation, keys)),
        exception_handlers=HANDLERS,
    )


def api_routes(generation: Generation) -> list[ApiRoute]:
    """What the description lists."""
    get = partial(ApiRoute, "GET")
    delete = partial(ApiRoute, "DELETE")
    post = partial(BodyRoute, generation)
    models = Models(generation)
    store = ResponseStore(generation.settings.max_stored_response_bytes)
    new_response = partial(create_response, store)
    items = partial(get_input_items, store)
    cancel = partial(cancel_response, store)
    response = "/v1/responses/{response_id}"
    return [  # post: path, name, endpoint, body, answer, event of a stream; get, delete: path, name, endpoint, answer
        post("/v1/completions", "completions", create_completion, CompletionBody, CompletionAnswer, CompletionEvent),
        post("/v1/chat/completions", "chat_completions", create_chat_completion, ChatBody, ChatAnswer, ChatEvent),
        get("/v1/models", "models", models.list_all, ModelList),
        get("/v1/models/{name:path}", "model", models.get, ModelCard),
        post("/v1/responses", "responses", new_response, ResponseBody, ResponseAnswer, ResponseEvent),
        get(response, "response", partial(get_response, store), ResponseAnswer),
        get(f"{response}/input_items", "input_items", items, InputItems),
        ApiRoute("POST", f"{response}/cancel", "cancel", cancel, ResponseAnswer),
        delete(response, "forget_response", partial(delete_response, store), ResponseDeleted),
        post("/v1/messages", "messages", create_message, MessagesBody, MessageAnswer, MessageEvent),
        post("/v1/messages/count_tokens", "count_message_tokens", _give_answer, CountTokensBody, InputTokenCount),
        post("/tokenize", "tokenize", _give_answer, TokenizeBody, TokenizeAnswer),
        post("/detokenize", "detokenize", _give_answer, DetokenizeBody, DetokenizeAnswer),
        get("/tokenizer_info", "tokenizer_info", _answer_with(generation.text.describe_tokenizer), TokenizerAnswer),
        get("/health", "health", partial(_health, generation), HealthAnswer),
        get("/services", "services", _answer_with(partial(describe_services, generation)), ServicesAnswer),
        get("/version", "version", _answer_with(lambda: {"version": __version__}), VersionAnswer),
        get("/metrics", "metrics", partial(_metrics, generation), None),
        get("/", "root", _answer_with(lambda: _ROOT), RootAnswer),
    ]


def _middleware(generation: Generation, keys: KeyRing) -> Iterator[Middleware]:
    """From the outside to the inside."""
    settings = generation.settings
    if settings.checks_hosts:
        yield Middleware(HostCheck, allowed_hosts=settings.allowed_hosts, allowed_origins=settings.allowed_origins)
    if settings.allowed_origins:  # outside of the check of keys: browsers ask first without one
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods or ("*",),
            allow_headers=settings.allowed_headers or ("*",),
            allow_credentials=settings.allow_credentials,
        )
    if not settings.disable_playground:
        yield Middleware(Playground)  # outside of the check of keys: the page asks for one
    yield Middleware(KeyCheck, keys=keys)
    yield Middleware(BodyLimit, max_bytes=lambda: generation.max_body_bytes)


def _answer_with(make: Callable[[], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that answers with what ``make`` returns."""

    async def answer(request: Request) -> Response:
        return JSONResponse(make())

    return answer


async def _give_answer(generation: Generation, body: AnsweredBody, request: Request) -> Response:
    generation.check_model(body.model or "")
    return Response(body.answer, media_type="application/json")


async def _health(generation: Generation, request: Request) -> Response:
    if generation.draining:
        raise Unavailable("the gateway is shutting down")
    if not generation.router.ready:
        raise Unavailable("no target can be used now; GET /services tells why")
    return JSONResponse({"status": "ok"})


async def _metrics(generation: Generation, request: Request) -> Response:
    content, content_type = generation.metrics.render_as(request.headers.get("accept", ""))
    return Response(content, media_type=content_type)
