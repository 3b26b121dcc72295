"""Chat messages to a prompt, through a Jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import InvalidRequest


class _Generation(Extension):
    """``{% generation %}``, which marks for training what the model wrote; it changes nothing here."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS: Final = (loopcontrols, _Generation)


class ChatTemplate:
    """A compiled chat template. It gets what Hugging Face's templates expect: ``messages``, ``add_generation_prompt``,
    the special tokens by role, ``raise_exception``, ``strftime_now`` and a ``tojson`` that escapes nothing.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
            #: The names it reads and does not define itself.
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template is not valid Jinja: {error}", param="chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. ``variables`` are the template's own switches.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        values = self._special_tokens | dict(variables or {})
        try:
            return self._template.render(
                values | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error


def read_template(text_or_path: str) -> str:
    """A ``--chat-template`` value: the template itself, or a file that holds it.

    Raises:
        InvalidRequest: it looks like a path and there is no such file.
    """
    if "{" in text_or_path or "\n" in text_or_path:
        return text_or_path
    path = Path(text_or_path)
    if not path.is_file():
        raise InvalidRequest(
            f"chat_template {text_or_path!r} is neither Jinja text nor a file; give one of them", param="chat_template"
        )
    return path.read_text(encoding="utf-8")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
