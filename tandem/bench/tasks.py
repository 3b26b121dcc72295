"""The task suite: prompts of eleven kinds of work, in the spirit of SPEED-Bench's categories.

Small generators with fixed seeds make the prompts, as many as are needed, no two alike. The bundled models know Python
source, so every task is text that a Python file could hold. Sizes in tokens of the bundled tokenizer: 60 to 250, and
about 700 for summaries.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Final

from specdec.errors import InvalidRequest

_NOUNS: Final = (
    "buffer", "channel", "client", "column", "counter", "cursor", "field",
    "filter", "handler", "header", "label", "line", "message", "node", "packet", "path", "pattern",
    "process", "queue", "record", "request", "response", "row", "server", "session", "signal", "socket", "stream",
    "table", "task", "thread", "timer", "token", "worker",
)  # fmt: skip
_VERBS: Final = (
    "check", "clear", "close", "copy", "count", "encode", "find", "format", "load", "merge", "open", "parse", "print",
    "read", "remove", "replace", "reset", "save", "send", "split", "start", "stop", "update", "write",
)  # fmt: skip


def _functions(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Different functions: name, one sentence about it, source."""
    pairs = rng.sample([(verb, noun) for verb in _VERBS for noun in _NOUNS], count)
    made = []
    for verb, noun in pairs:
        other = rng.choice([each for each in _NOUNS if each != noun])
        sentence = f"{verb.capitalize()} the {noun} of the {other}."
        source = (
            f"def {verb}_{noun}({other}, default=None):\n"
            f'    """{sentence}"""\n'
            f"    {noun} = {other}.get_{noun}()\n"
            f"    if {noun} is None:\n"
            f"        return default\n"
            f"    return {noun}.{verb}()\n"
        )
        made.append((f"{verb}_{noun}", sentence, source))
    return made


def _code(rng: random.Random) -> str:
    """A class whose next method is to be written."""
    noun, held, other = rng.sample(_NOUNS, 3)
    verb = rng.choice(_VERBS)
    return (
        f"class {noun.capitalize()}:\n"
        f'    """A {noun} that keeps every {held} it has seen."""\n\n'
        f"    def __init__(self, {held}, {other}=None):\n"
        f"        self._{held} = {held}\n"
        f"        self._{other} = {other}\n\n"
        f"    def get_{held}(self, name):\n"
        f'        """Return the {held} of this name."""\n'
        f"        return self._{held}[name]\n\n"
        f"    def {verb}_{held}(self, name, default=None):\n"
        f'        """{verb.capitalize()} the {held} of this name, or return the default."""\n'
        f"        if"
    )


def _editing(rng: random.Random) -> str:
    """Code, its next version, and the beginning of the one after: each time one name is another."""
    _, _, source = _functions(rng, 1)[0]
    words = sorted(set(re.findall(r"\b[a-z]{4,}\b", source)) & set(_NOUNS))
    shown = [source]
    for old in words[:2]:
        new = rng.choice([noun for noun in _NOUNS if noun not in source])
        source = re.sub(rf"\b{old}\b", new, source)
        shown.append(f"# Edited: {old} is now {new}.\n{source}")
    *_, last = shown
    return "\n".join([*shown[:-1], "".join(last.splitlines(keepends=True)[:3]).rstrip()])


def _extraction(rng: random.Random) -> str:
    """Lines of a log, and the first of the records they hold."""
    lines = [(rng.choice(_VERBS), rng.choice(_NOUNS), rng.randrange(2, 100)) for _ in range(9)]
    text = "".join(f"{verb} {noun} {number}\n" for verb, noun, number in lines)
    records = "".join(f'    ("{verb} {noun} {number}", "{noun}", {number}),\n' for verb, noun, number in lines[:4])
    return f'TEXT = """\n{text}"""\n\nRECORDS = [\n{records}    ("{lines[4][0]}'


def _lists(rng: random.Random) -> str:
    """A table of constants without an end."""
    noun, first = rng.choice(_NOUNS), rng.randrange(1, 50)
    rows = "".join(f'    ("{verb}_{noun}", {first + i}),\n' for i, verb in enumerate(rng.sample(_VERBS, 6)))
    return f'# Every operation on a {noun}, with its number.\n{noun.upper()}_OPERATIONS = [\n{rows}    ("'


def _json(rng: random.Random) -> str:
    """A JSON document of equal objects without an end."""
    noun, *keys = rng.sample(_NOUNS, 3)
    items = [
        {keys[0]: rng.choice(_NOUNS), keys[1]: rng.randrange(100), "enabled": rng.random() < 0.5} for _ in range(5)
    ]
    return f'{noun.upper()} = """[\n' + "".join(f" {json.dumps(item)},\n" for item in items) + f' {{"{keys[0]}'


def _chat(rng: random.Random) -> str:
    """Questions and answers about a library, the last answer to be given."""
    verb, other = rng.sample(_VERBS, 2)
    noun, place = rng.sample(_NOUNS, 2)
    return (
        '"""Questions and answers.\n\n'
        f"User: What does {verb}_{noun}() do?\n"
        f"Assistant: It will {verb} the {noun} and return True if there was one.\n\n"
        f"User: What happens if there is no {noun}?\n"
        f"Assistant: Then it returns False. The {place} is not changed.\n\n"
        f"User: How can I {other} the {noun} of a {place}?\n"
        f"Assistant: Use the"
    )


def _maths(rng: random.Random) -> str:
    """Sums that a test checks, one number growing."""
    value, step = rng.randrange(100, 10_000), rng.randrange(2, 10)
    lines = [f"    self.assertEqual({value + i * step} + {step}, {value + i * step + step})\n" for i in range(6)]
    return "def test_sum(self):\n" + "".join(lines) + f"    self.assertEqual({value + 6 * step} +"


def _translation(rng: random.Random) -> str:
    """Methods in one naming convention that call those in another; the next one's name is given."""
    pairs = rng.sample([(verb, noun) for verb in _VERBS for noun in _NOUNS], 5)
    methods = [
        f"    def {verb}{noun.capitalize()}(self):\n        return self.{verb}_{noun}()\n\n" for verb, noun in pairs
    ]
    verb, noun = pairs[-1]
    return "    # The names of the first version.\n\n" + "".join(methods).removesuffix(f"{verb}_{noun}()\n\n")


def _summaries(rng: random.Random) -> str:
    """A long module, and the beginning of the list of what it defines."""
    functions = _functions(rng, 12)
    module = "\n\n".join(source for _, _, source in functions)
    begun = "".join(f"    {name}() -- {sentence}\n" for name, sentence, _ in functions[:2])
    return f'{module}\n\n"""The functions of this module:\n\n{begun}    {functions[2][0]}() --'


def _agent(rng: random.Random) -> str:
    """What an agent writes that calls the same tools again and again."""
    noun = rng.choice(_NOUNS)
    steps = "".join(
        f'log("step {number}: read {noun}/{verb}.py")\n'
        f'log("step {number}: run tests/test_{verb}.py")\n'
        f'log("step {number}: {rng.randrange(1, 9)} failed, {rng.randrange(10, 99)} passed")\n'
        for number, verb in enumerate(rng.sample(_VERBS, 4), 1)
    )
    return f'{steps}log("step 5: read'


def _writing(rng: random.Random) -> str:
    """The documentation of a module."""
    noun, other, third = rng.sample(_NOUNS, 3)
    verb = rng.choice(_VERBS)
    return (
        f'"""Support for {noun} objects.\n\n'
        f"This module defines a {noun} and the {other} that it belongs to. A program that has to {verb} a {third}\n"
        f"should not do so by itself. It should create a {noun} first, and then use the methods described below.\n\n"
        f"If the {other} is"
    )


#: Prompts made for each one that is asked for, repetitions included, before giving up.
_DRAWS_PER_PROMPT: Final = 10

#: Category → the maker of one prompt.
TASKS: Final[Mapping[str, Callable[[random.Random], str]]] = {
    "code": _code,
    "editing": _editing,
    "extraction": _extraction,
    "lists": _lists,
    "json": _json,
    "chat": _chat,
    "maths": _maths,
    "translation": _translation,
    "summaries": _summaries,
    "agent": _agent,
    "writing": _writing,
}
#: What stands for all of them.
ALL_TASKS: Final = "tasks"


def make_task_prompts(category: str, count: int) -> list[str]:
    """``count`` different prompts of a category of :data:`TASKS`, the same in every run.

    Raises :class:`InvalidRequest` where the category has no more of them.
    """
    rng = random.Random(category)
    prompts: dict[str, None] = {}
    for _ in range(_DRAWS_PER_PROMPT * count):
        prompts[TASKS[category](rng)] = None
        if len(prompts) == count:
            break
    if len(prompts) < count:
        raise InvalidRequest(
            f"{count} prompts of {category} are wanted but only {len(prompts)} different ones were found; ask for"
            " fewer",
            param="num_prompts",
        )
    return list(prompts)
