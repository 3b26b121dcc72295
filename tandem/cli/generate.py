"""``tandem generate``: continue a prompt and stream the text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from specdec.errors import InvalidRequest
from specdec.flags import METAVARS, Parser
from specdec.params import Parameter, SamplingParams, parameters
from specdec.process.imports import large_imports
from tandem.cli.answer import AnswerPart, PrintedAnswer, show
from tandem.cli.flags import add_deployment_flags, add_key_flag, client_key
from tandem.launcher.deployment import deployment_of
from tandem.launcher.environment import tune_environment
from tandem.rest_client import RestClient

Messages = list[dict[str, str]]

#: The sampling parameters that are flags; ``--seed`` is the gateway's.
_FLAGS: Final = tuple(row for row in parameters() if row.has_flag)
#: Their defaults where they are not those of :class:`SamplingParams`.
_DEFAULTS: Final[Mapping[str, Any]] = {"max_tokens": 256, "temperature": 0.0}


def add_arguments(parser: Parser) -> None:
    """The flags of ``tandem generate``."""
    parser.add_argument("prompt", metavar="PROMPT", help='the text to continue; "-" reads standard input')
    add_answer_flags(parser)


def add_answer_flags(parser: Parser) -> None:
    """Where the model is and how to sample from it."""
    parser.add_argument("--url", metavar="URL", help="a running server; without it the model runs in this process")
    add_key_flag(parser)
    parser.add_argument("--model", help="folder or hub name of the target, or a name the server answers to")
    parser.add_argument("--quiet", action="store_true", help="print no speed at the end")
    group = parser.group("sampling")
    for row in _FLAGS:
        _add_flag(group, row)
    add_deployment_flags(parser)


def _add_flag(group: argparse._ArgumentGroup, row: Parameter) -> None:
    """The flag of a sampling parameter."""
    flag, default = "--" + row.name.replace("_", "-"), _DEFAULTS.get(row.name, row.default)
    if isinstance(default, Sequence):
        group.add_argument(flag, action="append", default=[*default], metavar="TEXT", help=row.help)
    else:
        kind = float if row.type is float else int
        group.add_argument(flag, type=kind, default=default, metavar=METAVARS[kind], help=row.help)


def run(args: argparse.Namespace) -> int:
    """Stream the text to standard output and the speed to standard error."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with open_model(args) as model:
        show(model.complete(prompt), PrintedAnswer(), quiet=args.quiet)
    return 0


class RemoteModel:
    """A model behind a URL."""

    def __init__(self, server: RestClient, model: str, params: SamplingParams) -> None:
        self._server = server
        self._body = {
            "model": model,
            "stream_options": {"include_usage": True},
            **{row.name: getattr(params, row.name) for row in params.in_use()},
        }

    def complete(self, prompt: str) -> Generator[AnswerPart, None, None]:
        """Continue a text."""
        for event in self._server.stream("/v1/completions", {**self._body, "prompt": prompt}):
            yield _piece(event, lambda choice: choice["text"])

    def answer(self, messages: Messages) -> Generator[AnswerPart, None, None]:
        """Answer a conversation."""
        for event in self._server.stream("/v1/chat/completions", {**self._body, "messages": messages}):
            yield _piece(
                event,
                lambda choice: choice["delta"].get("content"),
                lambda choice: choice["delta"].get("reasoning_content") or choice["delta"].get("reasoning"),
            )


def _piece(event: Mapping[str, Any], text_of: Any, thought_of: Any = lambda _: "") -> AnswerPart:
    choices = event.get("choices", ())
    text, thought = ("".join(str(of(choice) or "") for choice in choices) for of in (text_of, thought_of))
    usage = event.get("usage")
    if not usage:
        return AnswerPart(text, thought=thought)
    speculation = (event.get("metrics") or {}).get("speculative_decoding") or {}
    return AnswerPart(
        text,
        int(usage["completion_tokens"]),
        float(speculation.get("mean_acceptance_length", 0.0)),
        float(speculation.get("draft_acceptance_rate", 0.0)),
        str(speculation.get("no_speculation_reason", "")),
        thought,
    )


class LocalModel:
    """A model in this process."""

    def __init__(self, llm: Any, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params

    def complete(self, prompt: str) -> Generator[AnswerPart, None, None]:
        """Continue a text."""
        return self._pieces(self._llm.stream(prompt, self._params))

    def answer(self, messages: Messages) -> Generator[AnswerPart, None, None]:
        """Answer a conversation."""
        return self._pieces(self._llm.stream_chat(messages, self._params))

    def _pieces(self, chunks: Iterator[Any]) -> Generator[AnswerPart, None, None]:
        for chunk in chunks:
            thought = "" if chunk.message is None else chunk.message.reasoning
            if chunk.final is None:
                yield AnswerPart(chunk.content, thought=thought)
            else:
                speculation = chunk.final.speculation
                yield AnswerPart(
                    chunk.content,
                    chunk.final.usage.completion_tokens,
                    speculation.mean_acceptance_length,
                    speculation.draft_acceptance_rate,
                    speculation.no_speculation_reason,
                    thought,
                )


@contextmanager
def open_model(args: argparse.Namespace) -> Iterator[RemoteModel | LocalModel]:
    """The model the flags ask for: behind ``--url``, or loaded here."""
    params = SamplingParams(
        seed=args.seed,
        **{row.name: getattr(args, row.name) for row in _FLAGS},
    )
    if args.url:
        if args.speculative_config or args.speculative_model:
            raise InvalidRequest("--url names a running server, which has its own drafter; leave the other flags out")
        server = RestClient(args.url, api_key=client_key(args))
        yield RemoteModel(server, args.model or server.model(), params)
        return
    deployment = deployment_of(args)
    if not args.quiet:
        print(f"loading {deployment.describe()}", file=sys.stderr, flush=True)
    tune_environment()
    with large_imports():
        from tandem.llm import LLM  # noqa: PLC0415 (torch)

    with LLM.of(deployment) as llm:
        yield LocalModel(llm, params)
