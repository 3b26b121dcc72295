"""Hostile grammars against the bundled pair: each is answered, and another stream has the text it has alone."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import psutil
import pytest

from tests.e2e.servers import request_of

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


def nested(levels, key="items"):
    schema = {}
    for _ in range(levels):
        schema = {key: schema}
    return schema


def doubling(levels, letter, end):
    """Each rule is the next one twice."""
    rules = [f"{letter}{i}: {letter}{i + 1} {letter}{i + 1}" for i in range(levels)]
    return "\n".join([f"start: {letter}0", *rules, f"{letter}{levels}: {end}"])


def growing(size):
    """Small at first; after a few letters it is too large."""
    return {"regex": "(" + "|".join(f"[a-z]{{{i}}}x" for i in range(1, size)) + ")*"}


#: Those that took longest, and one of each kind of refusal.
FEW = {
    "a step of a large prime": {"json": {"multipleOf": 19999993}},
    "repeats of repeats": {"regex": "((((a{50}){50}){50}){50}){50}"},
    "many letters": {"regex": r"\w{1,100000}"},
    "a constant of 60 KB": {"json": {"const": "x" * 60_000}},
    "references in a circle": {
        "json": {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "a schema of 1 MB": {"json": {"type": "object", "description": "d" * 2**20}},
}
ALL = FEW | {
    "an intersection of repeats": {"grammar": "start: A\nA: " + " & ".join(f"/(a{{{n}}})*/" for n in PRIMES)},
    "a chain of references with patterns": {
        "json": {
            "$ref": "#/$defs/q/anyOf/0",
            "$defs": {
                "q": {"anyOf": [{"pattern": "ab", "$ref": "#/$defs/1"}]},
                **{str(n): {"pattern": f"a.{{{n}}}b", "$ref": f"#/$defs/{n + 1}"} for n in range(1, 26)},
                "26": {},
            },
        }
    },
    "repeats that overlap": {"regex": "(a|b|ab|ba){1,500}(a|aa|aaa)*c"},
    "a far letter": {"regex": "(a|b)*a(a|b){40}"},
    "alternatives of alternatives": growing(400),
    "kinds of letters": {"regex": r"(\p{L}|\p{N}){1,5000}\p{Lu}"},
    "2000 brackets": {"regex": "(" * 2000 + "a" + ")" * 2000},
    "3000 values": {"json": {"enum": [f"value {i * 7919}" for i in range(3000)]}},
    "1000 properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}},
    "24 choices of two": {
        "json": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(24)]}
    },
    "50 levels": {"json": nested(50)},
    "5000 levels, as text": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "a long list of long texts": {
        "json": {"type": "array", "minItems": 100_000, "items": {"type": "string", "minLength": 100_000}}
    },
    "an ambiguous rule": {"grammar": 'start: start start | start start start | "a" | "a" start "a"'},
    "rules that double": {"grammar": doubling(40, "r", '"a"')},
    "terminals that double": {"grammar": doubling(30, "T", '"a"')},
    "3000 rules in a chain": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
    },
    "backslashes in GBNF": {"grammar": "root ::= " + '"\\\\' * 20_000},
    "4000 choices": {"choice": [f"{i:x}" * 4 for i in range(4000)]},
    "400 tags": {
        "structural_tag": {
            "structures": [{"begin": f"<f{i}>", "schema": {"type": "object"}, "end": "</f>"} for i in range(400)],
            "triggers": ["<f"],
        }
    },
}
STREAM = {"max_tokens": 200, "temperature": 1.0, "seed": 5}
#: Generous: the slowest grammar takes a second of CPU time, four at once.
MOST_SECONDS, MOST_STALL_S, MOST_GROWTH_BYTES = 60.0, 5.0, 300 * 2**20


class Listener:
    """Repeats one stream until told to end: its texts, and when their pieces came."""

    def __init__(self, stack, prompt):
        self._stack, self._prompt = stack, prompt
        self._ended = threading.Event()
        self.texts, self.arrivals = [], []

    def listen(self):
        with grpc.insecure_channel(self._stack.grpc_address) as channel:
            while not self._ended.is_set():
                text = ""
                for piece in self._stack.generation(channel).Generate(request_of(self._prompt, **STREAM), timeout=120):
                    text += piece.text
                    self.arrivals.append(time.monotonic())
                self.texts.append(text)

    def end(self):
        self._ended.set()

    @property
    def longest_gap_s(self):
        return max(later - earlier for earlier, later in itertools.pairwise(self.arrivals))


def ask(stack, given):
    """Status, text or reason, and seconds."""
    body = {"model": "", "prompt": "x = ", "max_tokens": 24, "structured_outputs": given}
    begun = time.monotonic()
    answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
    content = answer.json()
    said = content["error"]["message"] if answer.status_code != 200 else content["choices"][0]["text"]
    return answer.status_code, said, time.monotonic() - begun


def attack(stack, prompt, grammars):
    """The answers, what the stream was, and how many bytes the target and what it started have grown."""
    ask(stack, {"choice": ["a"]})  # starts the process that checks grammars
    alone, listener = collect_text(stack, prompt), Listener(stack, prompt)
    before = memory_of(stack.targets[0])
    with ThreadPoolExecutor(3) as pool:
        listening = pool.submit(listener.listen)
        try:
            answers = dict(zip(grammars, pool.map(lambda given: ask(stack, given), grammars.values()), strict=True))
        finally:
            listener.end()
        listening.result()
    return alone, listener, answers, memory_of(stack.targets[0]) - before


def collect_text(stack, prompt):
    with grpc.insecure_channel(stack.grpc_address) as channel:
        return "".join(piece.text for piece in stack.generation(channel).Generate(request_of(prompt, **STREAM)))


def memory_of(server):
    process = psutil.Process(server.pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def check_answers(answers):
    for name, (status, said, _) in answers.items():
        assert status in (200, 400, 413), (name, status, said)
        assert status == 200 or said, name


def test_a_stream_beside_hostile_grammars(stack, prompts):
    alone, listener, answers, _ = attack(stack, prompts[0], FEW)
    assert set(listener.texts) == {alone}
    check_answers(answers)
    assert answers["a step of a large prime"][0] == 400
    assert "more than 1.0 s" in answers["a step of a large prime"][1]


def test_a_grammar_that_cannot_be_followed_ends_the_request_whatever_drafts(stack):
    """The refusal is of the request, not of what was drafted: no session is opened again for it."""
    body = {"prompt": "x = ", "max_tokens": 24, "temperature": 0, "structured_outputs": growing(401)}
    for k in (4, 0):  # the first reaches the limit in the middle: requests share what the grammar has grown to
        answer = httpx.post(
            f"{stack.base_url}/v1/completions", json=body | {"speculation": {"num_speculative_tokens": k}}, timeout=120
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "structured_outputs")
        assert "forbid every token at position" in error["message"]
    assert not [line for line in stack.gateway.log if "lost on target" in line and "too large" in line]


@pytest.mark.exhaustive
def test_hostile_grammars_cost_a_stream_and_the_memory_little(stack, prompts):
    alone, listener, answers, growth = attack(stack, prompts[0], ALL)
    for name, (status, said, seconds) in answers.items():
        print(f"{name}: {status} after {seconds:.2f} s: {' '.join(said.split())[:90]}")
    print(
        f"{len(listener.texts)} streams, longest gap {listener.longest_gap_s:.2f} s, memory {growth / 2**20:+.0f} MiB"
    )
    assert set(listener.texts) == {alone}
    check_answers(answers)
    assert max(seconds for _, _, seconds in answers.values()) < MOST_SECONDS
    assert listener.longest_gap_s < MOST_STALL_S
    assert growth < MOST_GROWTH_BYTES
