"""From the events of a chat to those of a message, under Anthropic's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]


class MessageWriter:
    """Makes the events of one message. Its blocks come one after another: thoughts, text, calls."""

    def __init__(self, message: dict[str, Any]) -> None:
        """``message`` is the object that is answered; its ``content`` has each block once that has ended."""
        self.message = message
        self._content: list[dict[str, Any]] = message["content"]
        self._is_open = False
        #: The number of the call in progress.
        self._call = -1
        #: Pieces of the block in progress: of its text, or of the arguments of its call.
        self._pieces: list[str] = []

    def begin(self, usage: dict[str, Any]) -> Iterator[Event]:
        """The first events."""
        self.message["usage"] = usage
        yield {"type": "message_start", "message": {**self.message, "content": []}}
        yield {"type": "ping"}

    def add(self, choice: dict[str, Any]) -> Iterator[Event]:
        """The events of a piece of the chat's choice."""
        delta = choice["delta"]
        if thoughts := delta.get("reasoning_content"):
            yield from self._open("thinking", thinking="", signature="")
            self._pieces.append(thoughts)
            yield self._delta("thinking_delta", thinking=thoughts)
        if text := delta.get("content"):
            yield from self._open("text", text="")
            self._pieces.append(text)
            yield self._delta("text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            yield from self._add_call(call)

    def end(self, finish_reason: str, stop_reason: Any, usage: dict[str, Any], metrics: Any) -> Iterator[Event]:
        """The last events; the message is complete with them."""
        yield from self._close()
        reason, sequence = "end_turn", None
        if finish_reason == "length":
            reason = "max_tokens"
        elif finish_reason == "tool_calls":
            reason = "tool_use"
        elif isinstance(stop_reason, str):
            reason, sequence = "stop_sequence", stop_reason
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        self.message |= {**ended, "usage": usage, "metrics": metrics}
        yield {"type": "message_delta", "delta": ended, "usage": usage, "metrics": metrics}
        yield {"type": "message_stop"}

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Begin a block, unless such a one is in progress."""
        if self._is_open and self._content[-1]["type"] == kind:
            return
        yield from self._close()
        self._content.append({"type": kind, **fields})
        self._is_open = True
        yield {
            "type": "content_block_start",
            "index": len(self._content) - 1,
            "content_block": {"type": kind, **fields},
        }

    def _delta(self, kind: str, **fields: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": {"type": kind, **fields}}

    def _add_call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if call["index"] != self._call:
            yield from self._close()
            self._call = call["index"]
            yield from self._open("tool_use", id=call["id"], name=function["name"], input={})
        if arguments := function.get("arguments"):
            self._pieces.append(arguments)
            yield self._delta("input_json_delta", partial_json=arguments)

    def _close(self) -> Iterator[Event]:
        """End the block in progress."""
        if not self._is_open:
            return
        block, text = self._content[-1], "".join(self._pieces)
        self._pieces.clear()
        if block["type"] == "tool_use":
            block["input"] = _read_input(text)
        else:
            block[block["type"]] = text
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _read_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call. What is no object, such as one that ``max_tokens`` cut, stands under Anthropic's name
    for it.
    """
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
