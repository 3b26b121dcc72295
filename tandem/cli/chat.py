"""``tandem chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Final

from specdec.errors import TandemError, text_of
from specdec.flags import Parser
from tandem.cli.answer import PrintedAnswer, show
from tandem.cli.generate import LocalModel, Messages, RemoteModel, add_answer_flags, open_model
from tandem.cli.line_editor import edited_lines

HELP: Final = """\
/reset         forget the conversation
/system TEXT   set the instruction; without TEXT print it
/stats         print the speed of the last answer and of all
/quit          leave, as Ctrl-D does
Ctrl-C         stop the answer"""


def add_arguments(parser: Parser) -> None:
    """The flags of ``tandem chat``."""
    add_answer_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="instruction that stands before the conversation")
    parser.add_argument("--message", metavar="TEXT", help="answer this one message and leave")


def run(args: argparse.Namespace) -> int:
    """Ask for messages and stream answers, until ``/quit`` or the end of input."""
    is_interactive = args.message is None and sys.stdin.isatty()
    with open_model(args) as model:
        chat = TerminalChat(model, args.system, is_interactive=is_interactive, quiet=args.quiet)
        if args.message is not None:
            chat.ask(args.message)
            return 0
        if is_interactive:
            print("/help lists the commands", file=sys.stderr)
        for line in edited_lines("you> ") if is_interactive else _piped_lines():
            if not chat.take(line):
                break
    return 0


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


class TerminalChat:
    """A chat in a terminal or a pipe. Only a terminal outlives errors and interrupted answers."""

    def __init__(
        self, model: RemoteModel | LocalModel, system: str | None, *, is_interactive: bool, quiet: bool
    ) -> None:
        self._model = model
        self._system = system or ""
        self._is_interactive = is_interactive
        self._quiet = quiet
        self._messages: Messages = []
        self._answers: list[PrintedAnswer] = []
        self._commands = {"/help": self.help, "/reset": self.reset, "/system": self.system, "/stats": self.stats}

    def take(self, line: str) -> bool:
        """Obey a command or answer a message; False where the chat is over."""
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            if name == "/quit":
                return False
            if name in self._commands:
                self._commands[name](rest.strip())
            else:
                _say(f"{name} is no command; /help lists them. A message may begin with a space and a slash.")
        elif line.strip():
            self.ask(line)
        return True

    def ask(self, text: str) -> None:
        """Stream the answer to a message. One that was interrupted stays in the conversation as far as it got."""
        self._messages.append({"role": "user", "content": text})
        system: Messages = [{"role": "system", "content": self._system}] if self._system else []
        answer = PrintedAnswer()
        try:
            show(self._model.answer([*system, *self._messages]), answer, quiet=self._quiet)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            _say("\n(stopped)")
        except TandemError as error:
            if not self._is_interactive:
                raise
            _say(f"\nerror: {text_of(error)}")
        if answer.text:
            self._messages.append({"role": "assistant", "content": answer.text})
            self._answers.append(answer)
        else:
            self._messages.pop()

    def help(self, _: str) -> None:
        """Print the commands."""
        _say(HELP)

    def reset(self, _: str) -> None:
        """Forget the conversation; the instruction stays."""
        self._messages.clear()
        _say("(a new conversation)")

    def system(self, text: str) -> None:
        """Set the instruction, or print it."""
        if text:
            self._system = text
        _say(f"(instruction: {self._system})" if self._system else "(no instruction)")

    def stats(self, _: str) -> None:
        """Print the speed of the last answer and of all."""
        if not self._answers:
            _say("(no answers yet)")
            return
        _say(f"last answer: {self._answers[-1].describe()}")
        if complete := [answer for answer in self._answers if answer.last is not None]:
            tokens, took_s = sum(answer.num_tokens for answer in complete), sum(answer.took_s for answer in complete)
            _say(f"{len(complete)} answers: {tokens} tokens in {took_s:.2f} s, {tokens / took_s:.1f} tokens/s")


def _say(text: str) -> None:
    """Something that is no answer goes to standard error."""
    print(text, file=sys.stderr)
