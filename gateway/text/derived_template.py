"""Response templates made from what a chat template writes: of calls, of thoughts and of text between markers.

The idea is that of llama.cpp's differential parser. What an expression matches has a limit, for it is searched at each
character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.text.call_format import CALL_ID, CALL_NUMBER, NAMED_CALL, ArgumentsFormat, CallFormat
from gateway.text.chat_probe import TAG, UNMISTAKABLE, Markers, common_beginning, common_end
from gateway.text.response_template import PYTHON_CALLS

_NAME: Final = r"(?P<name>[\w.:/-]{1,128}?)"
_JSON_CALL: Final = {"type": "function", "function": "{content}"}
#: The end of an opening that begins an object with the name, perhaps in a list.
_JSON_OPENING: Final = re.compile(r'\[?\s*\{[^{}]*"(?:name|tool_name)"\s*:\s*"\Z')
#: The beginning of such an object, where no marker tells that it is a call.
_JSON_CALL_BEGINS: Final = r'\[?\s{0,8}\{\s{0,8}(?:"type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,8})?"name"\s{0,8}:'
_PYTHON_CALL_BEGINS: Final = r"\[\s{0,8}[A-Za-z_][\w.-]{0,127}\("
#: What models write before a call though their chat templates do not.
_UNWRITTEN: Final = ("<|python_tag|>", "<|python_start|>", "<|tool_call|>", "functools")
_WHOLE: Final = re.compile(rf"(\s+|{CALL_ID}|{CALL_NUMBER})")


def derive(
    markers: Markers,
    calls: CallFormat | None,
    known: Sequence[str] = (),
    added: Sequence[str] = (),
) -> Mapping[str, Any] | None:
    """The response template; None where an answer has no parts. ``known``: those of :data:`_UNWRITTEN` that the model
    may write; ``added``: the texts of its tokens that are markers.
    """

    def is_marker(text: str) -> bool:
        return UNMISTAKABLE.search(text) is not None or any(each in text for each in added)

    fields: dict[str, Any] = {}
    content: dict[str, Any] = {}
    opens, closes = markers.thoughts
    if closes:
        fields["reasoning_content"] = {"open": opens, "close": closes}
    if markers.content[1]:
        fields["response"] = {"open": markers.content[0], "close": markers.content[1], "repeats": True}
    found = None if calls is None else _tool_calls(calls, markers, known, is_marker)
    if found is not None:
        fields["tool_calls"], end = found
        content = {"close": end} if end else {}
    if not fields:
        return None
    # What a chat template writes of an answer itself is the beginning of its thoughts, or empty thoughts.
    begun = rf"(?={_flexible(opens)}\s{{0,8}}(?:{_flexible(closes)}\s{{0,8}})?\Z)" if closes else r"\Z"
    return {"start_anchor_pattern": begun, "fields": {**fields, "content": content}}


def unwritten(sources: Sequence[str]) -> list[str]:
    """Those of :data:`_UNWRITTEN` that stand in any of some texts."""
    return [mark for mark in _UNWRITTEN if any(mark in source for source in sources)]


def _tool_calls(
    calls: CallFormat, markers: Markers, known: Sequence[str], is_marker: Callable[[str], bool]
) -> tuple[dict[str, Any], str] | None:
    """The field of calls, and what ends all of them; None where nothing tells calls from text."""
    closes = markers.thoughts[1]
    opening = (calls.opening.rpartition(closes)[2] if closes else calls.opening).lstrip()
    closing = calls.closing[: len(calls.closing) - len(common_end(calls.closing, markers.end))]
    section, call, end, section_end = _sections(opening, closing, calls.separator)
    form = calls.arguments
    if form is not None and form.is_python:
        marker = opening[: max((found.end() for found in TAG.finditer(opening)), default=0)]
        opens = _begins(marker, _PYTHON_CALL_BEGINS, known)
        return _region(opens, _first_tag(closing), content_args=PYTHON_CALLS), ""
    if form is None and (found := _JSON_OPENING.search(opening)) is not None:
        in_call = _JSON_OPENING.search(call)
        if in_call is None or not call[: in_call.start()].strip() or not section.strip():
            marker, section, end, section_end = opening[: found.start()].strip(), "", closing, ""
        else:
            marker = call[: in_call.start()].strip()
        opens = _optional(section) + _begins(marker, _JSON_CALL_BEGINS, known)
        return _region(opens, _first_tag(end), content="json", transform=_JSON_CALL), _first_tag(section_end)
    if not call.strip() or (end.strip() and not _last_tag(end)):
        return None
    # Text that looks like a call is taken for one here, so the marker must be unmistakable. The key of the first
    # argument is left out, because a call may have none.
    after = calls.between if form is None else form.first.removesuffix(form.next.strip())
    if not is_marker(f"{call}name{after}"):
        return None
    opens = f"{_optional(section)}{_flexible(call.lstrip())}{_NAME}"
    more = _named(calls.between) if form is None else _listed(form, _first_tag(end))
    if more is None:
        return None
    field = _region(opens + more.pop("opens"), _last_tag(end), transform=NAMED_CALL, **more)
    return field, _first_tag(section_end)


def _named(between: str) -> dict[str, Any]:
    """Of arguments in JSON: what stands between them and the name, and how they are read."""
    return {"opens": _flexible(between) + ("" if between.strip() else r"(?=\{)"), "content": "json"}


def _listed(form: ArgumentsFormat, ends: str) -> dict[str, Any] | None:
    """Of arguments in tags: what stands between them and the name, and how they are read; None where they are in
    none. An argument without an end ends before the next one, and before what ``ends`` the call.
    """
    key = form.next.strip()
    if not TAG.match(form.text_end.lstrip()) or not key or not form.first.endswith(key):
        return None
    head = form.first.removesuffix(key).strip()
    ahead = "" if head else rf"\s{{0,8}}(?={_flexible(key)}|{_flexible(ends)})"
    assigns = sorted({form.assign, form.text_assign}, key=len, reverse=True)
    line = r"\n?" if form.text_end[:1].isspace() else ""
    stops = "|".join(line + _flexible(each.strip()) for each in sorted({form.end, form.text_end} - {""}))
    others = "|".join(line + _flexible(each) for each in (key, ends) if each)
    pattern = (
        rf"{_flexible(key)}(?P<key>[^<>\n\"]{{1,128}}?)(?:{'|'.join(map(_assign, assigns))})"
        rf"(?P<value>(?:(?!{stops}|{others}).)*+)(?:{stops})?"
    )
    opens = rf"\s{{0,8}}{_flexible(head)}{ahead}"
    return {"opens": opens, "content": "xml-inline", "content_args": {"tag_pattern": pattern}}


def _sections(opening: str, closing: str, separator: str | None) -> tuple[str, str, str, str]:
    """What begins all calls, and each; what ends each, and all."""
    if separator is None:
        return "", opening, closing, ""
    call = common_end(opening, separator)
    end = common_beginning(closing, separator[: len(separator) - len(call)] or separator)
    return opening[: len(opening) - len(call)], call, end, closing[len(end) :]


def _region(opens: str, closes: str, **more: Any) -> dict[str, Any]:
    close = {"close": closes} if closes else {}
    return {"open_pattern": opens, **close, "repeats": True, **more}


def _begins(marker: str, call: str, known: Sequence[str]) -> str:
    """The expression of what begins calls: a marker, or a call at the beginning of a line."""
    if marker:
        return _flexible(marker) + (r"\s{0,8}(?=[\[{])" if call == _JSON_CALL_BEGINS else "")
    optional = "|".join(map(re.escape, known))
    return rf"(?:\A|\n)\s{{0,8}}(?:(?:{optional})\s{{0,8}})?(?={call})" if known else rf"(?:\A|\n)\s{{0,8}}(?={call})"


def _flexible(text: str) -> str:
    """An expression for a text with any white space, ids and numbers."""
    space = {CALL_ID: r"[\w.:-]{1,64}", CALL_NUMBER: r"\d{1,6}"}
    return "".join(space.get(part, r"\s{0,8}") if _WHOLE.fullmatch(part) else re.escape(part)
                   for part in _WHOLE.split(text) if part)  # fmt: skip


def _optional(section: str) -> str:
    return rf"(?:{_flexible(section.strip())}\s{{0,8}})?" if section.strip() else ""


def _assign(text: str) -> str:
    """What stands before a value; a line break at its end may be missing, and more white space is the value's."""
    return _flexible(text.rstrip()) + (r"\n?" if text[-1:].isspace() else "")


def _first_tag(text: str) -> str:
    found = TAG.search(text)
    return found[0] if found else ""


def _last_tag(text: str) -> str:
    return next((found[0] for found in reversed(list(TAG.finditer(text)))), "")
