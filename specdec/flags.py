"""Command-line flags from options and back; ``--a_b`` and ``--a-b`` are the same flag."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from decimal import Decimal
from types import NoneType
from typing import Any, Final, NoReturn, TypeVar

from specdec.errors import did_you_mean, quote
from specdec.settings.option import Option, groups_of, options_of

S = TypeVar("S")
_ABSENT: Final = object()

#: What stands for a value in help texts.
METAVARS: Final[Mapping[type, str]] = {int: "N", float: "X", str: "TEXT"}
#: What the last letter of a whole number multiplies it with, as in vLLM.
_FACTORS: Final = {letter: base**power for power, letters in enumerate(("kK", "mM", "gG", "tT"), 1)
                   for base, letter in zip((1000, 1024), letters, strict=True)}  # fmt: skip
#: Optional flags that a usage line lists; more of them become one word.
_LISTED_FLAGS: Final = 6


class Parser(argparse.ArgumentParser):
    """An argument parser that takes underscores for hyphens, shows defaults and reports errors in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _HelpFormatter, **kwargs})
        self._titled: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group with this title in help texts, made when it is first asked for."""
        if title not in self._titled:
            self._titled[title] = self.add_argument_group(title)
        return self._titled[title]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse; an unknown flag is an error that names the nearest one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse after spelling every flag with hyphens, and vLLM's ``--flag.key value`` as ``--flag '{"key": …}'``."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(self._join_keys(hyphenate(given)), namespace)

    def _join_keys(self, args: Sequence[str]) -> list[str]:
        result: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        rest = iter(args)
        for arg in rest:
            if arg == "--":
                result += [arg, *rest]
                break
            name, equals, value = arg.partition("=")
            flag, _, path = name.partition(".")
            action = self._option_string_actions.get(flag) if path else None
            if action is None or action.nargs is not None or action.type is not None:
                result.append(arg)
                continue
            if not equals and (value := next(rest, "")) == "":
                self.error(f"argument {name}: expected one argument")
            flag = action.option_strings[0]
            *outer, last = path.split(".")
            place: Any = objects.setdefault(flag, {})
            for key in outer:
                place = place.setdefault(key, {}) if isinstance(place, dict) else place
            if not isinstance(place, dict) or last in place:
                self.error(f"argument {name}: the key is given twice")
            place[last] = _json_or_text(value)
        for flag, keys in objects.items():
            names = self._option_string_actions[flag].option_strings
            if any(arg.partition("=")[0] in names for arg in result):
                self.error(f"argument {flag}: given whole and by keys; give one of them")
            result[:0] = [flag, json.dumps(keys)]
        return result

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Leave because of arguments that no flag takes."""
        remedy = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
        self.error("; ".join(filter(None, [f"unrecognized arguments: {' '.join(unknown)}", remedy])))

    def error(self, message: str) -> NoReturn:
        """Leave with one line and exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


class _HelpFormatter(argparse.HelpFormatter):
    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """One line where argparse would list a page of flags."""
        shown = list(actions)
        listed = [each for each in shown if not each.option_strings or each.required]
        if usage is None and len(shown) - len(listed) > _LISTED_FLAGS:
            with_flags = argparse.HelpFormatter(self._prog)
            with_flags.add_usage(None, listed, [], "")
            usage = with_flags.format_help().strip().replace("%", "%%") + " [OPTIONS]"
        super().add_usage(usage, shown, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = default_text(action.default)
        return f"{action.help} (default: {default.replace('%', '%%')})" if action.help and default else action.help


def default_text(default: Any) -> str:
    """A default as help texts show it; empty where there is nothing to show."""
    if default is None or default is False or default is argparse.SUPPRESS:
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def hyphenate(args: Sequence[str]) -> list[str]:
    """``--speculative_config=x_y`` → ``--speculative-config=x_y``; what follows a lone ``--`` is left alone."""
    result: list[str] = []
    for index, arg in enumerate(args):
        if arg == "--":
            return [*result, *args[index:]]
        name, equals, value = arg.partition("=")
        flag, dot, keys = name.partition(".")
        result.append(flag_of(flag) + dot + keys + equals + value if name.startswith("--") else arg)
    return result


def flag_of(name: str) -> str:
    """``max_num_seqs`` → ``--max-num-seqs``."""
    return "--" + name.removeprefix("--").replace("_", "-")


def add_flags(
    parser: argparse._ActionsContainer,
    settings: type,
    *names: str,
    skip: Container[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each named option of a settings class (none named: all that have one), in one group.

    ``aliases`` gives an option a second flag.
    """
    options = options_of(settings)
    for name in names or [name for name, option in options.items() if option.flag and name not in skip]:
        flags = [flag_of(name), *([aliases[name]] if aliases and name in aliases else [])]
        parser.add_argument(*flags, **_argument(options[name]))


def add_grouped_flags(
    parser: Parser,
    settings: type,
    *,
    skip: Container[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each option of a settings class, under the titles of its groups."""
    options = options_of(settings)
    for title, names in groups_of(settings).items():
        if shown := [name for name in names if options[name].flag and name not in skip]:
            add_flags(parser.group(title), settings, *shown, aliases=aliases)


def _argument(option: Option) -> dict[str, Any]:
    """What argparse is told about an option."""
    common = {"help": option.text, "default": option.default, "required": option.required}
    if option.kinds == (bool,):
        return {**common, "action": argparse.BooleanOptionalAction if option.default else "store_true"}
    if option.enum is not None:
        return {**common, "choices": [str(member) for member in option.enum]}
    if tuple[str, ...] in option.kinds:
        many = (
            {"action": "append", "choices": option.choices}
            if option.choices
            else {"action": "extend", "nargs": "+", "metavar": METAVARS[str]}
        )
        return {**common, **many, "default": None if option.default is None else list(option.default)}
    if tuple[int, ...] in option.kinds:
        return {**common, "type": whole_numbers, "metavar": "N,M"}
    kind = next(kind for kind in option.kinds if kind is not NoneType)
    if option.choices:
        return {**common, "choices": option.choices}
    return {**common, "type": {int: whole_number}.get(kind, kind), "metavar": METAVARS[kind]}


def whole_number(text: str) -> int:
    """``4096``, and as in vLLM ``4k`` (4000) and ``4K`` (4096)."""
    factor = _FACTORS.get(text[-1:], 1)
    try:
        value = int(text) if factor == 1 else Decimal(text[:-1]) * factor
        if value != int(value):
            raise ValueError
    except (ValueError, ArithmeticError):
        raise argparse.ArgumentTypeError(
            f"{quote(text)} is no whole number such as 4096, 4k (4000) or 4K (4096)"
        ) from None
    return int(value)


def whole_numbers(text: str) -> tuple[int, ...]:
    """``1,8`` → (1, 8)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,8") from None


def settings_from(settings: type[S], args: argparse.Namespace, **given: Any) -> S:
    """Settings from parsed flags: every option that the parser knows, and ``given`` ones.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
    """
    return settings(**{**parsed_options(settings, args), **given})


def parsed_options(settings: type, args: argparse.Namespace) -> dict[str, Any]:
    """The values of a settings class's options that the parser knows."""
    return {
        name: _from_environment(option) if option.env and not value else _plain(value)
        for name, option in options_of(settings).items()
        if option.flag and (value := getattr(args, name, _ABSENT)) is not _ABSENT
    }


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _from_environment(option: Option) -> Any:
    if tuple[str, ...] in option.kinds:
        return from_environment(option.env)
    return next((value for name in option.env.split() if (value := os.environ.get(name))), None)


def from_environment(name: str) -> tuple[str, ...]:
    """The values of a variable: none where it is not set, and one empty value where it is blank."""
    if (text := os.environ.get(name)) is None:
        return ()
    return tuple(part.strip() for part in text.split(",") if part.strip()) or ("",)


def flags_of(settings: Any, *, skip: Container[str] = ()) -> tuple[str, ...]:
    """The flags that give a service these settings; what equals the default is left out."""
    flags: list[str] = []
    for name, option in options_of(type(settings)).items():
        value = getattr(settings, name)
        if not option.flag or name in skip or value == option.default:
            continue
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no_{name}"))
        elif isinstance(value, tuple):
            flags += [part for item in value for part in (flag_of(name), str(item))]
        else:
            flags += [flag_of(name), str(value)]
    return tuple(flags)
