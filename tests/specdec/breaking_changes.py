"""What breaks clients between two states of the protos, by buf's rules for generated code and for messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

#: The properties of a field that code or messages depend on.
FIELD_PROPERTIES = ("name", "type", "type_name", "label", "proto3_optional")


def breaking_changes(old: Iterable[FileDescriptorProto], new: Iterable[FileDescriptorProto]) -> list[str]:
    """One sentence for each change between two sets of files that a client of the old one would notice."""
    files = {file.name: file for file in new}
    found: list[str] = []
    for file in old:
        if file.name not in files:
            found.append(f"{file.name} was removed")
        else:
            found += _changes_of_file(file, files[file.name])
    return found


def _changes_of_file(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    if old.package != new.package:
        yield f"{old.name}: package {old.package} became {new.package}"
    yield from _changes_of_types(old.package, old.message_type, old.enum_type, new.message_type, new.enum_type)
    services = {service.name: service for service in new.service}
    for service in old.service:
        if service.name in services:
            yield from _changes_of_service(service, services[service.name])
        else:
            yield f"service {service.name} was removed"


def _changes_of_types(
    scope: str,
    old_messages: Iterable[DescriptorProto],
    old_enums: Iterable[EnumDescriptorProto],
    new_messages: Iterable[DescriptorProto],
    new_enums: Iterable[EnumDescriptorProto],
) -> Iterator[str]:
    messages, enums = ({entry.name: entry for entry in entries} for entries in (new_messages, new_enums))
    for message in old_messages:
        if message.name in messages:
            yield from _changes_of_message(f"{scope}.{message.name}", message, messages[message.name])
        else:
            yield f"message {scope}.{message.name} was removed"
    for enum in old_enums:
        if enum.name in enums:
            yield from _changes_of_enum(f"{scope}.{enum.name}", enum, enums[enum.name])
        else:
            yield f"enum {scope}.{enum.name} was removed"


def _changes_of_message(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    for field in old.field:
        if field.number not in fields:
            yield f"{name}: field {field.number} ({field.name}) was removed"
            continue
        other = fields[field.number]
        for what in FIELD_PROPERTIES:
            was, became = getattr(field, what), getattr(other, what)
            if was != became:
                yield f"{name}: {what} of field {field.number} ({field.name}) was {was} and became {became}"
        was, became = _oneof(old, field), _oneof(new, other)
        if was != became:
            yield f"{name}: field {field.number} ({field.name}) moved from oneof {was} to {became}"
    yield from _changes_of_reserved(name, old, new, end=0)
    yield from _changes_of_types(name, old.nested_type, old.enum_type, new.nested_type, new.enum_type)


def _changes_of_enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number not in values:
            yield f"{name}: value {value.number} ({value.name}) was removed"
        elif values[value.number] != value.name:
            yield f"{name}: value {value.number} was {value.name} and became {values[value.number]}"
    yield from _changes_of_reserved(name, old, new, end=1)


def _changes_of_reserved(
    name: str, old: DescriptorProto | EnumDescriptorProto, new: DescriptorProto | EnumDescriptorProto, *, end: int
) -> Iterator[str]:
    """What was reserved stays so. The ``end`` of a range is exclusive in messages (0) and inclusive in enums (1)."""
    for reserved in old.reserved_range:
        wanted = range(reserved.start, reserved.end + end)
        kept = [range(each.start, each.end + end) for each in new.reserved_range]
        if free := [number for number in wanted if not any(number in each for each in kept)]:
            yield f"{name}: number {free[0]} is no longer reserved"
    for text in set(old.reserved_name) - set(new.reserved_name):
        yield f"{name}: name {text} is no longer reserved"


def _changes_of_service(old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for method in old.method:
        if method.name not in methods:
            yield f"method {old.name}.{method.name} was removed"
            continue
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            was, became = getattr(method, what), getattr(methods[method.name], what)
            if was != became:
                yield f"method {old.name}.{method.name}: {what} was {was} and became {became}"


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if field.proto3_optional or not field.HasField("oneof_index"):
        return "none"
    return message.oneof_decl[field.oneof_index].name
