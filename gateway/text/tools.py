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
MODES: Final = ("none", "auto", "required")


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
        _check_properties(name, parameters.get("properties") or {})
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


def _check_properties(name: str, properties: Any) -> None:
    """Refuse what is looked into to read arguments."""
    if not isinstance(properties, Mapping):
        raise _refusal(f"gives {name} properties that are no object; give a JSON schema for each name")
    for key, schema in properties.items():
        types = schema.get("type") or [] if isinstance(schema, Mapping) else []
        if not isinstance(types, str | list) or not all(isinstance(each, str) for each in types):
            raise _refusal(f"gives {name} a property {quote(key)} whose type is no name; give one such as string")


def _refusal(text: str) -> InvalidRequest:
    return InvalidRequest(f"tools {text}", param="tools")
