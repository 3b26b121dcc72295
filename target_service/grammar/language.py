"""From structured outputs to a grammar of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from specdec.errors import InvalidRequest
from specdec.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Between the parts of JSON. Unbounded, weak models write nothing else until their tokens are used up.
_WHITESPACE: Final = r"[ \n\r\t]{1,32}"


def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it; whether it is valid shows when a matcher is made of it.

    Raises:
        InvalidRequest: the text is not JSON where it must be, or no grammar.
    """
    try:
        match params.kind:
            case "json":
                return _of_schema(_schema(params.json), params)
            case "json_object":
                return _of_schema({"type": "object"}, params)
            case "regex":
                return LLMatcher.grammar_from_regex(str(params.regex))
            case "choice":
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice or ())))
            case "grammar":
                return LLMatcher.grammar_from_lark(any_to_lark(str(params.grammar)))
            case _:
                return StructTag.to_grammar(_tags(json.loads(str(params.structural_tag))), assume_special=False)
    except InvalidRequest:
        raise
    except Exception as error:  # llguidance's readers raise bare exceptions
        raise refusal(params.kind, str(error)) from error


def refusal(kind: str, reason: str) -> InvalidRequest:
    """The error for structured outputs that cannot be honoured."""
    text = " ".join(reason.split())
    return InvalidRequest(
        f"structured_outputs.{kind} cannot be honoured: {text[:400]}{'…' * (len(text) > 400)}",
        param="structured_outputs",
    )


def _of_schema(schema: Any, params: StructuredOutputsParams) -> str:
    """What cannot be honoured is an error, whatever the schema's own ``x-guidance`` says."""
    given: JsonCompileOptions = {"lenient": False}
    if params.disable_any_whitespace:
        given["whitespace_flexible"] = False
    else:
        given["whitespace_pattern"] = _WHITESPACE
    return LLMatcher.grammar_from_json_schema(schema, overrides=given)


def _schema(text: str | Mapping[str, Any] | bool | None) -> Any:
    schema = json.loads(str(text))
    if not isinstance(schema, dict | bool):
        raise refusal("json", "a schema is an object, true or false")
    return schema if isinstance(schema, dict) else ({} if schema else {"enum": []})


def _tags(tag: Any) -> list[StructTag]:
    """The tags of vLLM's form: ``{"structures": [{"begin", "schema", "end"}…], "triggers": […]}``."""
    try:
        structures, triggers = tag["structures"], tag["triggers"]
        tags = []
        for structure in structures:
            begin = str(structure["begin"])
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if not trigger:
                raise refusal("structural_tag", f"no trigger begins {begin!r}")
            tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=str(structure["end"])))
    except (KeyError, TypeError) as error:
        raise refusal("structural_tag", f"{error!r}; give structures (begin, schema, end) and triggers") from error
    if not tags:
        raise refusal("structural_tag", "structures is empty")
    return tags
