"""How a model writes a call of a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: What stands in texts of a format for the id of a call, and for its number in the conversation.
CALL_ID: Final = "\ue000"
CALL_NUMBER: Final = "\ue001"


#: What a response template makes of a call whose marker holds the name.
NAMED_CALL: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True)
class ArgumentsFormat:
    """Arguments one by one: ``first key assign value end next key assign value end last``, where a value is JSON. A
    text stands between ``text_assign`` and ``text_end`` as it is.
    """

    first: str
    assign: str
    end: str
    text_assign: str
    text_end: str
    next: str
    last: str
    #: In place of all that, where there are no arguments.
    empty: str

    @property
    def is_python(self) -> bool:
        """Whether they are written as Python writes them."""
        return self == PYTHON_ARGUMENTS


PYTHON_ARGUMENTS: Final = ArgumentsFormat("(", "=", "", '="', '"', ", ", ")", "()")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around names and arguments: ``opening name between arguments closing``, arguments being JSON unless they
    have a format.
    """

    opening: str
    between: str
    closing: str
    #: From the arguments of one call to the name of the next; None: a message holds one call.
    separator: str | None
    arguments: ArgumentsFormat | None = None
