"""Write the lists of options in ``docs/``: ``python -m tandem.cli.reference``.

A list stands between the lines ``<!-- options: NAME -->`` and ``<!-- end of options -->``. NAME is a command, whose
list comes from its parser, or one of :data:`LISTS`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Final, get_args

from gateway.decoding.metrics import METRICS
from gateway.decoding.plain_reason import PlainReason
from gateway.generation import Generation
from gateway.placement.routing import Router
from gateway.rest.body import IGNORED, Body, Refused, kinds_of
from gateway.rest.messages.schemas import MessagesBody
from gateway.rest.responses.schemas import ResponseBody
from gateway.rest.schemas import ChatBody, CompletionBody
from specdec.flags import Parser, default_text, flag_of
from specdec.params import MAX_INT32, Parameter, parameters
from specdec.settings import SpeculativeSettings
from specdec.settings.option import groups_of, options_of
from tandem.cli.main import COMMANDS
from tandem.cli.services import SERVICES
from tandem.speculative_config import OLDER_NAMES
from tandem_integrations.settings import RemoteDraftSettings

#: The flags of these groups are only named: ``--help`` tells their meaning and default, other pages what they are for.
_NAMED: Final = ("limits of a request", "connections", "limits of a client", "log", "access")
_MARKED: Final = re.compile(r"(<!-- options: (\S+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def fill(page: str) -> str:
    """A page with each of its lists made again."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{list_of(found[2])}\n{found[3]}", page)


def list_of(name: str) -> str:
    """The list of a command, or one of the others that the module names, in Markdown."""
    if name in LISTS:
        return LISTS[name]()
    return _command_list(name)


def _command_list(name: str) -> str:
    """The flags of a command, but those that ``serve`` or ``speculative_config`` has as well, with the same meaning."""
    known = set() if name == "serve" else {(flag.dest, flag.help) for _, flag in _flags("serve")}
    known |= {(key, each.text) for key, each in options_of(SpeculativeSettings).items()}
    parts = []
    for title, flags in groupby(_flags(name), lambda pair: pair[0]):
        new = [flag for _, flag in flags if (flag.dest, flag.help) not in known]
        if new and title in _NAMED:
            parts.append(f"**{title}**: {', '.join(_code(each.option_strings) for each in new)}\n")
        elif new:
            options = _list(
                (_code(each.option_strings) + _default(each), (each.help or "") + _choices(each.choices or ()))
                for each in new
            )
            parts.append(f"**{title}**\n\n{options}")
    return "\n".join(parts)


def _flags(name: str) -> Iterator[tuple[str, argparse.Action]]:
    """The flags of a command after the title of their group, without the older ones, which stand beside the keys of
    ``speculative_config``.
    """
    parser = Parser(add_help=False)
    importlib.import_module({**COMMANDS, **SERVICES}[name][0]).add_arguments(parser)
    older = OLDER_NAMES.keys() if name in COMMANDS else ()
    for group in parser._action_groups:
        for each in group._group_actions:
            if each.option_strings and each.help != argparse.SUPPRESS and each.dest not in older:
                yield group.title or "", each


def _config_list() -> str:
    options = options_of(SpeculativeSettings)
    return _list(
        (
            _code([name, *(flag_of(flag) for flag, key in OLDER_NAMES.items() if key == name)])
            + _in_brackets(options[name].default),
            options[name].text + _choices(options[name].choices),
        )
        for name in chain.from_iterable(groups_of(SpeculativeSettings).values())
    )


def _remote_draft_list() -> str:
    options = options_of(RemoteDraftSettings).items()
    return _list((_code([name]) + _in_brackets(each.default), each.text) for name, each in options)


def _arguments() -> str:
    from tandem.llm import OPTIONS  # noqa: PLC0415 (torch)

    return _code(name for name in OPTIONS if name not in ("tokenizer", "verification")) + ".\n"


def _metrics() -> Mapping[str, Sequence[str]]:
    """The metrics by their meaning: Tandem's name, and vLLM's."""
    metrics = Generation(Router()).metrics
    metrics.follow_key_file(lambda: True)
    names: dict[str, list[str]] = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: Sequence[str] = metrics.labels.get(family.name, getattr(family, "_labelnames", ()))
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        names.setdefault(family.documentation, []).append(shown)
    return {meaning: sorted(same) for meaning, same in names.items()}


def _metrics_list() -> str:
    """The metrics but those of speculation, which stand beside the fields that they sum."""
    in_answers = {metric.text for metric in METRICS.values()}
    return _list(sorted((_code(same), meaning) for meaning, same in _metrics().items() if meaning not in in_answers))


def _sampling_list() -> str:
    """The sampling parameters that both generation endpoints take."""
    return _list(
        (_code([row.name]) + _in_brackets(_json(row.default)), f"{row.help}; {limits}" if limits else row.help)
        for row, limits in ((row, _range(row)) for row in parameters() if row.in_rest)
    )


def _range(row: Parameter) -> str:
    """The limits of a number that are not those of its type."""
    above = "above " if row.is_low_open else ""
    low = f"{above}{row.low:g}" if row.low > -MAX_INT32 else ""
    return f"{low} to {row.high:g}" if row.high < MAX_INT32 else f"from {low}" if low else ""


def _json(default: object) -> str | None:
    """A default as JSON writes it; nothing for None and for what is empty."""
    return None if default in (None, (), {}) else str(default).lower()


def _unsupported_list() -> str:
    """The fields of REST bodies that are ignored or refused; those of the same endpoints share a line."""
    bodies: dict[str, type[Body]] = {
        "completions": CompletionBody, "chat": ChatBody, "responses": ResponseBody, "messages": MessagesBody,
    }  # fmt: skip
    endpoints: dict[tuple[str, str], list[str]] = {}
    for name, body in bodies.items():
        for field, fate in _unsupported(body):
            endpoints.setdefault((field, fate), []).append(name)
    fields: dict[str, list[str]] = {}
    for (field, fate), names in sorted(endpoints.items()):
        kind, _, value = fate.partition(" unless ")
        shown = f"`{field}` unless {value}" if value else f"`{field}`"
        fields.setdefault(f"{kind} by {', '.join(names)}", []).append(shown)
    return _list((where, ", ".join(same)) for where, same in sorted(fields.items()))


def _unsupported(body: type[Body]) -> Iterator[tuple[str, str]]:
    """The fields of a body and of the objects in it that have no effect, and what becomes of them."""
    for name, kind in kinds_of(body).items():
        where = f"{body.path}.{name}" if body.path else name
        if isinstance(kind, Refused):
            yield where, "refused" + (f" unless {_code(map(str, kind.allowed))}" if kind.allowed else "")
        elif kind is IGNORED and not where.startswith(("messages.", "tools.")):
            yield where, "ignored"
        else:
            for inner in _bodies_in(body.model_fields[name].annotation):
                yield from _unsupported(inner)


def _bodies_in(annotation: object) -> Iterator[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for part in get_args(annotation):
        yield from _bodies_in(part)


def _speculation_list() -> str:
    """What answers report of speculation, and the metrics that sum it."""
    counters = _metrics()
    return _list(
        (_code([name]), metric.text + (f"; {_code(counters[metric.text])}" if metric.counter else ""))
        for name, metric in METRICS.items()
    )


def _reasons_list() -> str:
    """The values of ``no_speculation_reason``."""
    return _list((_code([reason]), reason.text) for reason in PlainReason)


def _benchmarks_list() -> str:
    """The programs in ``benchmarks/``, and the first line of each."""
    rows = []
    for path in sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py")):
        if "__main__" in (text := path.read_text()):
            line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            what = re.sub(r"(: )?``python -m [^`]*``(: )?", "", line).replace("``", "`").rstrip(".:")
            rows.append((f"`{path.stem}`", what))
    return _list(rows)


LISTS: Final[Mapping[str, Callable[[], str]]] = {
    "speculative_config": _config_list,
    "remote_draft": _remote_draft_list,
    "LLM": _arguments,
    "metrics": _metrics_list,
    "sampling": _sampling_list,
    "unsupported_fields": _unsupported_list,
    "speculation_metrics": _speculation_list,
    "no_speculation_reason": _reasons_list,
    "benchmarks": _benchmarks_list,
}


def _choices(choices: Iterable[object]) -> str:
    listed = _code(map(str, choices))
    return f" ({listed})" if listed else ""


def _default(action: argparse.Action) -> str:
    return " (required)" if action.required else _in_brackets(action.default)


def _in_brackets(default: object) -> str:
    shown = default_text(default)
    return f" (`{shown}`)" if shown else ""


def _code(texts: Iterable[str | None]) -> str:
    return ", ".join(f"`{text}`" for text in texts if text)


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- {name}: {text}\n" for name, text in items)


def main() -> int:
    """Make the lists of every page in ``docs/``; names the pages that changed."""
    for path in sorted(Path("docs").glob("*.md")):
        page = path.read_text()
        if (filled := fill(page)) != page:
            path.write_text(filled)
            print(f"{path} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
