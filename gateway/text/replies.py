"""How the answers of chats are read: which response template a model has, and what a request makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.text.call_format import CallFormat
from gateway.text.call_grammar import CallGrammar
from gateway.text.chat_probe import EarlierCalls, Render, call_format, earlier_calls, markers
from gateway.text.chat_template import ChatTemplate, TooExpensive
from gateway.text.derived_template import derive, unwritten
from gateway.text.lark import LarkWriter
from gateway.text.message_parser import MessageParser
from gateway.text.response_families import calls_of, family_of
from gateway.text.response_template import REASONING, ResponseTemplate
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools import Tool, ToolChoice
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.structured_outputs import StructuredOutputsParams

_MARKER: Final = re.compile(r"<.*>", re.DOTALL)
#: Formats of calls that are kept: clients choose the variables that they depend on.
_MAX_FORMATS: Final = 16


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How the answer of one chat is read, and what its text must look like. Plain data: workers make it."""

    #: The beginning of the answer that stands in the prompt, such as ``<think>``.
    begun: str = ""
    #: JSON schemas of arguments by the tool's name; None: no calls are looked for.
    schemas: Mapping[str, Any] | None = None
    #: Calls that are given; None: all.
    max_calls: int | None = None
    #: Calls are given as they are written, not only whole.
    streams: bool = True
    #: Calls of the conversation so far.
    num_earlier_calls: int = 0
    #: In place of the request's own.
    structured_outputs: StructuredOutputsParams | None = None

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """The parameters of the request, with what its text must look like."""
        wanted = self.structured_outputs
        return params if wanted is None else replace(params, structured_outputs=wanted)


class _Probe:
    """Renders example conversations. After one that is too expensive it refuses all others: there are twenty."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        #: What was wrong with that one; empty: nothing.
        self.problem = ""

    def renderer(self, variables: Mapping[str, Any]) -> Render:
        """Renders with these variables of the template."""

        def render(messages: Sequence[Any], tools: Sequence[Any], add_generation_prompt: bool) -> str:
            if self.problem:
                raise InvalidRequest(self.problem, param="chat_template")
            given = {**variables, "tools": list(tools)}
            try:
                return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=given)
            except TooExpensive as error:
                self.problem = str(error)
                raise

        return render


class Replies:
    """What is known of a model's answers."""

    def __init__(
        self,
        chat_template: ChatTemplate | None,
        tokenizer: TextTokenizer | None,
        response_template: str | None,
    ) -> None:
        """``response_template`` is the option's value: a file.

        Raises:
            InvalidRequest: the response template is not valid.
        """
        self._chat_template = chat_template
        self._added = tokenizer.added_texts if tokenizer is not None else {}
        #: The added tokens that llguidance takes for no text.
        self._markers = {
            token_id
            for token_id, text in self._added.items()
            if tokenizer is not None and (tokenizer.is_special(token_id) or _MARKER.fullmatch(text))
        }
        #: How the chat template reads calls of earlier messages.
        self.earlier_calls = EarlierCalls()
        #: Why no example conversation can be rendered; empty: they can.
        self.problem = ""
        if chat_template is None:
            self.template = self._given(tokenizer, response_template)
        else:
            probe = _Probe(chat_template)
            self.earlier_calls = earlier_calls(probe.renderer({}))
            self.template = self._given(tokenizer, response_template) or self._of(chat_template, probe)
            self.problem = probe.problem
        self._kept: dict[bool, frozenset[int]] = {}
        #: How the chat template writes calls, by its variables.
        self._formats: dict[str, CallFormat | None] = {}

    def kept_special_tokens(self, plan: ReplyPlan) -> frozenset[int]:
        """Special tokens that are read, though they are left out of other text."""
        if self.template is None:
            return frozenset()
        with_calls = plan.schemas is not None
        if with_calls not in self._kept:
            self._kept[with_calls] = self.template.names(self._added, with_calls=with_calls)
        return self._kept[with_calls]

    def parser(self, plan: ReplyPlan) -> MessageParser:
        """A parser of one answer."""
        first, form = plan.num_earlier_calls, self.earlier_calls.id_form
        more = {}
        if self.earlier_calls.has_named_ids:
            more = {"call_id": lambda name, number: form.format(name=name, number=first + number)}
        return MessageParser(
            self.template, plan.begun, plan.schemas, max_calls=plan.max_calls, streams=plan.streams, **more
        )

    def read_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message of a conversation, in OpenAI's form, as the chat template reads it."""
        content, calls, thoughts = message.get("content"), message.get("tool_calls"), message.get("reasoning_content")
        read = dict(message)
        if thoughts and not content:  # gpt-oss' template reads one of them
            read["thinking"] = thoughts
        if calls:
            read["tool_calls"] = [self._read_call(call) for call in calls]
            read["content"] = content or (None if self.earlier_calls.has_null else "")
        return read

    def _read_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": self._arguments(function.get("arguments") or "{}")}}

    def _arguments(self, arguments: Any) -> Any:
        if not isinstance(arguments, str) or self.earlier_calls.has_text:
            return arguments
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return found if isinstance(found, Mapping) else arguments

    def check_tools(self) -> None:
        """Raises:
        InvalidRequest: this model cannot be given tools, or its calls cannot be read.
        """
        if self._chat_template is not None and "tools" not in self._chat_template.variables:
            raise InvalidRequest(
                "tools is not supported: this model's chat template does not read them; start the gateway with a"
                " --chat-template that does",
                param="tools",
            )
        if self.template is None or not self.template.reads_calls:
            raise InvalidRequest(
                "tools is not supported: nothing tells how this model writes calls; start the gateway with"
                " --response-template",
                param="tools",
            )

    def plan(
        self,
        prompt: str,
        tools: Sequence[Tool],
        choice: ToolChoice,
        variables: Mapping[str, Any],
        *,
        parallel: bool | None,
        wanted: StructuredOutputsParams | None,
        end_token_ids: Sequence[int],
        add_generation_prompt: bool = True,
        streams: bool = True,
        num_earlier_calls: int = 0,
    ) -> ReplyPlan:
        """How to read the answer to ``prompt``. ``variables`` are the chat template's; ``wanted`` is what the request
        says of the text. Without ``add_generation_prompt`` the prompt ends with a message of the conversation, not
        with the beginning of the answer.

        The function that ``choice`` names is called once. "required" means one call unless ``parallel`` is true; "auto"
        allows several unless it is false.

        Raises:
            InvalidRequest: a call is required in a form that no grammar describes.
        """
        begun = self.template.begun_in(prompt) if self.template is not None and add_generation_prompt else ""
        if not tools or choice.mode == "none":
            return ReplyPlan(begun)
        parallel = not choice.name and (parallel is True if choice.mode == "required" else parallel is not False)
        is_strict = any(tool.strict for tool in tools)
        grammar = None
        if choice.mode == "required" or wanted is not None or is_strict:
            grammar = self._grammar(variables, end_token_ids)
        written = None
        if choice.mode == "required":
            if grammar is None:
                raise InvalidRequest(
                    "tool_choice requires a call, but the chat template does not show how this model writes one; give"
                    " auto, or start the gateway with a --chat-template that writes earlier calls",
                    param="tool_choice",
                )
            written = grammar.forced(choice.of(tools), parallel=parallel)
        elif wanted is not None:
            if grammar is None or wanted.kind not in ("json", "json_object"):
                raise InvalidRequest(
                    f"structured_outputs.{wanted.kind} forbids what this model writes to call a tool; leave out tools,"
                    " or give tool_choice",
                    param="structured_outputs",
                )
            schema = json.loads(str(wanted.json)) if wanted.json is not None else {"type": "object"}
            written = grammar.forced(tools, parallel=parallel, answer=schema)
        elif is_strict and grammar is not None and grammar.can_trigger:
            written = grammar.triggered(tools, parallel=parallel)
        return ReplyPlan(
            begun,
            {tool.name: tool.parameters for tool in tools},
            None if parallel else 1,
            streams,
            num_earlier_calls,
            None if written is None else StructuredOutputsParams(grammar=written),
        )

    def _grammar(self, variables: Mapping[str, Any], end_token_ids: Sequence[int]) -> CallGrammar | None:
        template = self.template
        if template is None or self._chat_template is None:
            return None
        thoughts = next((template.regions[name] for name in REASONING if name in template.regions), None)
        begin, end = ("", "") if thoughts is None else (thoughts.open, thoughts.close)
        # Probing the chat template takes 2 ms, six times as long as the prompt itself.
        key = repr(sorted(variables.items()))
        if key in self._formats:
            found = self._formats[key]
        else:
            probe = _Probe(self._chat_template)
            found = self._call_format(probe.renderer(variables), template.begun_in, end)
            if not probe.problem:  # a busy machine may be too slow once
                if len(self._formats) >= _MAX_FORMATS:
                    self._formats.clear()
                self._formats[key] = found
        if found is None:
            return None
        texts = {text: token_id for token_id, text in self._added.items() if token_id in self._markers}
        ends = [self._added[token_id] for token_id in end_token_ids if token_id in self._added]
        return CallGrammar(found, LarkWriter(texts), (begin, end), ends, marks_content=template.marks_content)

    def _call_format(self, render: Render, begun_in: Callable[[str], str], closes: str) -> CallFormat | None:
        """How the chat template writes calls, or else how its family does."""
        found = call_format(render, begun_in, closes, self.earlier_calls)
        return found or calls_of(self._texts)

    @property
    def _texts(self) -> str:
        """All that tells which markers a model knows."""
        source = "" if self._chat_template is None else self._chat_template.source
        return "\n".join([source, *self._added.values()])

    def _given(self, tokenizer: TextTokenizer | None, path: str | None) -> ResponseTemplate | None:
        """That of the option, or of the tokenizer."""
        if path is not None:
            return ResponseTemplate.read(path)
        if tokenizer is not None and tokenizer.response_template is not None:
            return ResponseTemplate(tokenizer.response_template, "response_template of tokenizer_config.json")
        return None

    def _of(self, chat_template: ChatTemplate, probe: _Probe) -> ResponseTemplate | None:
        """That of the chat template's family, or what the chat template shows."""
        found = family_of(chat_template.source) or self._derive(probe)
        return None if found is None else ResponseTemplate(found, "response template", is_limited=False)

    def _derive(self, probe: _Probe) -> Mapping[str, Any] | None:
        thinking = {"enable_thinking": True, "thinking": True}
        found = markers([probe.renderer({}), probe.renderer(thinking)], self._texts.__contains__)
        opens, closes = found.thoughts
        begun = re.compile(rf"{re.escape(opens)}\s*(?:{re.escape(closes)}\s*)?\Z") if closes else None

        def begun_in(prompt: str) -> str:
            match = None if begun is None else begun.search(prompt)
            return "" if match is None else match[0]

        calls = self._call_format(probe.renderer({}), begun_in, closes)
        added = [self._added[token_id] for token_id in self._markers]
        return derive(found, calls, unwritten([self._texts]), added)
