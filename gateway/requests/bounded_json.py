"""JSON of a bounded number of values and levels."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from specdec.errors import InvalidRequest
from specdec.settings import RequestLimits

_BODY: Final = "the body"
#: A string without escapes, or the rest of a text in which one does not end.
_TEXT: Final = re.compile(rb'"[^"]*+"?')
#: What stands before a value, or between two.
_MARKS: Final = (b",", b"[", b"{")


def parse_json(raw: bytes, limits: RequestLimits, *, max_model_len: int, param: str | None = None) -> Any:
    """The value of a JSON text: a whole body, or its field ``param``.

    A prompt of token ids that fits the model's context is never too many values.

    Raises:
        InvalidRequest: it is no JSON, or holds too many values or too many levels.
    """
    _check_num_values(raw, max(limits.max_json_values, 2 * max_model_len), param)
    try:
        value = json.loads(raw)
    except RecursionError:
        raise _too_deep(limits.max_json_depth, param) from None
    except ValueError as error:
        reason = str(error).partition("; use sys.")[0]  # Python's remedy for its limit of digits is no client's
        raise InvalidRequest(f"{param or _BODY} is not JSON: {reason}", param=param) from None
    _check_depth(value, limits.max_json_depth, param)
    return value


def _check_num_values(raw: bytes, limit: int, param: str | None) -> None:
    """Refuse a text whose values would take too much memory, before they do."""
    if len(raw) <= limit or sum(map(raw.count, _MARKS)) < limit:
        return
    raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # what is left of a quote begins or ends a string
    count = end = 0
    for text in _TEXT.finditer(raw):
        count += sum(raw.count(mark, end, text.start()) for mark in _MARKS)
        end = text.end()
        if count >= limit:
            break
    if count + sum(raw.count(mark, end) for mark in _MARKS) >= limit:
        raise InvalidRequest(
            f"{param or _BODY} holds more than {limit} values (--max-json-values); send fewer", param=param
        )


def _check_depth(value: Any, limit: int, param: str | None) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        children = (child for node in level for child in (node.values() if type(node) is dict else node))
        level = [child for child in children if type(child) is dict or type(child) is list]
        if not level:
            return
    raise _too_deep(limit, param)


def _too_deep(limit: int, param: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"{param or _BODY} has more than {limit} levels of lists and objects (--max-json-depth); send fewer",
        param=param,
    )
