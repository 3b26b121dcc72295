"""Write the tables of options in ``docs/``: ``python -m tandem.cli.reference``.

A table stands between the lines ``<!-- options: NAME -->`` and ``<!-- end of options -->``. NAME is a command,
``speculative_config``, ``LLM``, ``remote_draft`` or ``metrics``. Commands' tables come from their parsers, that of the
metrics from a gateway's registry, the others from the settings' classes.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gateway.generation import Generation
from gateway.routing import Router
from specdec.flags import Parser, default_text, flag_of
from specdec.settings import SpeculativeSettings
from specdec.settings.option import options_of
from tandem.cli.main import COMMANDS
from tandem.cli.services import SERVICES
from tandem.speculative_config import OLDER_NAMES
from tandem_integrations.settings import RemoteDraftSettings

_MARKED: Final = re.compile(r"(<!-- options: (\S+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def fill(page: str) -> str:
    """A page with each of its tables made again."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{table_of(found[2])}\n{found[3]}", page)


def table_of(name: str) -> str:
    """The table of a command, or of one of the others that the module names, in Markdown."""
    if name == "speculative_config":
        return _config_table()
    if name == "remote_draft":
        return _remote_draft_table()
    if name == "LLM":
        return _arguments()
    if name == "metrics":
        return _metrics_table()
    return _command_table(name)


def _command_table(name: str) -> str:
    """The flags of a command, but those that ``serve`` has as well, with the same meaning."""
    known = (
        set() if name == "serve" else {(flag, each.help) for each in _flags("serve") for flag in each.option_strings}
    )
    rows = [
        (_code(each.option_strings), (each.help or "") + _choices(each.choices or ()), _default(each))
        for each in _flags(name)
        if known.isdisjoint((flag, each.help) for flag in each.option_strings)
    ]
    return _table(("flag", "meaning", "default"), rows)


def _flags(name: str) -> list[argparse.Action]:
    """The flags of a command without the older ones, which stand beside the keys of ``speculative_config``."""
    parser = Parser(add_help=False)
    importlib.import_module({**COMMANDS, **SERVICES}[name][0]).add_arguments(parser)
    older = OLDER_NAMES.keys() if name in COMMANDS else ()
    return [
        each
        for each in parser._actions
        if each.option_strings and each.help != argparse.SUPPRESS and each.dest not in older
    ]


def _config_table() -> str:
    older = {key: flag_of(name) for name, key in OLDER_NAMES.items()}
    rows = [
        (
            _code([name]),
            each.text + _choices(each.choices),
            _code([default_text(each.default)]),
            _code([older.get(name)]),
        )
        for name, each in options_of(SpeculativeSettings).items()
    ]
    return _table(("key", "meaning", "default", "older flag"), rows)


def _remote_draft_table() -> str:
    options = options_of(RemoteDraftSettings).items()
    rows = [(_code([name]), each.text, _code([default_text(each.default)])) for name, each in options]
    return _table(("option", "meaning", "default"), rows)


def _arguments() -> str:
    from tandem.llm import OPTIONS  # noqa: PLC0415 (torch)

    return _code(name for name in OPTIONS if name not in ("tokenizer", "verification")) + ".\n"


def _metrics_table() -> str:
    metrics = Generation(Router()).metrics
    rows = []
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: Sequence[str] = metrics.labels.get(family.name, getattr(family, "_labelnames", ()))
        rows.append((_code([f"{name}{{{','.join(labels)}}}" if labels else name]), family.type, family.documentation))
    return _table(("metric", "type", "meaning"), sorted(rows))


def _choices(choices: Iterable[object]) -> str:
    listed = _code(map(str, choices))
    return f" ({listed})" if listed else ""


def _default(action: argparse.Action) -> str:
    return "required" if action.required else _code([default_text(action.default)])


def _code(texts: Iterable[str | None]) -> str:
    return ", ".join(f"`{text}`" for text in texts if text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def main() -> int:
    """Make the tables of every page in ``docs/``; names the pages that changed."""
    for path in sorted(Path("docs").glob("*.md")):
        page = path.read_text()
        if (filled := fill(page)) != page:
            path.write_text(filled)
            print(f"{path} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
