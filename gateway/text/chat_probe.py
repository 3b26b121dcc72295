"""What a chat template makes of known messages, and what that tells of how its model writes answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.text.call_format import CALL_ID, CALL_NUMBER, PYTHON_ARGUMENTS, ArgumentsFormat, CallFormat
from specdec.errors import InvalidRequest

#: Texts that no template writes by itself.
_NAME: Final = "tandem_name"
_CONTENT: Final = "tandem_content"
_THOUGHT: Final = "tandem_thought"
_ARGUMENTS: Final = {"tandem_key": "tandem_value"}
_TEXTS: Final = {"tandem_key": "tandem_value", "tandem_more": "tandem_other"}
_NUMBERS: Final = {"tandem_key": 31415926, "tandem_more": 27182818}
_WRITTEN: Final = re.compile(r'\{\s*"tandem_key"\s*:\s*"tandem_value"\s*\}')
_DIGITS: Final = re.compile(r"\d+")
#: Ids of calls. Mistral's templates accept nine letters and digits; that of Kimi K2 writes the name in the id alone.
_ID_FORMS: Final = ("call0000{number}", "functions.{name}:{number}")
_QUESTION: Final = ({"role": "user", "content": "Hello"},)
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "An example.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string", "description": "A value."} for name in _TEXTS},
            "required": [],
        },
    },
}
#: Markers of thoughts that not every chat template writes of earlier messages.
_THOUGHTS: Final = (("<think>", "</think>"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("[THINK]", "[/THINK]"))
#: A marker: a tag, or a word in brackets.
TAG: Final = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z][A-Z_ ]*\]")
#: What no prose holds: a marker, signs in a row, or a word between two signs of no alphabet.
UNMISTAKABLE: Final = re.compile(rf"{TAG.pattern}|[<>|@~^]{{2,}}|([^\w\s\x00-\x7f])[A-Z_]+\1")
#: Renders messages with these tools: ``render(messages, tools, add_generation_prompt)``.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True, slots=True)
class EarlierCalls:
    """What a chat template expects of an earlier message that only calls tools."""

    #: Arguments are JSON text, not objects.
    has_text: bool = False
    #: The content that is not there is null, not empty.
    has_null: bool = False
    #: With ``name`` and ``number`` of the call.
    id_form: str = _ID_FORMS[0]

    @property
    def has_named_ids(self) -> bool:
        """Whether the ids of calls tell their names."""
        return "{name}" in self.id_form

    def example(self, count: int, given: Mapping[str, Any] = _ARGUMENTS) -> Mapping[str, Any]:
        """A message with so many calls."""
        arguments: Any = json.dumps(given) if self.has_text else given
        calls = [
            {"id": self._id(i), "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            for i in range(count)
        ]
        return {"role": "assistant", "content": None if self.has_null else "", "tool_calls": calls}

    def without_ids(self, text: str) -> str:
        """What was made of an example, with :data:`CALL_ID` for the ids that say nothing else."""
        if self.has_named_ids:
            return text
        return text.replace(self._id(0), CALL_ID).replace(self._id(1), CALL_ID)

    def _id(self, number: int) -> str:
        return self.id_form.format(name=_NAME, number=number)


@dataclass(frozen=True, slots=True)
class Markers:
    """What begins and ends parts of a message; empty: nothing."""

    thoughts: tuple[str, str] = ("", "")
    content: tuple[str, str] = ("", "")
    #: What ends the message.
    end: str = ""


def earlier_calls(render: Render) -> EarlierCalls:
    """The first form that a chat template writes; where it writes none as JSON, the first that it accepts."""
    forms = [EarlierCalls(has_text, has_null, id_form) for id_form in _ID_FORMS for has_text in (False, True)
             for has_null in (False, True)]  # fmt: skip
    prompt = _render_messages(render, _QUESTION, tools=[_TOOL], is_prompt=True) or ""
    texts = {form: text for form in forms if (text := _render(render, form, 1)) is not None}
    written = {form: text[len(_common(prompt, text)) :] for form, text in texts.items()}
    found = [form for form, text in written.items() if _holds_calls(text, 1)]
    named = [form for form, text in written.items() if _NAME in text]
    return next(iter([*found, *named, *written]), EarlierCalls())


def markers(renders: Sequence[Render], known: Callable[[str], bool]) -> Markers:
    """The markers that one of several ways to render shows; ``known`` tells whether the model has a marker."""
    begun, before, end = next(filter(None, map(_content_of, renders)), ("", "", ""))
    found = [thoughts for render in renders if (thoughts := _thoughts_of(render, before)) is not None]
    thoughts = next(iter([*found, *(pair for pair in _THOUGHTS if all(map(known, pair)))]), ("", ""))
    opening = before.rpartition(thoughts[1])[2].strip() if thoughts[1] else before.strip()
    closing = TAG.match(end.lstrip())
    is_answer = not begun.strip() or thoughts[0] in begun
    if not TAG.search(opening) or closing is None or _word_of(closing[0]) != _word_of(opening) or not is_answer:
        return Markers(thoughts, ("", ""), end)
    return Markers(thoughts, (opening, closing[0]), end.lstrip().removeprefix(closing[0]))


def _content_of(render: Render) -> tuple[str, str, str] | None:
    """What a prompt holds of an answer that the message does not; what stands around the content of the message."""
    message = {"role": "assistant", "content": _CONTENT}
    text = _render_messages(render, (*_QUESTION, message))
    prompt = _render_messages(render, _QUESTION, is_prompt=True)
    if text is None or prompt is None or _CONTENT not in text:
        return None
    at = _header(prompt, text)
    before, _, after = text[at:].partition(_CONTENT)
    return prompt[at:], before, after


def _thoughts_of(render: Render, before: str) -> tuple[str, str] | None:
    """What stands around the thoughts of a message; ``before``: around its content alone."""
    names = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    message = {"role": "assistant", "content": _CONTENT, **names}
    text = _render_messages(render, (*_QUESTION, message))
    prompt = _render_messages(render, _QUESTION, is_prompt=True)
    if text is None or prompt is None or text.count(_THOUGHT) != 1 or _CONTENT not in text:
        return None
    at = _header(prompt, text)
    opening, _, rest = text[at:].partition(_THOUGHT)
    closing = rest.partition(_CONTENT)[0].strip()
    wrapper = TAG.findall(before)
    while wrapper and closing.endswith(wrapper[-1]) and closing != wrapper[-1]:
        closing = closing.removesuffix(wrapper.pop()).strip()
    if not opening.strip():  # the prompt holds it
        last = next((found[0] for found in reversed(list(TAG.finditer(text[:at])))), "")
        opening = last if _word_of(last) == _word_of(closing) else prompt[at:]
    return (opening.strip(), closing) if closing and opening.strip() else None


def _word_of(marker: str) -> str:
    """What two markers of one part have in common."""
    return re.sub(r"START|END|\W|_", "", marker)


def _header(prompt: str, text: str) -> int:
    """The size of what a prompt and a conversation have in common."""
    return len(common_beginning(prompt, text))


def call_format(
    render: Render, begun_in: Callable[[str], str], closes: str, earlier: EarlierCalls
) -> CallFormat | None:
    """The format; None where the chat template does not write calls, or not in a form that is known.

    ``begun_in`` gives the beginning of the answer that stands at the end of a prompt, and ``closes`` ends thoughts.
    """

    prompt = _render_messages(render, _QUESTION, tools=[_TOOL], is_prompt=True)

    def written(count: int, arguments: Mapping[str, Any]) -> str | None:
        """The message with an example, from the first character that the model writes."""
        text = _render(render, earlier, count, arguments)
        if text is None or prompt is None:
            return None
        return earlier.without_ids(_after(prompt, text, begun_in, closes) or "")

    one, two = written(1, _ARGUMENTS), written(2, _ARGUMENTS)
    if not one:
        return None
    if not _holds_calls(one, 1):
        return _listed(written)
    found = _WRITTEN.search(one)
    assert found is not None
    at = one.rfind(_NAME, 0, found.start())
    opening, between = one[:at], one[at + len(_NAME) : found.start()]
    if _NAME in opening:
        return None
    separator = None
    if two and _holds_calls(two, 2):
        first, second = _WRITTEN.finditer(two)
        separator = two[first.end() : two.rindex(_NAME, 0, second.start())]
        between = _numbered(between, two[first.end() + len(separator) + len(_NAME) : second.start()])
        opening, separator = _numbered_ends(opening, separator)
    return CallFormat(opening, between, one[found.end() :], separator)


def _after(prompt: str, text: str, begun_in: Callable[[str], str], closes: str) -> str | None:
    """What a conversation holds after its prompt; None where it does not begin with that."""
    begun = begun_in(prompt)
    head = prompt[: len(prompt) - len(begun)]
    found = re.match(r"\s*".join(["", *map(re.escape, head.split())]), text)  # templates vary white space
    if found is None:
        return None
    rest = text[len(head) if text.startswith(head) else found.end() :]
    if not begun.strip():
        return rest
    if closes and closes in begun:
        return rest.partition(closes)[2].lstrip() if closes in rest.partition(_NAME)[0] else rest
    if rest.startswith(begun.strip()):
        return rest[len(begun) if rest.startswith(begun) else len(begun.strip()) :]
    return f"{closes}\n\n{rest}" if closes else rest


def _listed(written: Callable[[int, Mapping[str, Any]], str | None]) -> CallFormat | None:
    """The format of calls whose arguments stand one by one; None where they do not."""
    texts, numbers, nothing, two = written(1, _TEXTS), written(1, _NUMBERS), written(1, {}), written(2, _TEXTS)
    parts = _split_at(texts, _NAME, *(str(each) for item in _TEXTS.items() for each in item))
    others = _split_at(numbers, _NAME, *(str(each) for item in _NUMBERS.items() for each in item))
    if parts is None or others is None or not nothing or _NAME not in nothing:
        return None
    opening, first, text_assign, text_more, text_assign_more, text_rest = parts
    _, _, assign, more, _, rest = others
    if text_assign_more != text_assign:
        return None
    empty = nothing.partition(_NAME)[2]
    between = _split_at(two, *[_NAME, *_TEXTS.values()] * 2)
    if first == "(" and re.fullmatch(r"\s*=\s*[\"']?", text_assign):
        after = empty.removeprefix("()")
        separator = None if between is None else between[3].lstrip("\"'").removeprefix(")")
        return CallFormat(opening, "", after, separator, PYTHON_ARGUMENTS)
    closing = common_end(rest, empty)
    last, text_last = rest.removesuffix(closing), text_rest.removesuffix(closing)
    end, text_end = _end_of(more, last), _end_of(text_more, text_last)
    if text_assign.startswith(assign) and text_end.endswith(end):  # quotes
        text_end = text_more.removesuffix(more) + end
    next_, last = more.removeprefix(end), last.removeprefix(end)
    if (text_more, text_last) != (text_end + next_, text_end + last) or not text_end:
        return None
    separator = None
    if between is not None and between[3].startswith(text_end + last):
        separator = between[3].removeprefix(text_end + last)
        opening, separator = _numbered_ends(opening, separator)
    arguments = ArgumentsFormat(first, assign, end, text_assign, text_end, next_, last, empty.removesuffix(closing))
    return CallFormat(opening, "", closing, separator, arguments)


def _end_of(more: str, last: str) -> str:
    """What ends a value, of what follows it before another one and at the end: up to the end of the first tag."""
    common = _common(more, last)
    tag = re.match(r"\s*<[^>]*>", common)
    return tag[0] if tag else ""


def _split_at(text: str | None, *marks: str) -> list[str] | None:
    """What stands between marks that follow each other; None where one is not there."""
    parts = []
    for mark in marks:
        before, found, text = (text or "").partition(mark)
        if not found:
            return None
        parts.append(before)
    return [*parts, text or ""]


def _numbered(one: str, other: str) -> str:
    """A text of which another differs in a number, with :data:`CALL_NUMBER` for it."""
    numbered = _DIGITS.sub(CALL_NUMBER, one)
    return numbered if one != other and numbered == _DIGITS.sub(CALL_NUMBER, other) else one


def _numbered_ends(one: str, other: str) -> tuple[str, str]:
    """Two texts whose ends differ in a number, with :data:`CALL_NUMBER` for it."""
    common = common_end(_DIGITS.sub(CALL_NUMBER, one), _DIGITS.sub(CALL_NUMBER, other))
    if CALL_NUMBER not in common or len(common_end(one, other)) == len(common):
        return one, other
    common = common[common.index(CALL_NUMBER) :]

    def numbered(text: str) -> str:
        at = next(at for at in range(len(text)) if _DIGITS.sub(CALL_NUMBER, text[at:]) == common)
        while at and text[at - 1].isdigit():
            at -= 1
        return text[:at] + common

    return numbered(one), numbered(other)


def common_beginning(one: str, other: str) -> str:
    """Of two texts, up to the end of a marker."""
    size = len(_common(one, other))
    cut = [found.start() for text in (one, other) for found in TAG.finditer(text) if found.start() < size < found.end()]
    return one[: min(cut, default=size)]


def common_end(one: str, other: str) -> str:
    """Of two texts, from the beginning of a marker."""
    at = len(one) - len(_common(one[::-1], other[::-1]))
    return one[next((found.end() for found in TAG.finditer(one) if found.start() < at < found.end()), at) :]


def _common(one: str, other: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _render(render: Render, form: EarlierCalls, count: int, arguments: Mapping[str, Any] = _ARGUMENTS) -> str | None:
    """A conversation with so many calls; None where the template refuses it."""
    return _render_messages(render, (*_QUESTION, form.example(count, arguments)), tools=[_TOOL])


def _render_messages(
    render: Render, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), is_prompt: bool = False
) -> str | None:
    try:
        return render(messages, tools, is_prompt)
    except InvalidRequest:
        return None


def _holds_calls(text: str, count: int) -> bool:
    """Whether a text holds so many calls of the example, their arguments as JSON."""
    found = _WRITTEN.search(text)
    return found is not None and text.rfind(_NAME, 0, found.start()) >= 0 and len(_WRITTEN.findall(text)) == count
