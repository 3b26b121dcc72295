"""From the events of a chat to those of a response, under OpenAI's names."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

Event = dict[str, Any]


class ResponseWriter:
    """Makes the events of one response. Its items come one after another: thoughts, a message, calls."""

    def __init__(self, response: dict[str, Any]) -> None:
        """``response`` is the object that the events carry; ``status`` and ``output`` are kept up to date, but for
        the text of an item in progress.
        """
        self.response = response
        self._num_events = 0
        self._output: list[dict[str, Any]] = response["output"]
        #: The item in progress, and the number of its call.
        self._item: dict[str, Any] | None = None
        self._call = -1
        #: Pieces of its text, or of its arguments.
        self._pieces: list[str] = []

    def begin(self) -> Iterator[Event]:
        """The first events."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=deepcopy(self.response))

    def add(self, choice: dict[str, Any]) -> Iterator[Event]:
        """The events of a piece of the chat's choice."""
        delta = choice["delta"]
        if thoughts := delta.get("reasoning_content"):
            yield from self._add_thoughts(thoughts)
        logprobs = (choice["logprobs"] or {}).get("content", [])
        if (content := delta.get("content")) or logprobs:
            yield from self._add_text(content or "", logprobs)
        for call in delta.get("tool_calls") or ():
            yield from self._add_call(call)

    def end(self, finish_reason: str) -> Iterator[Event]:
        """The last events; ``response`` is complete with the last one."""
        if not self._output:
            yield from self._open_message()
        status = "incomplete" if finish_reason == "length" else "completed"
        yield from self._close(status)
        self.response["status"] = status
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, code: str, message: str) -> Event:
        """The last event after an error."""
        self._complete_text()
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._event("response.failed", response=self.response)

    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
        result: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self._output:
            if item["type"] == "message":
                result["content"] += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                result["reasoning_content"] = "".join(part["text"] for part in item["content"])
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                result.setdefault("tool_calls", []).append(call)
        return result

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None, "no item is in progress"
        place = {"output_index": len(self._output) - 1, "item_id": self._item["id"]}
        return self._event(kind, **place, **fields)

    def _open(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        self._item = {"type": kind, "id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **fields}
        self._output.append(self._item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=deepcopy(self._item))

    def _open_part(self, part: dict[str, Any]) -> Iterator[Event]:
        assert self._item is not None, "no item is in progress"
        self._item["content"].append(part)
        yield self._of_item("response.content_part.added", content_index=0, part=deepcopy(part))

    def _open_message(self) -> Iterator[Event]:
        yield from self._open("message", "msg", role="assistant", content=[])
        yield from self._open_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _add_text(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "message":
            yield from self._open_message()
        assert self._item is not None, "a message was opened"
        part = self._item["content"][0]
        self._pieces.append(text)
        part["logprobs"] += logprobs
        if text or logprobs:
            yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_thoughts(self, text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "reasoning":
            yield from self._open("reasoning", "rs", summary=[], content=[])
            yield from self._open_part({"type": "reasoning_text", "text": ""})
        assert self._item is not None, "thoughts were opened"
        self._pieces.append(text)
        yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _add_call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if self._item is None or self._item["type"] != "function_call" or self._call != call["index"]:
            self._call = call["index"]
            yield from self._open("function_call", "fc", call_id=call["id"], name=function["name"], arguments="")
        assert self._item is not None, "a call was opened"
        if arguments := function.get("arguments"):
            self._pieces.append(arguments)
            yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _complete_text(self) -> None:
        """Write the pieces into the item in progress."""
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._item is not None:
            place, key = (self._item, "arguments") if "arguments" in self._item else (self._item["content"][0], "text")
            place[key] += text

    def _close(self, status: str) -> Iterator[Event]:
        """End the item in progress. It changes no more, so the events carry it and no copy."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        self._complete_text()
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                more = {"logprobs": part["logprobs"]}
                yield self._of_item("response.output_text.done", content_index=0, text=part["text"], **more)
            else:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._item = None
