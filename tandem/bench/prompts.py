"""Prompts: pieces of Python's own library that the bundled models never saw, or the user's own.

The files are among those ``tandem/training/held_out.txt`` sets apart. A piece starts where a definition starts. No
piece is used twice, for a cache of earlier texts would make drafting look better than it is.
"""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from specdec.errors import InvalidRequest

HELD_OUT: Final = (
    "asyncio/subprocess.py",
    "bz2.py",
    "calendar.py",
    "concurrent/futures/process.py",
    "copyreg.py",
    "dbm/__init__.py",
    "email/_encoded_words.py",
    "email/contentmanager.py",
    "html/parser.py",
    "json/encoder.py",
    "multiprocessing/connection.py",
    "multiprocessing/popen_spawn_posix.py",
    "multiprocessing/shared_memory.py",
    "multiprocessing/sharedctypes.py",
    "multiprocessing/util.py",
    "opcode.py",
    "sched.py",
    "secrets.py",
    "timeit.py",
    "token.py",
    "trace.py",
    "traceback.py",
    "unittest/signals.py",
    "venv/__init__.py",
    "xml/sax/xmlreader.py",
    "zoneinfo/_zoneinfo.py",
)
_DEFINITION: Final = re.compile(r"^[ \t]*(?:async def|def|class) ", re.MULTILINE)
#: Characters per token of source code, at most; pieces are cut to the exact number of tokens afterwards.
_CHARACTERS_PER_TOKEN: Final = 16


def pick_prompts(
    encode: Callable[[str], Sequence[int]], count: int, num_tokens: int, *, seed: int = 0
) -> list[tuple[int, ...]]:
    """``count`` different prompts of exactly ``num_tokens`` token ids.

    Raises :class:`InvalidRequest` when the held-out files do not yield so many.
    """
    prompts: list[tuple[int, ...]] = []
    used: set[tuple[int, ...]] = set()
    for piece in _pieces(num_tokens * _CHARACTERS_PER_TOKEN, seed):
        prompt = tuple(encode(piece)[:num_tokens])
        if len(prompt) == num_tokens and prompt not in used:
            used.add(prompt)
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    raise InvalidRequest(
        f"{count} prompts of {num_tokens} tokens are wanted but the held-out files yield {len(prompts)}; ask for fewer"
        " or shorter ones",
        param="num_prompts",
    )


def read_prompts(file: str) -> list[str]:
    """A prompt per line: text, or JSON objects with ``"prompt"`` where the first line is one. Blank lines are skipped.

    Raises :class:`InvalidRequest` naming the line.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="prompts") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InvalidRequest(f"{file} holds no prompt", param="prompts")
    if not numbered[0][1].lstrip().startswith("{"):
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequest(f'{file}, line {number}: no JSON object with a text "prompt"', param="prompts")
        prompts.append(prompt)
    return prompts


def pick_texts(count: int, num_characters: int) -> list[str]:
    """``count`` different prompts of ``num_characters`` characters, for servers whose tokens are not known."""
    found = pick_prompts(lambda text: [ord(letter) for letter in text], count, num_characters)
    return ["".join(map(chr, prompt)) for prompt in found]


def _pieces(num_characters: int, seed: int) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    pieces: list[str] = []
    for name in HELD_OUT:
        path = root / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        pieces += [text[match.start() :][:num_characters] for match in _DEFINITION.finditer(text)]
    random.Random(seed).shuffle(pieces)
    return pieces
