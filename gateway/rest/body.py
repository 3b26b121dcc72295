"""The base of all bodies, and the three kinds of fields: those with an effect, ignored ones and refused ones.

Null and empty values mean the default, in every field. A field that cannot change the answer is ignored, and the
response names it. A field that would change the answer and cannot be honoured is refused by name, like an unknown one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.rest.foreign_names import FOREIGN_NAMES, WRAPPERS
from gateway.text.tokenizer import encodable
from specdec.errors import InvalidRequest, quote

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: Characters of an unknown name that are compared and reported.
_NAME_LENGTH: Final = 64
#: Similarity of an unknown name to a field, as difflib counts it, from which that is taken to be meant: misspelt names
#: have 0.8 and more, "n_predict" and "prediction" 0.74.
_SIMILARITY: Final = 0.78
#: Kinds of errors of a wrong type, and what was expected.
_WRONG_TYPES: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "text",
}
#: How pydantic names the types of a field that may have several.
_TYPE_NAME: Final = re.compile(r"str|int|(list|dict)\[.*")


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that cannot change the answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Marks a field that would change the answer and is not supported; false and ``allowed`` ask for nothing."""

    allowed: tuple[Any, ...] = ()
    hint: str = "leave it out"


@dataclass(frozen=True, slots=True)
class Meaningful:
    """Marks a field whose empty value is not its default."""


IGNORED: Final = Ignored()
REFUSED: Final = Refused()
#: A field that clients send and that cannot change the answer.
IgnoredField = Annotated[Any, IGNORED]
#: A field that would change the answer and is not supported.
RefusedField = Annotated[Any, REFUSED]
#: Of many wrong entries only the first is reported.
FAIL_FAST: Final = Field(fail_fast=True)
MEANINGFUL: Final = Meaningful()


def _describe_filled(schema: dict[str, Any]) -> None:
    for part in schema.get("anyOf", [schema]):
        if (limit := {"string": "minLength", "array": "minItems"}.get(part.get("type"))) is not None:
            part[limit] = 1


#: Says in the description that a field must not be empty; who reads the field checks it.
FILLED: Final = Field(json_schema_extra=_describe_filled)


class Body(BaseModel):
    """No unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: Where the object stands in its request, for error messages.
    path: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def read_fields(cls, given: Any) -> Any:
        """Drop what asks for nothing. The first field that is unknown or not supported raises InvalidRequest."""
        if not isinstance(given, Mapping):
            return given
        kinds, kept = kinds_of(cls), {}
        for name, value in given.items():
            kind = kinds.get(name)
            if value is None or (_is_empty(value) and kind is not MEANINGFUL):
                continue
            if name not in kinds:
                raise cls._unknown(name)
            if isinstance(kind, Refused):
                if value is not False and value not in kind.allowed:
                    where = cls._place(name)
                    raise InvalidRequest(f"{where} is not supported; {kind.hint}", param=where)
                continue
            kept[name] = value
        return kept

    @field_validator("*", mode="after")
    @classmethod
    def check_text(cls, value: Any) -> Any:
        """Refuse text that cannot be passed on or given back."""
        if not _all_encodable(value):
            raise ValueError("holds half a surrogate pair, which is no character")
        return value

    def ignored(self) -> Iterator[str]:
        """The names of the given fields that have no effect."""
        kinds = kinds_of(type(self))
        return (self._place(name) for name in self.model_fields_set if kinds[name] is IGNORED)

    @classmethod
    def _place(cls, name: str) -> str:
        return f"{cls.path}.{name}" if cls.path else name

    @classmethod
    def _unknown(cls, name: str) -> InvalidRequest:
        shown = name if len(name) <= _NAME_LENGTH else name[:_NAME_LENGTH] + "…"
        kinds = kinds_of(cls)
        known = [each for each in FOREIGN_NAMES.get(name, ()) if each in kinds and not isinstance(kinds[each], Refused)]
        near = known or difflib.get_close_matches(shown, cls.model_fields, n=1, cutoff=_SIMILARITY)
        remedy = f"did you mean {cls._place(near[0])!r}?" if near else "docs/api.md lists the fields of this server"
        if name in WRAPPERS and not cls.path:
            remedy = "put what it holds into the body itself"
        where = cls._place(shown)
        return InvalidRequest(f"unknown field {where!r}; {remedy}", param=where)


@cache
def kinds_of(body: type[Body]) -> Mapping[str, Ignored | Refused | Meaningful | None]:
    """The kind of each field; None: it has an effect."""
    result: dict[str, Ignored | Refused | Meaningful | None] = {}
    for name, field in body.model_fields.items():
        marks = [mark for mark in field.metadata if isinstance(mark, Ignored | Refused | Meaningful)]
        result[name] = MEANINGFUL if field.is_required() else next(iter(marks), None)
    return result


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list | dict) and not value


def _all_encodable(value: Any) -> bool:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return all(_all_encodable(key) and _all_encodable(item) for key, item in value.items())
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return all(map(_all_encodable, value))
    return True


def invalid_request_of(error: ValidationError) -> InvalidRequest:
    """The first thing wrong with a body, naming its field. Lists and mappings stop at their first wrong entry."""
    found = error.errors(include_url=False)
    field = str(found[0]["loc"][0])
    # A field of several types has an error for each. A wrong value tells more than a wrong type, an error in a later
    # entry more than one in an earlier entry or in the field itself.
    tried = [each for each in found if each["loc"][0] == field]
    first = next((each for each in tried if each["type"] not in _WRONG_TYPES), None)
    path = _path(first or max(tried, key=_entry))
    where = ".".join(map(str, path))
    if first is None:
        names = dict.fromkeys(_WRONG_TYPES[each["type"]] for each in tried if _path(each) == path)
        return InvalidRequest(f"{where} must be {' or '.join(names)}", param=field)
    if first["type"] == "missing":
        return InvalidRequest(f"the field {where!r} is missing", param=field)
    if first["type"] in ("enum", "literal_error"):
        return InvalidRequest(
            f"{where} is {quote(first['input'])}; choose one of {first['ctx']['expected']}", param=field
        )
    if first["type"] == "greater_than_equal":
        limit = first["ctx"]["ge"]
        return InvalidRequest(f"{where} is {quote(first['input'])}; it must be at least {limit}", param=field)
    return InvalidRequest(f"{where}: {first['msg']}", param=field)


def _path(error: ErrorDetails) -> tuple[int | str, ...]:
    """Where an error is, without the names of the types that were tried."""
    return tuple(part for part in error["loc"] if isinstance(part, int) or not _TYPE_NAME.fullmatch(part))


def _entry(error: ErrorDetails) -> list[int]:
    """The numbers in the place of an error, to compare how far inside it is."""
    return [part for part in _path(error) if isinstance(part, int)]
