"""An option is a field of a settings class, declared in one line with its default, help and range.

Command lines, error messages and the lists in ``docs/`` are made from these lines. pydantic would do the checks, but
its import takes three times as long as that of all settings, and every command pays for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_type_hints

from specdec.errors import InvalidRequest

#: What a value of JSON or of a caller may be, by the type of the field, and what an error calls it.
_KINDS: Final[Mapping[type, tuple[type, str]]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    NoneType: (NoneType, "nothing"),
}
_options: Final[dict[type, Mapping[str, Option]]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a settings class: what it means and which values it takes."""

    help: str
    #: Bounds of a number: at least, above, at most.
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    #: The texts it takes; empty: any.
    choices: tuple[str, ...] = ()
    #: The methods that have the option; empty: all.
    only: tuple[str, ...] = ()
    #: Whether command lines have a flag for it. Fields that several classes share get theirs by hand.
    flag: bool = True
    #: The environment variables that command lines read where the flag is not given, separated by spaces: the first
    #: that is set counts. Several values in one are separated by commas.
    env: str = ""
    # The rest is known once the class is made.
    name: str = ""
    required: bool = False
    default: Any = None
    kinds: tuple[Any, ...] = ()

    def read(self, value: Any) -> Any:
        """The value as the settings keep it: an enumeration's member in place of its name.

        Raises:
            InvalidRequest: the type, the range or the choice is wrong; the message names value and limit.
        """
        enum = self.enum
        if enum is not None and isinstance(value, str):
            choices = tuple(str(member) for member in enum)
            self._require(value in choices, value, f"choose one of {', '.join(choices)}")
            return enum(value)
        if all(kind in _KINDS for kind in self.kinds):
            allowed = (bool,) if isinstance(value, bool) else self.kinds  # True counts as a whole number in Python
            fits = any(kind in self.kinds and isinstance(value, _KINDS[kind][0]) for kind in allowed)
            self._require(fits, value, f"it must be {' or '.join(_KINDS[kind][1] for kind in self.kinds)}")
        if value is not None and self.choices:
            none = ", or none" if NoneType in self.kinds else ""
            chosen = set(value if isinstance(value, tuple) else (value,))
            self._require(chosen <= {*self.choices}, value, f"choose one of {', '.join(self.choices)}{none}")
        if value is not None and (self.ge, self.gt, self.le) != (None, None, None):
            self._require(self._in_range(value), value, f"it must be {self._bounds()}")
        return value

    @property
    def enum(self) -> type[Enum] | None:
        """The enumeration whose members are the values."""
        return next((kind for kind in self.kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)

    @property
    def text(self) -> str:
        """The help text, led by the methods that have the option."""
        text = f"{', '.join(self.only)}: {self.help}" if self.only else self.help
        return f"{text} (or {' or '.join(self.env.split())})" if self.env else text

    def _in_range(self, value: Any) -> bool:
        """False for NaN, too."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

    def _bounds(self) -> str:
        low = f"above {self.gt}" if self.ge is None else f"at least {self.ge}"
        if self.le is None:
            return low
        return f"{low} and at most {self.le}" if self.ge is None else f"in [{self.ge}, {self.le}]"

    def _require(self, condition: bool, value: Any, remedy: str) -> None:
        require(condition, self.name, f"{self.name} is {value!r}; {remedy}")


def option(default: Any, help: str, **limits: Any) -> Any:
    """A field with this default; ``limits`` are the other fields of :class:`Option`."""
    return field(default=default, metadata=about(help, **limits))


def about(help: str, **limits: Any) -> dict[str, Option]:
    """The metadata of a field without a default."""
    return {"option": Option(help=help, **limits)}


def options_of(settings: type) -> Mapping[str, Option]:
    """The options of a settings class by name, in the order of the class."""
    if settings not in _options:
        hints = get_type_hints(settings)
        _options[settings] = {
            each.name: replace(
                each.metadata["option"],
                name=each.name,
                required=each.default is MISSING,
                default=None if each.default is MISSING else each.default,
                kinds=_kinds_of(hints[each.name]),
            )
            for each in fields(settings)
            if "option" in each.metadata
        }
    return _options[settings]


def groups_of(settings: type) -> Mapping[str, Sequence[str]]:
    """The options of a settings class under the titles of help texts, those of a class before those of its bases.

    A class names its groups in ``GROUPS``: title → its first option. A group ends where the next one begins.

    Raises:
        ValueError: a group begins with what is no option, or an option comes before the first group.
    """
    titles = [each for base in settings.__mro__ for each in vars(base).get("GROUPS", {}).items()]
    title_at = {first: title for title, first in titles}
    if unknown := title_at.keys() - options_of(settings).keys():
        raise ValueError(f"GROUPS of {settings.__name__} names {', '.join(sorted(unknown))}: no option of it")
    groups: dict[str, list[str]] = {title: [] for title, _ in titles}
    title = None
    for name in options_of(settings):
        title = title_at.get(name, title)
        if title is None:
            raise ValueError(f"{name} comes before the first of the GROUPS of {settings.__name__}")
        groups[title].append(name)
    return groups


def check_options(settings: Any) -> None:
    """Check every option of a settings object as it is made, and turn names into members of enumerations."""
    for name, each in options_of(type(settings)).items():
        value = getattr(settings, name)
        read = each.read(value)
        if read is not value:
            object.__setattr__(settings, name, read)


def require(condition: bool, param: str, message: str) -> None:
    """Raise :class:`InvalidRequest` for the option ``param`` where ``condition`` does not hold."""
    if not condition:
        raise InvalidRequest(message, param=param)


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """``int | None`` → (int, NoneType)."""
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)
