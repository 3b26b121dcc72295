"""``tandem chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys

from tandem.cli.generate import Messages, add_answer_flags, open_model, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem chat``."""
    add_answer_flags(parser)
    parser.add_argument("--system", help="instruction that stands before the conversation")
    parser.add_argument("--message", help="answer this one message and leave")


def run(args: argparse.Namespace) -> int:
    """Ask for messages and stream answers, until end of input; ``/new`` forgets the conversation."""
    start: Messages = [{"role": "system", "content": args.system}] if args.system else []
    with open_model(args) as model:
        messages = list(start)
        while (text := args.message or _read_message()) is not None:
            if text.strip() == "/new":
                messages = list(start)
                continue
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            answer = show(model.answer(messages), quiet=args.quiet)
            messages.append({"role": "assistant", "content": answer})
            if args.message:
                break
    return 0


def _read_message() -> str | None:
    """One line from the terminal (or a pipe); None at the end of input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    try:
        return input("you> ")
    except EOFError:
        print()
        return None
