"""The documentation is true of the repository: links, anchors, paths, tests, commands and code blocks."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gateway.rest.responses.schemas import ResponseBody
from gateway.rest.schemas import ChatBody, CompletionBody
from specdec.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
    status_of,
)
from specdec.flags import Parser, hyphenate
from tandem.cli.main import COMMANDS
from tandem.cli.services import SERVICES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tandem").rglob("*.md"),
    )
)
SERVICE_FOLDERS = ("gateway", "draft_service", "target_service")
#: A path in backticks is looked up below these, so that a page about one folder may name its files shortly.
BASES = {
    "docs/verification.md": ("", "tests"),
    "docs/observability.md": ("", "deploy/observability"),
    "docs/architecture.md": ("", "specdec", "engine", "engine/heads", "tandem", *SERVICE_FOLDERS),
    "tandem/training/README.md": ("", "tandem/training"),
}
#: Names of files that belong to users or are made by commands.
FOREIGN = {"mine.jsonl", "out.json", "points.json", "out.png", "chats.jsonl", "config.json", "tokenizer.json"}
FOREIGN |= {"vocab.json", "merges.txt", "utils.py"}
SUFFIXES = r"\.(?:py|md|cpp|h|proto|toml|json|txt|yml|yaml)"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text()


def prose(page: str) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", read(page))


def anchors(page: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: str, language: str) -> Iterator[str]:
    yield from (body for name, body in FENCE.findall(read(page)) if name == language)


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/peers.md", "clients/typescript/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.resolve().relative_to(ROOT).as_posix())):
            broken.append(link)
    assert not broken


def test_every_page_is_linked() -> None:
    linked = {
        ((ROOT / page).parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(prose(page))
        if not link.startswith("http")
    }
    pages = {ROOT / page for page in PAGES if page.startswith("docs/")}
    assert not pages - linked


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    missing = []
    for text in re.findall(r"`([^`\n]+)`", prose(page)):
        looks_like_a_path = re.fullmatch(rf"[\w./-]+({SUFFIXES}|/)", text)
        if not looks_like_a_path or "NAME" in text or text.startswith(("/", "~", "build/")) or text in FOREIGN:
            continue
        if not any((ROOT / base / text).exists() for base in BASES.get(page, ("",))):
            missing.append(text)
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    for path, name in re.findall(r"`?(tests/[\w/]+\.py)::(\w+)", read(page)):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
    known = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for name in re.findall(r"`(test_\w+)`", prose(page)):
        assert any(f"def {name}(" in text for text in known.values()), name


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile(page: str) -> None:
    for body in blocks(page, "python"):
        compile(body, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_are_run_exist(page: str) -> None:
    for module in re.findall(r"python -m ([\w.]+)", read(page)):
        if module in ("pytest", "grpc_tools.protoc") or module.endswith(".X"):
            continue
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def command_lines(page: str) -> Iterator[list[str]]:
    """The arguments of every ``tandem …`` line in code blocks, continuation lines joined, and of those in the text."""
    for line in re.findall(r"`tandem ([^`]* --[^`]*)`", prose(page)):
        if "--help" not in line:
            yield shlex.split(line)
    for body in blocks(page, ""):
        for line in body.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:.*\| )?tandem (.+)", line):
                words = shlex.split(match[1].partition(" >> ")[0], comments=True)
                # Overviews have three columns: command, placeholder, description.
                if not re.search(r"\S {3,}[a-z]", match[1]):
                    yield words


@cache
def parser_of(command: str) -> ArgumentParser:
    parser = Parser(prog=f"tandem {command}")
    module = importlib.import_module({**COMMANDS, **SERVICES}[command][0])
    module.add_arguments(parser)
    return parser


def check(words: list[str]) -> None:
    """Exit unless argparse accepts the command line."""
    command, *rest = words
    parser_of(command).parse_args(hyphenate(rest))


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_are_accepted(page: str) -> None:
    for words in command_lines(page):
        check(words)


def test_a_wrong_flag_in_a_page_is_noticed() -> None:
    with pytest.raises(SystemExit):
        check(["serve", "--nosuchflag", "1"])


def test_command_lines_are_found() -> None:
    assert ["train", "eagle3"] in [words[:2] for words in command_lines("docs/training.md")]
    assert sum(1 for page in PAGES for _ in command_lines(page)) > 30


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, ResponseBody])
def test_the_api_page_lists_the_fields(body: type[CompletionBody] | type[ChatBody] | type[ResponseBody]) -> None:
    page = read("docs/api.md")
    assert not {name for name in body.model_fields if f"`{name}" not in page}


def test_the_api_page_lists_the_errors() -> None:
    rows = set(re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)`", read("docs/api.md"), re.MULTILINE))
    shown = (InvalidRequest, Unauthenticated, NotFound, Overloaded, InternalError, Unavailable, DeadlineExceeded)
    statuses = [status_of(error("")) for error in shown]
    assert rows == {(str(status.http), status.grpc, status.openai_type) for status in statuses}
