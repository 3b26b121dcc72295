"""Structured outputs as bodies ask for them: OpenAI's ``response_format``, and vLLM's fields, old and new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import InvalidRequest, quote
from specdec.structured_outputs import StructuredOutputsParams, read_structured_outputs


def structured_outputs_of(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None, guided: Mapping[str, Any]
) -> StructuredOutputsParams | None:
    """What the fields ask for together; ``guided`` has the ``guided_*`` fields without that prefix.

    Raises:
        InvalidRequest: several ask for something, or a value cannot be read.
    """
    asked = {
        "response_format": _read_response_format(response_format),
        "structured_outputs": read_structured_outputs(structured_outputs),
        **{f"guided_{kind}": {kind: value} for kind, value in guided.items() if value is not None},
    }
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} ask for different texts; give one of them", param=given[1])
    return read_structured_outputs(asked[given[0]]) if given else None


def _read_response_format(value: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            form = value.get("json_schema")
            schema = form.get("schema") if isinstance(form, Mapping) else None
            if not isinstance(schema, Mapping | bool):
                raise InvalidRequest(
                    "response_format.json_schema has no schema; give an object with name and schema",
                    param="response_format.json_schema",
                )
            return StructuredOutputsParams(json=schema)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=value)
        case kind:
            raise InvalidRequest(
                f"response_format.type is {quote(kind)}; give text, json_object, json_schema or structural_tag",
                param="response_format",
            )
