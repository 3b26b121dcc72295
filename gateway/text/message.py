"""An assistant's message: text, thoughts and calls of tools, whole and as it comes."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Final

#: Mistral's chat template accepts ids of this form only, so all have it.
_ID_LENGTH: Final = 9
_ID_CHARACTERS: Final = string.ascii_letters + string.digits


def new_call_id(_name: str, _number: int) -> str:
    """An id for a call."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass(slots=True)
class CallDelta:
    """A piece of a call: its id and name come first, then pieces of its arguments."""

    #: Number of the call in its message, from 0.
    index: int
    #: Of the call's first piece; else empty.
    id: str = ""
    name: str = ""
    #: JSON, as the model wrote it.
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """A piece of a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, more: MessageDelta) -> None:
        """Append the piece that follows."""
        self.content += more.content
        self.reasoning += more.reasoning
        for call in more.calls:
            self.add_call(call)

    def add_call(self, piece: CallDelta) -> None:
        """Append a piece of a call."""
        if not piece.id and self.calls and self.calls[-1].index == piece.index:
            self.calls[-1].arguments += piece.arguments
        else:
            self.calls.append(piece)


class ReadCall:
    """A whole call, as it was read from the text."""

    def __init__(self, call_id: str, name: str, arguments: str) -> None:
        self.id = call_id
        self.name = name
        self._arguments = [arguments]

    @property
    def arguments(self) -> str:
        """JSON, as the model wrote it."""
        return "".join(self._arguments)

    def add(self, arguments: str) -> None:
        """Append a piece of the arguments."""
        self._arguments.append(arguments)


class AssistantMessage:
    """All pieces so far, joined when they are asked for: there may be hundreds of thousands."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ReadCall] = []

    @property
    def content(self) -> str:
        """The text."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The thoughts."""
        return "".join(self._reasoning)

    def add(self, delta: MessageDelta) -> None:
        """Append a piece."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for piece in delta.calls:
            if piece.id:
                self.calls.append(ReadCall(piece.id, piece.name, piece.arguments))
            else:
                self.calls[piece.index].add(piece.arguments)
