"""How a model writes a call of a tool, learned from what its chat template makes of one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specdec.errors import InvalidRequest

#: An example that no template writes by itself.
_NAME: Final = "tandem_name"
_ARGUMENTS: Final = {"tandem_key": "tandem_value"}
_WRITTEN: Final = re.compile(r'\{\s*"tandem_key"\s*:\s*"tandem_value"\s*\}')
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "An example.",
        "parameters": {"type": "object", "properties": {"tandem_key": {"type": "string", "description": "A value."}}},
    },
}
#: Renders messages with these tools: ``render(messages, tools, add_generation_prompt)``.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around names and arguments: ``opening name between arguments closing``, arguments being JSON."""

    opening: str
    between: str
    closing: str
    #: From the arguments of one call to the name of the next; None: a message holds one call.
    separator: str | None


@dataclass(frozen=True, slots=True)
class EarlierCalls:
    """What a chat template expects of an earlier message that only calls tools."""

    #: Arguments are JSON text, not objects.
    has_text: bool = False
    #: The content that is not there is null, not empty.
    has_null: bool = False

    def example(self, count: int) -> Mapping[str, Any]:
        """A message with so many calls."""
        arguments: Any = json.dumps(_ARGUMENTS) if self.has_text else _ARGUMENTS
        calls = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            for i in range(count)
        ]
        return {"role": "assistant", "content": None if self.has_null else "", "tool_calls": calls}


def earlier_calls(render: Render) -> EarlierCalls:
    """The first form that a chat template writes; where it writes none as JSON, the first that it accepts."""
    forms = [EarlierCalls(has_text, has_null) for has_text in (False, True) for has_null in (False, True)]
    written = {form: text for form in forms if (text := _render(render, form, 1)) is not None}
    found = (form for form, text in written.items() if _holds_calls(text, 1))
    return next(found, next(iter(written), EarlierCalls()))


def call_format(
    render: Render, begun_in: Callable[[str], str], marker: str, earlier: EarlierCalls
) -> CallFormat | None:
    """The format; None where arguments are not written as JSON.

    ``begun_in`` gives the beginning of the answer that stands at the end of a prompt, and ``marker`` ends thoughts.
    """
    one, two = _render(render, earlier, 1), _render(render, earlier, 2)
    if one is None or not _holds_calls(one, 1):
        return None
    prompt = render(_QUESTION, [_TOOL], True)
    begun = begun_in(prompt)
    head = prompt[: len(prompt) - len(begun)]
    if not one.startswith(head):
        return None
    rest = one[len(head) :]
    if begun.strip() and rest.startswith(begun.strip()):
        rest = rest[len(begun) if rest.startswith(begun) else len(begun.strip()) :]
    elif begun.strip() and marker:
        rest = f"{marker}\n\n{rest}"
    at, found = rest.find(_NAME), _WRITTEN.search(rest)
    assert found is not None
    return CallFormat(rest[:at], rest[at + len(_NAME) : found.start()], rest[found.end() :], _separator(two))


_QUESTION: Final = ({"role": "user", "content": "Hello"},)


def _render(render: Render, form: EarlierCalls, count: int) -> str | None:
    """A conversation with so many calls; None where the template refuses it."""
    try:
        return render((*_QUESTION, form.example(count)), [_TOOL], False)
    except InvalidRequest:
        return None


def _holds_calls(text: str, count: int) -> bool:
    """Whether a text holds so many calls of the example, their arguments as JSON."""
    found = _WRITTEN.search(text)
    return found is not None and text.rfind(_NAME, 0, found.start()) >= 0 and len(_WRITTEN.findall(text)) == count


def _separator(text: str | None) -> str | None:
    """What stands between two calls."""
    if text is None or not _holds_calls(text, 2):
        return None
    first = _WRITTEN.search(text)
    assert first is not None
    return text[first.end() : text.index(_NAME, first.end())]
