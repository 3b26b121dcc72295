"""What the text of an answer must look like: JSON of a schema, an expression, a choice, a grammar or tagged parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from json import dumps
from typing import Any, Final

from specdec.errors import InvalidRequest, quote

#: The fields of which one is given.
KINDS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
#: The parameter's name in errors.
_FIELD: Final = "structured_outputs"
#: The same in a message, with the kind after it.
_NAMED: Final = re.compile(rf"{_FIELD}([. ]({'|'.join(KINDS)})\b)?")
#: What errors quote of a grammar: where they are in it, and the lines around.
_LINES: Final = re.compile(r" at \d+\(\d+\):| \d+ \| .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The language of an answer, under vLLM's names. Exactly one field is given.

    The target draws only tokens that continue a text of the language, and the answer ends where it is complete.
    Raises :class:`InvalidRequest` where none or several fields are given, or a value has the wrong type.
    """

    #: JSON schema, as text or as an object; kept as text.
    json: str | Mapping[str, Any] | bool | None = None
    #: Any JSON object.
    json_object: bool | None = None
    #: Regular expression in Rust's syntax, without look-around; the whole text matches.
    regex: str | None = None
    #: One of these texts.
    choice: Sequence[str] | None = None
    #: Context-free grammar, in llguidance's Lark syntax, or in GBNF where it holds ``::=``.
    grammar: str | None = None
    #: Free text in which a trigger begins a part with a schema of its own; JSON in vLLM's form, text or object.
    structural_tag: str | Mapping[str, Any] | None = None
    #: JSON without spaces and line breaks between its parts; not a language of its own.
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            names = ", ".join(KINDS)
            raise _refusal(f"gives {' and '.join(given) or 'nothing'}; give exactly one of {names}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not self.choice:
                raise _refusal(f"choice is {quote(self.choice)}; give a list with at least one text")
            object.__setattr__(self, "choice", tuple(self.choice))
            for text in self.choice:
                if not isinstance(text, str) or not text:
                    raise _refusal(f"choice holds {quote(text)}; each entry is a text that is not empty")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping) or (name == "json" and isinstance(value, bool)):
                try:
                    object.__setattr__(self, name, dumps(value, ensure_ascii=False))
                except (TypeError, ValueError, RecursionError) as error:
                    raise _refusal(f"{name} is no JSON: {error}") from error
        value = getattr(self, self.kind)
        if self.kind not in {"json_object", "choice"} and not isinstance(value, str):
            expected = "a schema" if self.kind == "json" else "a tag" if self.kind == "structural_tag" else "a text"
            raise _refusal(f"{self.kind} is {quote(value)}; give {expected}")
        try:
            _ = self.num_bytes
        except UnicodeEncodeError as error:
            raise _refusal(f"{self.kind} holds half a surrogate pair, which is no character") from error

    @property
    def kind(self) -> str:
        """The one of :data:`KINDS` that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the text that is given."""
        value = getattr(self, self.kind)
        texts = () if self.kind == "json_object" else (value,) if isinstance(value, str) else value
        return sum(len(text.encode()) for text in texts)


def read_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """The parameter as it is kept: an object, or its fields as a mapping.

    Raises:
        InvalidRequest: it is neither, or holds an unknown field.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise _refusal(f"is {quote(value)}; give StructuredOutputsParams or its fields")
    known = {entry.name for entry in fields(StructuredOutputsParams)}
    if unknown := next((name for name in value if name not in known), None):
        raise _refusal(f"holds {quote(unknown)}; its fields are {', '.join(sorted(known))}")
    return StructuredOutputsParams(**value)


@contextmanager
def asked_by(name: str) -> Iterator[None]:
    """Errors about structured outputs name the field that asked for them, such as ``response_format``; empty: this."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != _FIELD or name in ("", _FIELD):
            raise
        # Places and lines of a grammar help only those who wrote it.
        text = _LINES.sub("", str(error)) if name == "tools" else str(error)
        raise InvalidRequest(_NAMED.sub(name, text, count=1), param=name) from error


def _refusal(text: str) -> InvalidRequest:
    return InvalidRequest(f"{_FIELD} {text}", param=_FIELD)
