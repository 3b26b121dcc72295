"""A check that C++ and Python lay out the structs they share alike: every field's name, offset, size and kind.

C++ lists its structs with ``TANDEM_STRUCT`` (``struct_table.h``). A library is checked once, when it is loaded: about
0.2 ms for 20 structs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final


class StructMismatch(Exception):
    """A struct is laid out differently in C++ and in Python: a fault in the source code."""


#: Name, offset in bytes, size in bytes, kind of a field.
Field = tuple[str, int, int, str]


class _Field(ctypes.Structure):
    """``StructField`` of struct_table.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class _Entry(ctypes.Structure):
    """``StructEntry`` of struct_table.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_int64),
        ("fields", ctypes.POINTER(_Field)),
        ("num_fields", ctypes.c_int64),
        ("next", ctypes.c_void_p),
    )


_KIND_NAMES: Final = {"p": "pointer", "i": "signed integer", "u": "unsigned integer", "f": "float", "s": "struct"}


def check_structs(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Compare the structs of a loaded library with Python's definitions, given by their C++ names.

    Raises:
        StructMismatch: the first difference: the struct, the field, and what it is on either side.
    """
    native = _structs_of(library)
    for name, mirror in structs.items():
        if name not in native:
            raise StructMismatch(f"struct {name}: {library._name} has no TANDEM_STRUCT({name}, …)")
        size, fields = native[name]
        _compare(name, fields, _fields_of(mirror))
        if size != ctypes.sizeof(mirror):
            raise StructMismatch(f"struct {name}: {size} bytes in C++, {ctypes.sizeof(mirror)} in Python")


def _compare(struct: str, native: Sequence[Field], mirror: Sequence[Field]) -> None:
    there, here = {field[0]: field for field in native}, {field[0]: field for field in mirror}
    for name in there.keys() - here.keys():
        raise StructMismatch(f"struct {struct}, field {name}: missing in Python")
    for name in here.keys() - there.keys():
        raise StructMismatch(f"struct {struct}, field {name}: missing in C++")
    for name, field in there.items():
        if field != here[name]:
            raise StructMismatch(f"struct {struct}, field {name}: {_show(field)} in C++, {_show(here[name])} in Python")


def _show(field: Field) -> str:
    _, offset, size, kind = field
    return f"a {_KIND_NAMES[kind]} of {size} bytes at offset {offset}"


def _structs_of(library: ctypes.CDLL) -> dict[str, tuple[int, list[Field]]]:
    """Size and fields of every struct a library lists."""
    first = library.tandem_structs
    first.argtypes, first.restype = (), ctypes.c_void_p
    structs = {}
    address = first()
    while address:
        entry = _Entry.from_address(address)
        fields = [(f.name.decode(), f.offset, f.size, chr(f.kind)) for f in entry.fields[: entry.num_fields]]
        structs[entry.name.decode()] = (entry.size, fields)
        address = entry.next
    return structs


def _fields_of(mirror: type[ctypes.Structure]) -> list[Field]:
    fields = []
    for name, kind, *_ in mirror._fields_:
        place = getattr(mirror, name)
        fields.append((name, place.offset, place.size, _kind_of(kind)))
    return fields


def _kind_of(kind: Any) -> str:
    if issubclass(kind, ctypes.Array):
        return _kind_of(kind._type_)
    if issubclass(kind, ctypes.Structure):
        return "s"
    code: str = kind._type_
    if code in "Pz":
        return "p"
    if code in "fdg":
        return "f"
    return "i" if code.islower() else "u"
