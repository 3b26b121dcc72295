"""``tandem target``, ``tandem draft`` and ``tandem gateway``: one service each, with that service's own flags."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Final

from specdec.flags import hyphenate
from tandem.launcher.environment import tune_environment

#: Subcommands that run one service each, with that service's own flags.
SERVICES: Final[Mapping[str, tuple[str, str]]] = {
    "target": ("target_service.main", "run one target service: it verifies proposals and owns the text"),
    "draft": ("draft_service.main", "run one draft service: it proposes tokens"),
    "gateway": ("gateway.main", "run one gateway: it serves clients from targets and drafts"),
}
#: Their flags that take a checkpoint.
_CHECKPOINT_FLAGS: Final = ("--model", "--target-model", "--tokenizer")


def run_service(name: str, argv: Sequence[str]) -> int:
    """Run one service with its flags until it is told to stop; returns the exit status."""
    tune_environment()
    service = importlib.import_module(SERVICES[name][0])
    status: int = service.main(_with_folders(hyphenate(argv)), prog=f"tandem {name}")
    return status


def _with_folders(argv: Sequence[str]) -> list[str]:
    """The same flags with the folder in place of each checkpoint's name: services know folders only."""
    from tandem.checkpoints import find_checkpoint  # noqa: PLC0415 (`tandem --help` needs none)

    result: list[str] = []
    for arg in argv:
        flag, equals, value = arg.partition("=")
        if equals and flag in _CHECKPOINT_FLAGS:
            result.append(f"{flag}={find_checkpoint(value)}")
        elif result and result[-1] in _CHECKPOINT_FLAGS:
            result.append(find_checkpoint(arg))
        else:
            result.append(arg)
    return result
