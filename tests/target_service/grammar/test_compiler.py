"""Grammars: what they accept, where texts end, and what is refused, with the reason."""

import asyncio
import errno
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from specdec.errors import InvalidRequest, Overloaded, Unavailable
from specdec.settings.model import ModelSettings
from specdec.structured_outputs import StructuredOutputsParams
from specdec.types import FinishReason, ModelInfo
from target_service.grammar.bounds import MAX_TEXT_BYTES
from target_service.grammar.compiler import GrammarCompiler
from target_service.grammar.guard import refusal_of
from target_service.grammar.tokenizer import read_tokenizer
from target_service.stop_criteria import Truncation
from tests.until import until

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object", "required": ["a"]}, "end": "</f>"}],
    "triggers": ["<f"],
}
#: Takes more than ten seconds to compile.
SLOW = {"grammar": 'start: %json {"multipleOf": 19999993}'}
#: Each kind, texts that are complete, and texts that no completion makes right.
LANGUAGES = [
    ({"json": {"type": "array", "items": {"enum": [1, "a"]}}}, ['[1, "a"]', "[]"], ["{", "[2", "[[", '["b']),
    ({"json": '{"type": "boolean"}'}, ["true"], ["1", "True"]),
    ({"json": True}, ['{"x": [null]}'], ["def", "nil"]),
    ({"json_object": True}, ['{"x": 1}'], ["[", "1"]),
    ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[ ", "[1, "]),
    ({"regex": "(ab|c)+d"}, ["abcd", "cd"], ["a ", "d", "abd!"]),
    ({"choice": ["yes", 'no "way"\n', "ja→"]}, ["yes", 'no "way"\n', "ja→"], ["yeah", "no!"]),
    ({"grammar": 'start: "(" start ")" | "x"'}, ["((x))", "x"], ["()", ")"]),
    ({"grammar": 'root ::= "a" [0-9]+ "b"'}, ["a17b"], ["ab", "b"]),
    ({"json": {"format": "date"}}, ['"2020-02-29"', '"1999-12-31"'], ['"2021-02-29"', '"1900-02-29"', '"2021-04-31"']),
    ({"grammar": 'start: %json {"format": "date"}'}, ['"2020-02-29"'], ['"2021-02-29"']),
    (
        {
            "grammar": """start: "%json {" | T | E | %json {"format": "date"} "}" // %json {"\nT: /%json [{]"x/ # %json
E: "\\\"%json {"
"""
        },
        ["%json {", '%json {"x', '"%json {', '"2020-02-29"}'],
        ['"2021-02-29"', '%json {"format'],
    ),
    (
        {
            "json": {
                "type": "object",
                "properties": {
                    name: {"multipleOf": step} for name, step in zip("abcde", (0.01, 7, 365, 44100, 48000), strict=True)
                },
            }
        },
        ['{"a": 0.01, "e": 96000}'],
        ['{"a": 0.001'],
    ),
    ({"json": {"format": "time"}}, ['"23:59:59Z"'], ['"23:58:60Z"']),
    (
        {"json": {"$defs": {"t": {"format": "date-time", "allOf": [{"pattern": "Z$"}]}}, "$ref": "#/$defs/t"}},
        ['"2000-02-29T01:00:00Z"'],
        ['"2001-02-29T01', '"2000-02-29T01:00:00+'],
    ),
    (
        {
            "json": {
                "properties": {"enum": {"format": "date"}, "format": {"const": {"format": "date"}}},
                "type": "object",
            },
            "disable_any_whitespace": True,
        },
        ['{"enum":"2020-01-01"}', '{"format":{"format":"date"}}'],
        ['{"enum":"2021-02-3'],
    ),
    ({"structural_tag": TAG}, ['text <f>{"a": 1}</f>'], ["<f>[", "<f>{}"]),
]


@pytest.mark.parametrize(("given", "complete", "wrong"), LANGUAGES)
def test_languages(compile_grammar, tokenizer, given, complete, wrong):
    params = StructuredOutputsParams(**given)
    for text in complete:
        grammar = compile_grammar(params, tokenizer.encode(text).ids)
        assert grammar.matcher.is_accepting(), text
    for text in wrong:
        ids = tokenizer.encode(text).ids
        assert compile_grammar(params).num_kept(ids, is_drawn=False) < len(ids), text


@pytest.mark.parametrize(("given", "reason"), [
    ({"json": {"type": "foo"}}, "foo"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "Give anyOf, or a discriminator"),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
    ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "registry"),
    ({"json": "{"}, "json"),
    ({"json": "[1]"}, "object"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
    ({"regex": "("}, "unclosed"),
    ({"grammar": 'start: "a'}, "grammar"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": 'start: "' + '\\"' * 100_000}, "grammar"),
    ({"grammar": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'}, "not"),
    ({"grammar": "start: %json [1]"}, "object"),
    ({"grammar": 'start: %json {"a'}, "Unterminated"),
    ({"grammar": "root ::= " + "a" * 10_000}, "GBNF of 10009 bytes, above 8192"),
    ({"grammar": "\n" * 500_000}, "GBNF of 500000 bytes"),
    ({"structural_tag": {"structures": []}}, "triggers"),
    ({"structural_tag": {"structures": [{"begin": "<f>", "schema": {"not": {}, "x-guidance": {"lenient": True}},
                                         "end": ""}], "triggers": ["<f"]}}, "not"),
    ({"structural_tag": {"structures": [{"begin": "<f>", "schema": "[]", "end": ""}], "triggers": ["<f"]}}, "object"),
    ({"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]}}, "trigger"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_the_reason(compile_grammar, given, reason):
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=reason) as refused:
        compile_grammar(StructuredOutputsParams(**given))
    assert refused.value.param == "structured_outputs"
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("given", [
    {}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": "yes"}, {"choice": ["a", ""]}, {"regex": 5},
    {"json": 5}, {"choice": [1]}, {"json": {"a": {1, 2}}}, {"regex": "\ud800"}, {"choice": ["\ud800"]},
])  # fmt: skip
def test_parameters_that_say_nothing_or_too_much(given):
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        StructuredOutputsParams(**given)


def test_output_that_does_not_fit(compile_grammar, tokenizer):
    with pytest.raises(InvalidRequest, match=r"generated so far: .*satisfy the grammar"):
        compile_grammar(StructuredOutputsParams(choice=["yes"]), tokenizer.encode("no").ids)


def test_a_text_that_is_too_long(compile_grammar):
    with pytest.raises(InvalidRequest, match="bytes"):
        compile_grammar(StructuredOutputsParams(regex="a" * (MAX_TEXT_BYTES + 1)))


def test_no_tokenizer():
    with pytest.raises(InvalidRequest, match="tokenizer"):
        asyncio.run(GrammarCompiler(lambda: None).compile(StructuredOutputsParams(choice=["yes"])))


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    info = ModelInfo(name="m", vocab_size=512, max_model_len=64, eos_token_ids=(1,))
    assert read_tokenizer(ModelSettings(model=str(tmp_path)), info) is None


async def test_who_waits_for_a_grammar_while_the_target_closes():
    """Those that wait already get theirs, later ones are refused; none is cancelled or waits for ever."""
    begun, reading, params = threading.Event(), threading.Event(), StructuredOutputsParams(choice=["yes"])

    def slow_read():
        begun.set()
        assert reading.wait(10)

    compiler = GrammarCompiler(slow_read, max_waiting=2)
    waiting = [asyncio.create_task(compiler.compile(params)) for _ in range(2)]
    await until(begun.is_set)
    with pytest.raises(Overloaded):
        await compiler.compile(params)
    compiler.close()
    with pytest.raises(Unavailable):
        await compiler.compile(params)
    reading.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in done] == [InvalidRequest] * 2  # there is no tokenizer


def test_a_text_ends_where_it_is_complete(compile_grammar, tokenizer):
    ids = tuple(tokenizer.encode('{"a": 1}').ids)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    grammar = compile_grammar(StructuredOutputsParams(json=schema))
    assert grammar.commit(Truncation(ids[:3])) == Truncation(ids[:3])
    # What a round drafted behind the end is not part of the text, an end-of-sequence token included.
    assert grammar.commit(Truncation((*ids[3:], 0), FinishReason.STOP, 0)) == Truncation(ids[3:], FinishReason.STOP)
    # Where more could follow the end-of-sequence token ends it.
    grammar = compile_grammar(StructuredOutputsParams(regex="a+"), tokenizer.encode("aa").ids)
    end = Truncation((0,), FinishReason.STOP, 0)
    assert grammar.commit(end) == end


async def test_grammars_that_take_too_long_are_refused(compiler):
    """Each takes 10 seconds to minutes. Others compile meanwhile, and afterwards."""
    primes = [n for n in range(2, 110) if all(n % divisor for divisor in range(2, n))]
    hostile = [
        SLOW,
        {"grammar": "start: A\nA: " + " & ".join(f"/(a{{{n}}})*/" for n in primes)},
        {"json": {"$ref": "#/$defs/q/anyOf/0", "$defs": {
            "q": {"anyOf": [{"pattern": "ab", "$ref": "#/$defs/1"}]},
            **{str(n): {"pattern": f"a.{{{n}}}b", "$ref": f"#/$defs/{n + 1}"} for n in range(1, 26)},
            "26": {}}}},
    ]  # fmt: skip
    tasks = [asyncio.create_task(compiler.compile(StructuredOutputsParams(**given))) for given in hostile]
    await compiler.compile(StructuredOutputsParams(choice=["meanwhile"]))
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(each, InvalidRequest)
        assert "takes more than 1.0 s to compile" in str(each)
    await compiler.compile(StructuredOutputsParams(choice=["afterwards"]))


async def test_the_process_that_checks_grammars_is_replaced(compiler):
    await compiler.compile(StructuredOutputsParams(choice=["one"]))
    killed = compiler.guard
    killed.close()
    with pytest.raises(Unavailable, match=r"process that checks grammars cannot be asked \(.*file descriptor"):
        await killed.refusal('start: "a"')
    await compiler.compile(StructuredOutputsParams(choice=["two"]))
    assert compiler.guard is not killed


async def test_a_refused_grammar_is_not_compiled_again(make_compiler, monkeypatch):
    """What was refused is so where nothing is left that could compile it, until newer refusals take its place."""
    monkeypatch.setattr("target_service.grammar.compiler._NUM_REFUSALS", 2)
    compiler = make_compiler()

    async def refuse(regex):
        with pytest.raises(InvalidRequest, match="unclosed") as refused:
            await compiler.compile(StructuredOutputsParams(regex=regex))
        return str(refused.value)

    reasons = [await refuse("(1"), await refuse("(2")]
    guard = compiler.guard
    guard.close()
    assert [await refuse("(1"), await refuse("(2")] == reasons
    assert compiler.guard is guard
    await refuse("(3")
    guard = compiler.guard
    assert await refuse("(2") == reasons[1]
    guard.close()
    assert await refuse("(1") == reasons[0]
    assert compiler.guard is not guard


async def test_what_keeps_a_grammar_from_being_checked_is_named(compiler, monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    await compiler.compile(StructuredOutputsParams(choice=["one"]))
    for name in ("socketpair", "send_fds"):
        with monkeypatch.context() as patched:
            patched.setattr(socket, name, fail)
            with pytest.raises(Unavailable, match="Too many open files"):
                await compiler.guard.refusal('start: "a"')
    assert not await compiler.guard.refusal('start: "a"')


@pytest.fixture
async def busy(make_compiler):
    """A compiler, the process that checks its grammars, and what stops the copies that compile: those there are."""
    compiler, before = make_compiler(), psutil.Process().children()
    await compiler.compile(StructuredOutputsParams(choice=["kept"]))
    (process,) = {*psutil.Process().children()} - {*before}
    stopped = set()

    def stop():
        copies = process.children()
        for copy in copies:
            copy.suspend()
        stopped.update(copies)
        return copies

    yield compiler, process, stop
    for copy in stopped:
        with suppress(psutil.NoSuchProcess):
            copy.kill()


def end(copies):
    """As if their CPU seconds were over."""
    for copy in copies:
        copy.send_signal(signal.SIGPROF)
        copy.resume()


def slow(number):
    return StructuredOutputsParams(grammar=SLOW["grammar"].replace("19999993", str(19999993 + number)))


async def test_a_compilation_holds_its_slot_though_nobody_waits_for_it(busy, caplog):
    """A request that is cancelled frees no slot: no more than four copies compile. What becomes of them is kept."""
    compiler, process, stop = busy
    for number in range(12):
        request = asyncio.create_task(compiler.compile(slow(number)))
        await asyncio.sleep(0.02)
        request.cancel()
        assert len(stop()) <= 4
    await until(lambda: len(stop()) == 4)
    end(process.children())
    await until(lambda: not process.children())
    # Slots are free again, and nothing is left to compile what was refused.
    await compiler.compile(StructuredOutputsParams(choice=["another"]))
    compiler.guard.close()
    for number in range(4):
        with pytest.raises(InvalidRequest, match=r"more than 1\.0 s"):
            await compiler.compile(slow(number))
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_what_is_known_waits_for_no_slot(busy):
    compiler, _, stop = busy
    refused = StructuredOutputsParams(regex="(")
    with pytest.raises(InvalidRequest) as first:
        await compiler.compile(refused)
    requests = [asyncio.create_task(compiler.compile(slow(number))) for number in range(8)]
    await until(lambda: len(stop()) == 4)
    async with asyncio.timeout(30):
        with pytest.raises(InvalidRequest) as again:
            await compiler.compile(refused)
        await compiler.compile(StructuredOutputsParams(choice=["kept"]))
    assert str(again.value) == str(first.value)
    copies = stop()
    compiler.close()
    end(copies)
    for each in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(each, InvalidRequest | Unavailable)


async def test_a_lack_of_memory_is_no_fault_of_the_grammar(busy):
    """The copy has no room for the stack of its thread. It ends before it has read all of the grammar."""
    compiler, process, _ = busy
    params = StructuredOutputsParams(grammar='start: "a" //' + "x" * 400_000)
    limits = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms + 2**26, limits[1]))
    with pytest.raises(Overloaded, match="memory may be short"):
        await compiler.compile(params)
    resource.prlimit(process.pid, resource.RLIMIT_AS, limits)
    await compiler.compile(params)


async def test_the_process_that_checks_grammars_tells_what_ended_a_compilation(tokenizer):
    """The copy of itself waits for the end of its grammar, until it is ended."""
    requests, theirs = socket.socketpair()
    with requests, theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "target_service.grammar.guard_process", str(theirs.fileno()),
            stdin=subprocess.PIPE, pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        process.stdin.write(json.dumps([tokenizer.to_str(), [0]]).encode())
        process.stdin.close()
        for number in (signal.SIGSEGV, signal.SIGPROF, signal.SIGKILL):
            connection, other = socket.socketpair()
            with connection:
                with other:
                    socket.send_fds(requests, [b"\0"], [other.fileno()])
                await until(psutil.Process(process.pid).children)
                psutil.Process(process.pid).children()[0].send_signal(number)
                connection.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(connection, 1) == bytes([256 - number])
    assert await process.wait() == 0


def test_why_a_grammar_is_refused_that_ends_its_process():
    assert refusal_of(0) == ""
    assert "more than 1.0 s" in refusal_of(-signal.SIGPROF)
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        assert f"({number.name})" in refusal_of(-number)
    assert "(exit status 1)" in refusal_of(1)


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGRTMIN, os.EX_TEMPFAIL])
def test_what_ends_the_process_from_outside_refuses_no_grammar(code):
    with pytest.raises(Overloaded, match=f"{abs(code)}.*try again later"):
        refusal_of(code)


def test_hostile_grammars_cost_little(compile_grammar, tokenizer):
    """Compiling or walking them is refused, or cheap."""
    deep = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
        if len(json.dumps(deep)) > 60_000:
            break
    hostile = [
        {"json": {"anyOf": [{"type": "string", "pattern": f"a{{{i}}}(b|c)*d{{{i}}}"} for i in range(200)]}},
        {"regex": "(a|b|ab|ba){1,500}(a|aa|aaa)*c"},
        {"regex": "(.*a){25}"},
        {"grammar": 'start: start start | "a" | ""'},
        {"choice": [f"{i:x}" * 20 for i in range(2000)]},
        {"json": deep},
        # Chains of references, as long as --max-grammar-bytes allows: with a usual stack they end the process.
        {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4600)) + 'r4600: "a"'},
        {"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(4600)) + 'T4600: "a"'},
        {"json": {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}}},
        # They took hundreds of milliseconds in which nothing else ran, or for a mask.
        {"grammar": "root ::= " + '"\\\\' * 25_000},
        {"regex": "((a{50}){50}){50}"},
    ]
    for given in hostile:
        start = time.monotonic()
        try:
            grammar = compile_grammar(StructuredOutputsParams(**given))
            for _ in range(8):
                grammar.matcher.compute_bitmask()
                grammar.matcher.try_consume_tokens(tokenizer.encode("a").ids)
        except InvalidRequest:
            pass
        assert time.monotonic() - start < 3, given
