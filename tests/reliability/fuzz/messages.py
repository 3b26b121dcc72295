"""Hypothesis strategies of protobuf messages: valid ones with a few fields replaced, as bytes that may be damaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

#: Messages inside messages are varied to this depth.
DEPTH = 4
_UNSIGNED = st.one_of(st.integers(0, 12), st.sampled_from([63, 64, 255, 2**31 - 1, 2**31, 2**32 - 1]))
_SIGNED = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**31), -(2**31) + 1, 2**31 - 1]))
_REALS = st.one_of(
    st.floats(-3, 3), st.sampled_from([0.0, -0.0, 1e-300, 1e-40, 1e38, 1e308, math.inf, -math.inf, math.nan])
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: _UNSIGNED,
    FieldDescriptor.TYPE_UINT64: st.one_of(_UNSIGNED, st.sampled_from([2**63, 2**64 - 1])),
    FieldDescriptor.TYPE_INT32: _SIGNED,
    FieldDescriptor.TYPE_SINT32: _SIGNED,
    FieldDescriptor.TYPE_FLOAT: _REALS,
    FieldDescriptor.TYPE_DOUBLE: _REALS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.one_of(st.text(max_size=8), st.sampled_from(["bfloat16", "float32", "a" * 5000])),
    FieldDescriptor.TYPE_BYTES: st.one_of(st.binary(max_size=40), st.just(bytes(256))),
}
Path = tuple[FieldDescriptor, ...]


@cache
def paths_of(descriptor: Descriptor, depth: int = DEPTH) -> list[Path]:
    """Every field that can be replaced, those of messages inside included."""
    paths: list[Path] = []
    for field in descriptor.fields:
        if field.message_type is None or field.is_repeated:
            paths.append((field,))
        elif depth > 1:
            paths += [(field, *path) for path in paths_of(field.message_type, depth - 1)]
    return paths


@cache
def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """What a field may be replaced by."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (values_of(field.message_type.fields_by_name[name]) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=4)
    if field.message_type is not None:
        one = variations_of(GetMessageClass(field.message_type)())
    elif field.enum_type is not None:
        one = st.integers(0, 5)
    else:
        one = _SCALARS[field.type]
    if not field.is_repeated:
        return one
    few = st.lists(one, max_size=6)
    return few if field.message_type else st.one_of(few, st.builds(lambda item: [item] * 300, one))


def replace(message: Message, path: Path, value: Any) -> None:
    """Put a value where ``path`` leads."""
    *outer, field = path
    for each in outer:
        message = getattr(message, each.name)
    message.ClearField(field.name)
    if isinstance(value, dict):
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)


@st.composite
def variations_of(draw: st.DrawFn, valid: Message, max_changes: int = 3) -> Message:
    """``valid`` with up to so many fields replaced; often none."""
    message = type(valid)()
    message.CopyFrom(valid)
    paths = paths_of(type(valid).DESCRIPTOR)
    for path in draw(st.lists(st.sampled_from(paths), max_size=max_changes)) if paths else ():
        replace(message, path, draw(values_of(path[-1])))
    return message


@dataclass(frozen=True)
class Damage:
    """What becomes of the bytes of a message."""

    #: None: nothing; else where, as a share of the length, and what is put there in place of how many bytes.
    place: float | None = None
    put: bytes = b""
    num_cut: int = 0

    def apply(self, data: bytes) -> bytes:
        if self.place is None:
            return data
        at = round(self.place * len(data))
        return data[:at] + self.put + data[at + self.num_cut :]


#: One message of eight is damaged.
damages = st.integers(0, 7).flatmap(
    lambda number: (
        st.just(Damage())
        if number
        else st.builds(Damage, st.floats(0, 1), st.binary(max_size=4), st.integers(0, 8) | st.just(10**6))
    )
)
