"""The tools of a request, and which of them it may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from specdec.errors import InvalidRequest, quote

#: OpenAI's names have up to 64 letters, digits, ``_`` and ``-``; those of MCP servers have more.
_NAME: Final = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
#: Of a function without parameters.
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
#: JSON schema's names of what JSON holds.
TYPE_NAMES: Final = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
MODES: Final = ("none", "auto", "required")
#: What lists alternatives in a schema.
UNIONS: Final = ("anyOf", "oneOf")
#: Alternatives of a value that are looked at, those within alternatives included.
MAX_ALTERNATIVES: Final = 64


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    #: JSON schema of the arguments.
    parameters: Mapping[str, Any]
    #: Whether arguments must fit the schema even where the model need not call anything.
    strict: bool
    #: As chat templates read it.
    definition: Mapping[str, Any]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """One entry of OpenAI's ``tools``.

        Raises:
            InvalidRequest: it is no function, or has no proper name or parameters.
        """
        kind, function = given.get("type"), given.get("function")
        if kind != "function" or not isinstance(function, Mapping):
            raise _refusal(f'holds an entry of type {quote(kind)}; give {{"type": "function", "function": {{…}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _refusal(f"names a function {quote(name)}; a name has 1 to 128 letters, digits or _ . : / -")
        if not isinstance(parameters, Mapping | None):
            raise _refusal(f"gives {name} parameters that are no JSON schema; give an object")
        parameters = parameters or _NO_PARAMETERS
        _check_properties(name, parameters)
        # Chat templates rely on all three. They know nothing of strict.
        definition = {"name": name, "description": function.get("description") or "", "parameters": parameters}
        return cls(name, parameters, function.get("strict") is True, {"type": "function", "function": definition})


def read_tools(given: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """OpenAI's ``tools``.

    Raises:
        InvalidRequest: an entry is wrong, or two have one name.
    """
    tools = tuple(map(Tool.read, given))
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _refusal(f"has two functions of the name {quote(twice)}; names must differ")
    return tools


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the model may call."""

    #: One of :data:`MODES`.
    mode: str = "auto"
    #: The one function to be called; with mode "required".
    name: str = ""

    @classmethod
    def read(cls, given: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> Self:
        """OpenAI's ``tool_choice``.

        Raises:
            InvalidRequest: it is none of the modes, or names no tool of the request.
        """
        if given is None:
            return cls("auto" if tools else "none")
        if isinstance(given, str):
            if given not in MODES:
                raise InvalidRequest(
                    f"tool_choice is {quote(given)}; give {', '.join(MODES)}, or name a function", param="tool_choice"
                )
            if given == "required" and not tools:
                raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
            return cls(given if tools else "none")
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if given.get("type") != "function" or name not in {tool.name for tool in tools}:
            raise InvalidRequest(
                f"tool_choice names {quote(name)}, which is no function of tools; give"
                ' {"type": "function", "function": {"name": …}}',
                param="tool_choice",
            )
        return cls("required", str(name))

    def of(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(tool for tool in tools if not self.name or tool.name == self.name)


def types_of(schema: Any, whole: Any = None) -> frozenset[str]:
    """The types that a schema names, those of its alternatives included; empty: any. It is a part of a ``whole``."""
    found: set[str] = set()
    for each in with_alternatives(schema, whole):
        declared, values = each.get("type"), [each["const"]] if "const" in each else each.get("enum")
        if not declared and isinstance(values, list):
            declared = [TYPE_NAMES[type(value)] for value in values]
        found.update([declared] if isinstance(declared, str) else declared or ())
    return frozenset(found)


def with_alternatives(schema: Any, whole: Any = None) -> list[Mapping[str, Any]]:
    """A schema, and what it says that a value may be instead: each once, of the first :data:`MAX_ALTERNATIVES`."""
    found: dict[int, Mapping[str, Any]] = {}
    left = [schema]
    for given in left:  # which grows
        each = resolve(given, whole)
        if isinstance(each, Mapping) and id(each) not in found:
            found[id(each)] = each
            for name in UNIONS:
                alternatives = each.get(name)
                left += alternatives[: MAX_ALTERNATIVES - len(left)] if isinstance(alternatives, list) else ()
    return list(found.values())


def resolve(schema: Any, whole: Any) -> Any:
    """What a reference within the ``whole`` schema names; None: nothing. What is no reference is itself."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        place = whole
        for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            place = place.get(step) if isinstance(place, Mapping) else None
            if place is None:
                return None
        schema = place
    return None


def _check_properties(name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse what is looked into to read or to write arguments."""
    required = parameters.get("required") or []
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise _refusal(f"gives {name} the value {quote(required)} of required; give a list of names")
    properties = parameters.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise _refusal(f"gives {name} properties that are no object; give a JSON schema for each name")
    for key, schema in properties.items():
        for each in with_alternatives(schema, parameters):
            types = each.get("type") or []
            if not isinstance(types, str | list) or not all(isinstance(one, str) for one in types):
                raise _refusal(f"gives {name} a property {quote(key)} whose type is no name; give one such as string")


def _refusal(text: str) -> InvalidRequest:
    return InvalidRequest(f"tools {text}", param="tools")
