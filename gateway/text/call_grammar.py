"""Grammars of calls of tools, in llguidance's Lark: names of the tools, arguments that fit their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from gateway.text.call_format import CallFormat
from gateway.text.tools import Tool

#: Between the parts of JSON; as in target_service/grammar/language.py.
_WHITESPACE: Final = r"[ \n\r\t]{1,32}"


@dataclass(frozen=True)
class CallGrammar:
    """Writes grammars for one format."""

    format: CallFormat
    #: Ids of the added tokens by their texts: llguidance takes those that look like markers for no text.
    added: Mapping[str, int]
    #: What begins and ends thoughts; empty: the model has none.
    thoughts: tuple[str, str] = ("", "")
    #: Texts that end a message. What a call ends with goes up to the first of them.
    ends: Sequence[str] = ()

    def forced(self, tools: Sequence[Tool], *, parallel: bool, answer: Any = None) -> str:
        """One call at least, after thoughts where the model thinks before calls; ``answer``: or JSON of this schema."""
        thoughts, opening = self._split()
        calls = f"{self._literal(opening)} calls {self._literal(self._closing)}"
        start = calls if answer is None else f"{calls} | SPACES answer"
        lines = [f"start: {'thoughts ' if thoughts else ''}({start})", *thoughts, *self._calls(tools, parallel)]
        if answer is not None:
            lines += [f"answer: {_json(answer)}", r"SPACES: /[ \n]{0,4}/"]
        return "\n".join(lines)

    def triggered(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Thoughts or none, then free text; where it begins a call, that call. What is not strict has any arguments."""
        thoughts, opening = self._split()
        trigger, rest = self._trigger(opening.lstrip())
        begin = f"TEXT {trigger}" if trigger.startswith("<[") else "begin"
        calls = f"{begin} {self._literal(rest)} calls {self._literal(self._closing)}"
        start = f"start: {'thoughts? ' if thoughts else ''}call_text* end_text"
        lines = [start, "end_text: TEXT", "TEXT: /(.|\\n)*/", f"call_text: {calls}", *thoughts]
        if begin == "begin":
            lines.append(f"begin[lazy]: TEXT {trigger}")
        return "\n".join([*lines, *self._calls(tools, parallel, only_strict=True)])

    @property
    def _closing(self) -> str:
        text = self.format.closing
        ends = [at for end in self.ends if end and (at := text.find(end)) >= 0]
        return text[: min(ends, default=len(text))].rstrip()

    def _split(self) -> tuple[list[str], str]:
        """The rules of thoughts before a call, and what begins the call."""
        begin, end = self.thoughts
        before, found, opening = self.format.opening.rpartition(end) if end else ("", "", self.format.opening)
        if not found:
            return [], opening
        first = self._literal(begin) if before.strip().startswith(begin) else ""
        text = "THOUGHT: /(.|\\n)*/"
        if end in self.added:
            return [f"thoughts: {first} THOUGHT {self._literal(end)}", text], opening
        return [f"thoughts: {first} thought", f"thought[lazy]: THOUGHT {self._literal(end)}", text], opening

    def _trigger(self, opening: str) -> tuple[str, str]:
        """What tells that a call begins, as a part of a rule, and the text after it."""
        for text, token_id in self.added.items():
            if opening.startswith(text):
                return f"<[{token_id}]>", opening[len(text) :]
        found = re.match(r"<[^>]*>|\[\w+\]", opening)
        text = found[0] if found else opening
        return json.dumps(text, ensure_ascii=False), opening[len(text) :]

    def _calls(self, tools: Sequence[Tool], parallel: bool, *, only_strict: bool = False) -> list[str]:
        separator = self.format.separator
        more = f" ({self._literal(separator)} call)*" if parallel and separator is not None else ""
        lines = [f"calls: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            given = {} if only_strict and not tool.strict else tool.parameters
            schema = given if "$ref" in given else {"type": "object", **given}
            lines.append(f"call_{i}: {self._literal(tool.name + self.format.between)} {_json(schema)}")
        return lines

    @cached_property
    def _added_pattern(self) -> re.Pattern[str] | None:
        names = sorted(self.added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def _literal(self, text: str) -> str:
        """Text as a part of a rule, special tokens by their ids."""
        if not text:
            return ""
        parts = self._added_pattern.split(text) if self._added_pattern is not None else [text]
        return " ".join(
            f"<[{self.added[part]}]>" if part in self.added else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _json(schema: Any) -> str:
    """JSON of a schema as a part of a rule; what cannot be honoured is an error."""
    options = {"whitespace_pattern": _WHITESPACE, "lenient": False}
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": options}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
