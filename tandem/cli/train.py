"""``tandem train``: a drafter for a target, from the target's own text: a draft head or a small model."""

from __future__ import annotations

import argparse
from dataclasses import replace

from specdec.flags import Parser, add_grouped_flags, settings_from
from tandem.checkpoints import TARGET, find_checkpoint
from tandem.launcher.environment import tune_environment
from tandem.training.settings import METHODS, TrainSettings


def add_arguments(parser: Parser) -> None:
    """The method, where to read and write, and every other option of :class:`TrainSettings`."""
    listed = "; ".join(f"{name}: {text}" for name, text in METHODS.items())
    group = parser.group("drafter")
    group.add_argument("method", choices=list(METHODS), metavar="METHOD", help=listed)
    group.add_argument("--target", default=TARGET, metavar="DIR", help="folder or name of the target")
    add_grouped_flags(parser, TrainSettings, skip=("method", "target"))


def run(args: argparse.Namespace) -> int:
    """Train, and print the result."""
    tune_environment()
    from transformers.utils import logging  # noqa: PLC0415 (slow to import)

    from tandem.training.drafter import train_drafter, work_folder  # noqa: PLC0415

    settings = settings_from(TrainSettings, args)
    folder = find_checkpoint(settings.target)
    start = find_checkpoint(settings.start_from) if settings.start_from else None
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        last = train_drafter(replace(settings, target=folder, start_from=start))[-1]
    except KeyboardInterrupt:
        print(f"interrupted; {work_folder(settings)} holds what is done: the same command with --resume continues")
        raise
    k = len(last.acceptance.rates)
    print(f"{settings.output}: held-out loss {last.loss:.3f}, acceptance length {last.acceptance}, k = {k}, greedy")
    return 0
