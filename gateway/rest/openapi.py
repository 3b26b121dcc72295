"""The OpenAPI description: the routes, with their bodies, answers and errors, and the meanings of fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from gateway.rest.answer_schemas import Answer, ErrorAnswer
from gateway.rest.anthropic_errors import is_anthropics
from gateway.rest.body import MEANINGFUL, Body, Refused, kinds_of
from gateway.rest.messages.answers import AnthropicErrorAnswer, MessageEvent
from gateway.rest.request_id import REQUEST_ID_HEADER
from gateway.rest.responses.answers import ResponseEvent
from gateway.rest.responses.items import QUERY
from gateway.rest.route import ApiRoute
from specdec import __version__
from specdec.params import parameters

#: Values that mean the default of a field.
_EMPTY: Final[list[Any]] = ["", [], {}]
#: Values outside of the range of a sampling parameter that mean its default as well.
_DEFAULTS: Final[Mapping[str, list[Any]]] = {"top_k": [-1]}
_ERRORS: Final[Mapping[str, str]] = {
    "401": "no API key, or an unknown one",
    "404": "no such model or path",
    "4XX": "a mistake in the request",
    "500": "a fault of the server",
    "503": "no target can be used",
}
_BODY_ERRORS: Final[Mapping[str, str]] = {
    "400": "an impossible value, or an unknown field",
    "413": "the body is too large",
    "429": "too many requests",
    "504": "the deadline passed",
}


def describe(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """The description of these routes."""
    bodies = [route.body for route in routes if route.body is not None]
    answers: set[type[Answer]] = {ErrorAnswer, AnthropicErrorAnswer}
    answers.update(model for route in routes for model in (route.answer, route.event) if model is not None)
    _, made = models_json_schema(
        [*((model, "validation") for model in bodies), *((model, "serialization") for model in answers)],
        ref_template="#/components/schemas/{model}",
    )
    components = made["$defs"]
    for body in _kinds_of_body(Body):
        if body.__name__ in components:
            _describe_body(body, components[body.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path_format, {})[route.method.lower()] = _operation(route)
    _describe_kept_responses(paths)
    info = {"title": "Tandem", "version": __version__, "description": "Speculative decoding as a service"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _operation(route: ApiRoute) -> dict[str, Any]:
    result: dict[str, Any] = {
        "summary": _title(route.name),
        "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{route.method.lower()}"),
        "responses": _responses(route),
    }
    if route.param_convertors:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": _title(name)}}
            for name in route.param_convertors
        ]
    if route.body is not None:
        content = {"application/json": {"schema": _reference(route.body)}}
        result["requestBody"] = {"required": True, "content": content}
    return result


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _responses(route: ApiRoute) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if route.answer is not None:
        content = {"application/json": {"schema": _reference(route.answer)}}
    if route.event is not None:
        # With stream. OpenAPI 3.2 has itemSchema, 3.1 nothing.
        data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
        if route.event in (MessageEvent, ResponseEvent):
            data["contentSchema"] = _reference(route.event)
        else:
            data["contentSchema"] = {"anyOf": [_reference(route.event), _reference(ErrorAnswer)]}
            data = {"anyOf": [data, {"const": "[DONE]"}]}
        content["text/event-stream"] = {"itemSchema": {"type": "object", "properties": {"data": data}}}
    errors = dict(_ERRORS) | (dict(_BODY_ERRORS) if route.method == "POST" else {})
    named = {REQUEST_ID_HEADER: {"schema": {"type": "string"}}}
    error = AnthropicErrorAnswer if is_anthropics(route.path) else ErrorAnswer
    failed = {"application/json": {"schema": _reference(error)}}
    return {
        "200": {"description": "the answer", "headers": named, "content": content},
        **{
            status: {"description": text, "headers": named, "content": failed}
            for status, text in sorted(errors.items())
        },
    }


def _describe_kept_responses(paths: Mapping[str, Mapping[str, Any]]) -> None:
    """Say how the id of a response leads on, and what may stand in the query of those paths."""
    create, kept = paths["/v1/responses"]["post"], "$response.body#/id"
    body = {"input": "Go on.", "previous_response_id": kept}
    links = {"continue": {"operationId": create["operationId"], "requestBody": body}}
    for path, operations in paths.items():
        if path.startswith("/v1/responses/"):
            for operation in operations.values():
                name = operation["operationId"]
                links[name] = {"operationId": name, "parameters": {"response_id": kept}}
    create["responses"]["200"]["links"] = links
    queries = {"": {"stream": {"enum": ["false"]}}, "/input_items": QUERY}
    for path, query in queries.items():
        paths[f"/v1/responses/{{response_id}}{path}"]["get"]["parameters"] += [
            {"name": name, "in": "query", "schema": schema} for name, schema in query.items()
        ]


def _kinds_of_body(base: type[Body]) -> Iterator[type[Body]]:
    for body in base.__subclasses__():
        yield body
        yield from _kinds_of_body(body)


def _describe_body(body: type[Body], schema: dict[str, Any]) -> None:
    """Say which values of a body's fields mean the default, and the ranges of sampling parameters."""
    rows = {row.name: row for row in parameters() if row.number is not None}
    for name, kind in kinds_of(body).items():
        field = schema["properties"][name]
        if field.get("default") is None:  # null means the default in every body
            field.pop("default", None)
        if isinstance(kind, Refused):
            schema["properties"][name] = {"enum": [None, *_EMPTY, False, *kind.allowed], "description": "not supported"}
        elif kind is not MEANINGFUL and "anyOf" in field:
            if name in rows:
                field["anyOf"][0].update(_range(rows[name].low, rows[name].high, is_open=rows[name].is_low_open))
            field["anyOf"].append({"enum": [*_EMPTY, *_DEFAULTS.get(name, ())]})
    schema["additionalProperties"] = {"enum": [None, *_EMPTY]}


def _range(low: float, high: float, *, is_open: bool) -> dict[str, float]:
    result = {} if math.isinf(low) else {"exclusiveMinimum" if is_open else "minimum": low}
    return result if math.isinf(high) else result | {"maximum": high}


def _reference(model: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
