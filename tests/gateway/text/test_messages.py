"""From answers to messages: thoughts, text and calls of every family, however the text is cut."""

import json
import random
import time
from dataclasses import replace
from functools import cache

import pytest
from transformers.utils.chat_parsing import ResponseParser

from gateway.text.call_reader import CallReader
from gateway.text.chat_template import ChatTemplate
from gateway.text.message import AssistantMessage
from gateway.text.message_parser import MessageParser
from gateway.text.replies import Replies, ReplyPlan
from gateway.text.response_families import family_of
from gateway.text.response_template import ResponseTemplate
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools import ToolChoice, read_tools, with_alternatives
from specdec.errors import InternalError, InvalidRequest
from tests.gateway.text.form import CHATML
from tests.gateway.text.formats import ARGUMENTS, FORMATS, TOOLS, config_of, tokenizer_of

SCHEMAS = {tool.name: tool.parameters for tool in read_tools(TOOLS)}


@cache
def replies_of(name):
    form = FORMATS[name]
    tokenizer = TextTokenizer(tokenizer_of(form), config_of(form))
    return Replies(ChatTemplate(form.chat_template, {}), tokenizer, None)


def parse(template, text, cuts=(), begun="", schemas=SCHEMAS, *, is_cut=False, **given):
    parser, message = MessageParser(template, begun, schemas, **given), AssistantMessage()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        message.add(parser.feed(text[start:end]))
    message.add(parser.finish(is_cut=is_cut))
    assert parser.has_calls == bool(message.calls)
    assert len({call.id for call in message.calls}) == len(message.calls)
    calls = [(call.name, call.arguments) for call in message.calls]
    return {"content": message.content, "reasoning": message.reasoning, "calls": calls}


def all_cuts(text, count=20):
    """Every character by itself, and pieces at random."""
    rng = random.Random(text)
    yield list(range(1, len(text)))
    for _ in range(count):
        yield sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.choice([1, 3, 20]))))


@pytest.mark.parametrize("name", FORMATS)
def test_only_what_no_chat_template_shows_is_written_by_hand(name):
    assert (family_of(FORMATS[name].chat_template) is not None) == (name in ("gpt_oss", "gemma"))


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_each_family_are_read_however_the_text_is_cut(name):
    form, template = FORMATS[name], replies_of(name).template
    one = parse(template, form.call, begun=form.begun)
    assert one["calls"] == [("add", ARGUMENTS)]
    assert one["reasoning"] in ("", "We add.")
    assert one["content"] in ("", "Sure.")
    assert "We add." not in form.call or one["reasoning"]
    assert parse(template, form.calls, begun=form.begun)["calls"] == [("add", ARGUMENTS), ("now", "{}")]
    for text in (form.call, form.calls):
        whole = parse(template, text, begun=form.begun)
        for cuts in all_cuts(text):
            assert parse(template, text, cuts, begun=form.begun) == whole


HERMES = replies_of("hermes").template
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
#: A text, and its content, thoughts and calls.
TEXTS = [
    (" plain text \n", " plain text \n", "", []),
    ("", "", "", []),
    ("<think>\nhm <tool_call> x\n</think>\n\n answer\n", "answer\n", "hm <tool_call> x", []),
    ("<think> cut", "", "cut", []),
    ("a < b <tool b <think", "a < b <tool b <think", "", []),
    (f"one {CALL} two {CALL} three", "one two three", "", [("add", '{"a": 1}')] * 2),
    (f"one\n\n{CALL}{CALL}\ntwo", "one\n\ntwo", "", [("add", '{"a": 1}')] * 2),
    (f"one{CALL}\n two{CALL}three ", "one\n twothree ", "", [("add", '{"a": 1}')] * 2),
    (f"<think>hm</think>\n\none {CALL}", "one", "hm", [("add", '{"a": 1}')]),
    # A marker within a string of JSON is text.
    *(
        (f"a\n<tool_call>\n{whole}\n</tool_call>\nb", "a\nb", "", [("add", arguments)])
        for arguments in (
            '{"a": 1, "b": "x</tool_call>y"}',
            r'{"b": "</tool_call>\"</tool_call>", "c": ["<tool_call>", "\\"]}',
            '{"</tool_call>": 1}',
        )
        for whole in (
            f'{{"name": "add", "arguments": {arguments}}}',
            f'{{"arguments": {arguments}, "name": "add"}}',
            f'{{"id": "</tool_call>", "name": "add", "arguments": {arguments}}}',
        )
    ),
    # Brackets that are missing are added.
    *(
        (f"<tool_call>{written}{end}", "", "", [("add", '{"a": [1, {"b": 2}]}')])
        for written in (
            '{"name": "add", "arguments": {"a": [1, {"b": 2}]}',
            '{"name": "add", "arguments": {"a": [1, {"b": 2',
        )
        for end in ("</tool_call>", "")
    ),
    # What cannot be read as a call stays as it is.
    ("a <tool_call>\nnot json\n</tool_call> b", "a <tool_call>\nnot json\n</tool_call> b", "", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', "", []),
    ("a\n<tool_call>", "a\n<tool_call>", "", []),
    *(
        (text, text, "", [])
        for text in (
            '<tool_call>{"arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + '}, "name": "add"}</tool_call>',
            '<tool_call>{"arguments": [' + "[" * 100_000,
            r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
            r'<tool_call>{"arguments": "{\"b\": \"\ud800\"}", "name": "add"}</tool_call>',
            '<tool_call>{"arguments": {"a": nothing}, "name": "add"}</tool_call>',
        )
    ),
    ('<tool_call>{"name": "Ann", "age": 3}', '<tool_call>{"name": "Ann", "age": 3}', "", []),
    # A call that was cut off keeps what was written of it.
    ('<tool_call>{"name": "add", "arguments": {"a": [1, "}', "", "", [("add", '{"a": [1, "}')]),
    # Any order, arguments as text, none at all, braces and quotes within texts.
    ('<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "add"}</tool_call>', "", "", [("add", '{"a": 1}')]),
    (r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>', "", "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "now"}</tool_call>', "", "", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", "", [("now", "{}")]),
    (r'<tool_call>{"name": "add", "arguments": {"b": "}\"{\\"}}</tool_call>', "", "", [("add", r'{"b": "}\"{\\"}')]),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_every_character_is_accounted_for(text, content, reasoning, calls):
    wanted = {"content": content, "reasoning": reasoning, "calls": calls}
    assert parse(HERMES, text) == wanted
    for cuts in all_cuts(text) if 1 < len(text) < 1000 else ():
        assert parse(HERMES, text, cuts) == wanted


@pytest.mark.parametrize("broken", ['{"a": nothing}', '{"a": True}', '{"a": NaN}', "{'a': 1}", '{"a": 1,}', '{"a": "x'])
def test_arguments_that_are_no_json_are_no_call(broken):
    """Of an answer that is given whole: of a stream they are gone when that is known."""
    text = f'a <tool_call>{{"name": "add", "arguments": {broken}}}</tool_call> b'
    for cuts in ((), *all_cuts(text)):
        assert parse(HERMES, text, cuts, streams=False) == {"content": text, "reasoning": "", "calls": []}
        assert parse(HERMES, text, cuts)["calls"][0][0] == "add"


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_anywhere_holds_no_part_of_a_marker(name):
    """Nor of a call. What was given of it before is a beginning of what the whole answer gives."""
    form, template = FORMATS[name], replies_of(name).template
    for text in (form.call, form.calls):
        whole = parse(template, text, begun=form.begun)
        for end in random.Random(name).sample(range(1, len(text)), min(40, len(text) - 1)):
            streams = end % 2 == 0
            cut = parse(template, text[:end], begun=form.begun, is_cut=True, streams=streams)
            assert whole["content"].startswith(cut["content"].rstrip()), text[:end]
            assert whole["reasoning"].startswith(cut["reasoning"].rstrip()), text[:end]
            assert len(cut["calls"]) <= len(whole["calls"])
            for (called, given), (wanted, arguments) in zip(cut["calls"], whole["calls"], strict=False):
                assert called == wanted
                assert arguments.startswith(given)


def test_a_cut_answer_keeps_text_that_is_no_marker():
    for text in ("a <b> c", '{"name": "Ann", "age": 3, "more": [', "<tool_call>no call"):
        for name in ("hermes", "llama_3"):
            assert parse(replies_of(name).template, text, is_cut=True)["content"] == text


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_text_of_halves_of_markers_does_not_depend_on_how_it_was_cut(name, with_tools):
    template, schemas = replies_of(name).template, SCHEMAS if with_tools else None
    pieces = [
        "<",
        "<<",
        "<|",
        "<｜",
        "[",
        " ",
        "\n",
        "a",
        "{",
        "<think>",
        "</think>",
        "<tool_call>",
        "<|channel|>final",
    ]
    rng = random.Random(name)
    for text in ("a<<b<<<c", *("".join(rng.choices(pieces, k=8)) for _ in range(10))):
        whole = parse(template, text, schemas=schemas)
        if len(text) <= 8:
            every = ([at + 1 for at in range(len(text) - 1) if bits >> at & 1] for bits in range(1 << (len(text) - 1)))
        else:
            every = all_cuts(text, 10)
        for cuts in every:
            assert parse(template, text, cuts, schemas=schemas) == whole, (text, cuts)


def cpu_seconds(parser, pieces):
    start = time.process_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return time.process_time() - start


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_costs_what_letters_cost(name):
    template = replies_of(name).template

    def cost(text):
        return cpu_seconds(MessageParser(template, "", SCHEMAS), text)

    # Six times as much where white space may come before a call; each pair is timed side by side.
    assert min(cost(" " * 1500 + "x") / cost("x" * 1500) for _ in range(5)) < 10


@pytest.mark.parametrize("wrong", ["<parameter=a>", "<parameter="])
def test_parameters_that_do_not_end_cost_what_whole_ones_cost(wrong):
    region = replies_of("qwen_xml").template.regions["tool_calls"]
    head, right = "<tool_call><function=add>", "<parameter=a>\n1\n</parameter>\n"
    seconds = [
        cpu_seconds(CallReader(region, SCHEMAS), [head, text * (40_000 // len(text))]) for text in (right, wrong)
    ]
    assert seconds[1] < 10 * max(seconds[0], 0.01)


def test_the_conversation_is_not_the_beginning_of_the_answer():
    replies = replies_of("hermes")
    given = {"parallel": True, "wanted": None, "end_token_ids": ()}
    none = ToolChoice("none")
    prompt = "<|im_start|>user\n<|im_start|>assistant\n<think>"
    assert replies.plan(prompt, [], none, {}, **given).begun == "<think>"
    assert replies.plan(prompt, [], none, {}, **given, add_generation_prompt=False).begun == ""
    assert replies.plan(prompt + "x" * 250, [], none, {}, **given).begun == ""


def test_arguments_come_while_they_are_written():
    parser = MessageParser(HERMES, "", SCHEMAS)
    assert not parser.feed('<tool_call>\n{"name": "add"')
    first = parser.feed(', "arguments": {"b": "some').calls
    assert [(call.index, call.name, call.arguments) for call in first] == [(0, "add", '{"b": "some')]
    assert first[0].id
    second = parser.feed(" text").calls
    assert [(call.index, call.name, call.arguments, call.id) for call in second] == [(0, "", " text", "")]


def test_without_tools_calls_are_text_and_thoughts_are_not():
    text = f"<think>x</think>{CALL}"
    assert parse(HERMES, text, schemas=None) == {"content": CALL, "reasoning": "x", "calls": []}
    assert parse(None, text, schemas=None) == {"content": text, "reasoning": "", "calls": []}


@pytest.mark.parametrize(("written", "calls"), [
    ('search(from="A", to="B")', [("search", '{"from": "A", "to": "B"}')]),
    ('a-b(city="A"), mcp.tool:x/y( 1a = 2 )', [("a-b", '{"city": "A"}'), ("mcp.tool:x/y", '{"1a": 2}')]),
    (r"""f(a="if(b=1) \" class=(", c='\' def=""" + "'" + ', d=1e-5, e=true)',
     [("f", r'{"a": "if(b=1) \" class=(", "c": "' + "' def=" + r'", "d": 1e-05, "e": true}')]),
    ('f(a="""say "from=1" (""", from=[None, {"x=(": "y"}])',
     [("f", r'{"a": "say \"from=1\" (", "from": [null, {"x=(": "y"}]}')]),
    ("f(a=[-1e999])", [("f", '{"a": [-1.7976931348623157e+308]}')]),
    ("f(*a)", []),
    ("f(a=g(b=1))", []),
    ('f(a="' + r"\"" * 30_000, []),
    ("a" * 30_000, []),
])  # fmt: skip
def test_calls_as_python_writes_them(written, calls):
    text = f"<|tool_call_start|>[{written}]<|tool_call_end|>"
    wanted = {"content": "" if calls else text, "reasoning": "", "calls": calls}
    assert parse(replies_of("lfm2").template, text) == wanted


def test_what_is_no_number_is_no_argument():
    text = "<tool_call>\n<function=f>\n<parameter=a>\nNaN\n</parameter>\n</function>\n</tool_call>"
    schema = {"properties": {"a": {"type": "number"}}}
    assert parse(replies_of("qwen_xml").template, text, schemas={"f": schema})["content"] == text


def test_special_tokens_are_kept_where_they_are_read():
    schemas = {"f": {}}
    for name, marks in (
        ("lfm2", ["<|tool_call_start|>", "<|tool_call_end|>"]),
        ("mistral", ["[TOOL_CALLS]"]),
        ("cohere", ["<|START_ACTION|>", "<|END_ACTION|>"]),
    ):
        replies, tokenizer = replies_of(name), tokenizer_of(FORMATS[name])
        calls = replies.kept_special_tokens(ReplyPlan(schemas=schemas)) - replies.kept_special_tokens(ReplyPlan())
        assert calls == set(map(tokenizer.token_to_id, marks))


@pytest.mark.parametrize("name", ["llama_3", "mistral"])
def test_text_of_which_nothing_is_read_comes_at_once(name):
    parser = replies_of(name).parser(ReplyPlan())
    assert not parser.has_parts
    assert [parser.feed(piece).content for piece in ("a ", " <", "{", "\n")] == ["a ", " <", "{", "\n"]


def test_more_calls_than_allowed_are_left_out():
    assert parse(HERMES, CALL * 3, max_calls=1)["calls"] == [("add", '{"a": 1}')]


#: A family, a text, its content and its calls.
OTHER_TEXTS = [
    # Without the end of an argument.
    ("qwen_xml", FORMATS["qwen_xml"].call.replace("1\n</parameter>\n", "1\n"), "Sure.", [("add", ARGUMENTS)]),
    ("qwen_xml", FORMATS["qwen_xml"].call.replace("x\n</parameter>\n", "x\n"), "Sure.", [("add", ARGUMENTS)]),
    ("qwen_xml", FORMATS["qwen_xml"].call.replace("</parameter>", ""), "Sure.", [("add", '{"a": 1, "b": "x\\n"}')]),
    ("seed_oss", FORMATS["seed_oss"].calls.replace("1</parameter>\n", "1"), "", [("add", ARGUMENTS), ("now", "{}")]),
    ("glm", FORMATS["glm"].calls.replace("</arg_value>", ""), "", [("add", ARGUMENTS), ("now", "{}")]),
    ("deepseek_v3_2", FORMATS["deepseek_v3_2"].call.replace("1</｜DSML｜parameter>", "1"), "Sure.",
     [("add", ARGUMENTS)]),
    # A type, and calls amid text.
    ("llama_3", '{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ("llama_3", 'Now:\n\n{"type": "function", "name": "now", "parameters": {}}\n.', "Now:\n\n.", [("now", "{}")]),
    ("llama_3", 'Now:\n{"name": "now", "parameters": {}} <|python_tag|>', "Now:\n<|python_tag|>", [("now", "{}")]),
    ("llama_4", "Now:\n[now()]", "Now:", [("now", "{}")]),
    ("llama_4", "[1, 2]\n[see](this) [now()]", "[1, 2]\n[see](this) [now()]", []),
    ("phi_4_mini", f'[{{"name": "add", "arguments": {ARGUMENTS}}}]', "", [("add", ARGUMENTS)]),
    ("mistral", f'A [TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}] b.', "A b.", [("add", ARGUMENTS)]),
    ("mistral_v11", 'One [TOOL_CALLS]add[ARGS]{"a": 1} two, [TOOL_CALLS]now[ARGS] {} three.', "One two, three.",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("mistral_v13", '[TOOL_CALLS]add[CALL_ID]x[ARGS]{"b": "[TOOL_CALLS]}"}!', "!", [("add", '{"b": "[TOOL_CALLS]}"}')]),
    ("minicpm", "<|tool_call_start|>[now(), add(a=1)]<|tool_call_end|>", "", [("now", "{}"), ("add", '{"a": 1}')]),
    ("kimi_k2", "<|tool_call_begin|>functions.now:12<|tool_call_argument_begin|>{}<|tool_call_end|>!", "!",
     [("now", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), OTHER_TEXTS, ids=range(len(OTHER_TEXTS)))
def test_texts_that_chat_templates_do_not_write(name, text, content, calls):
    template = replies_of(name).template
    wanted = {"content": content, "reasoning": "", "calls": calls}
    found = parse(template, text)
    assert found | {"reasoning": ""} == wanted
    for cuts in all_cuts(text):
        assert parse(template, text, cuts) == found


#: How a chat template writes a call, whether calls can be read, and text that begins like one.
WORDS = [
    ('Tool call: {"name": "NAME", "arguments": ARGUMENTS}', True, "Tool call: [see below] or Tool call: {1}."),
    ('Action [{"name": "NAME", "arguments": ARGUMENTS}]', True, "Action [1] and Action {braces}"),
    ("Calling NAME with ARGUMENTS", False, "Calling mom with {}, a name."),
    ("call!NAME ARGUMENTS", False, "call!me {'a'}"),
    ("I use NAME<arg>ARGUMENTS", True, "I use it {as told}."),
    (">>>NAME\\nARGUMENTS", True, "> quoted {so}"),
    ("✿FUNCTION✿: NAME\\n✿ARGS✿: ARGUMENTS", True, "FUNCTION: add"),
    ("<function=NAME>ARGUMENTS</function>", True, "<function add>{}"),
]


@pytest.mark.parametrize(("call", "is_read", "prose"), WORDS, ids=range(len(WORDS)))
def test_words_that_begin_calls_begin_text_too(call, is_read, prose):
    written = call.replace("NAME", "' + call.function.name + '").replace(
        "ARGUMENTS", "' + call.function.arguments | tojson + '"
    )
    template = CHATML.replace("CALL", "{{- '" + written + "' }}")
    form = FORMATS["hermes"]
    tokenizer = TextTokenizer(tokenizer_of(replace(form, others=("<think>", "</think>"))), config_of(form))
    read = Replies(ChatTemplate(template, {}), tokenizer, None).template
    text = call.replace("NAME", "add").replace("ARGUMENTS", ARGUMENTS).replace("\\n", "\n")
    assert (parse(read, text)["calls"] == [("add", ARGUMENTS)]) is is_read
    for each in (prose, f"So.\n{prose}"):
        assert parse(read, each) == {"content": each, "reasoning": "", "calls": []}


def test_an_added_token_is_a_marker():
    form = replace(FORMATS["hermes"], others=("<think>", "</think>"), special=("<|im_start|>", "<|im_end|>", "call!"))
    template = CHATML.replace("CALL", "{{- 'call!' + call.function.name + ' ' + call.function.arguments | tojson }}")
    tokenizer = TextTokenizer(tokenizer_of(form), config_of(form))
    read = Replies(ChatTemplate(template, {}), tokenizer, None).template
    assert parse(read, f"call!add {ARGUMENTS}")["calls"] == [("add", ARGUMENTS)]


def test_ids_tell_the_names_of_calls_where_the_chat_template_writes_nothing_else():
    """Kimi K2."""
    replies, form = replies_of("kimi_k2"), FORMATS["kimi_k2"]
    for before in (0, 3):
        parser = replies.parser(ReplyPlan(schemas=SCHEMAS, num_earlier_calls=before))
        calls = parser.feed(form.calls).calls
        assert [call.id for call in calls if call.id] == [f"functions.add:{before}", f"functions.now:{before + 1}"]


def test_the_beginning_of_an_answer_is_found_in_a_long_prompt():
    replies = replies_of("minimax_m2")
    prompt = "<think> </think>\n" * 60_000
    begun_s = time.process_time()
    assert replies.template.begun_in(prompt + "]~b]ai\n<think>\n") == "<think>\n"
    assert replies.template.begun_in(prompt + "]~b]ai\n<think>\n\n</think>\n") == "<think>\n\n</think>\n"
    assert replies.template.begun_in(prompt + "]~b]ai\n") == ""
    assert time.process_time() - begun_s < 2


def test_a_json_answer_of_llama_is_no_call():
    template = replies_of("llama_3").template
    for text in ('{"name": "Ann", "age": 3}', ' see {"name": "add", "parameters": {}}', "[1, 2]"):
        assert parse(template, text)["content"] == text


def test_arguments_written_as_text_get_the_types_of_the_schema():
    template = replies_of("qwen_xml").template
    values = {"a": "7", "b": "7", "n": "null", "f": "True", "l": "[1]", "x": "abc", "u": "8"}
    kinds = {"a": "integer", "b": "string", "n": ["string", "null"], "f": "boolean", "l": "array", "x": "integer"}
    schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()}}
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    [(_, arguments)] = parse(template, text, schemas={"f": schema})["calls"]
    assert json.loads(arguments) == {"a": 7, "b": "7", "n": None, "f": True, "l": [1], "x": "abc", "u": "8"}


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("value", "found"), [(DEEP, [("f", json.dumps({"a": DEEP}))]), (r'["\ud800"]', [])], ids=["deep", "surrogate"]
)
def test_a_parameter_that_no_answer_can_hold(value, found):
    region = replies_of("qwen_xml").template.regions["tool_calls"]
    reader = CallReader(region, {"f": {"properties": {"a": {"type": "array"}}}})
    assert not reader.feed(f"<tool_call><function=f><parameter=a>{value}</parameter></function>")
    pieces = reader.finish()
    assert [(pieces[at].name, pieces[at + 1].arguments) for at in range(0, len(pieces), 2)] == found


@pytest.mark.parametrize("properties", [[1], "a", {"a": {"type": [{}]}}, {"a": {"type": 1}}])
def test_properties_that_are_no_schemas_are_refused(properties):
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    with pytest.raises(InvalidRequest, match="tools gives f"):
        read_tools([{"type": "function", "function": function}])


def test_alternatives_of_alternatives_are_looked_at_once():
    one, text = {"$ref": "#/$defs/A"}, {"type": "string"}
    whole = {"$defs": {"A": {"anyOf": [one] * 4}, "B": {"oneOf": [{"$ref": "#/$defs/B"}, text]}}}
    assert list(with_alternatives(one, whole)) == [whole["$defs"]["A"]]
    assert list(with_alternatives({"$ref": "#/$defs/B"}, whole)) == [whole["$defs"]["B"], text]
    assert len(list(with_alternatives({"anyOf": [dict(text) for _ in range(1000)]}))) == 64


#: What begins text that is content.
MARKED = {"gpt_oss": "<|channel|>final<|message|>"}


@pytest.mark.parametrize("schemas", [None, SCHEMAS], ids=["", "with tools"])
@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_is_not_searched_by_characters(name, schemas, monkeypatch):
    fed = []
    feed = ResponseParser.feed
    monkeypatch.setattr(ResponseParser, "feed", lambda self, text: (fed.append(text), feed(self, text))[1])
    template = replies_of(name).template
    text = MARKED.get(name, "") + "word and more\n" * 50
    whole = parse(template, text, [5 * at for at in range(1, len(text) // 5)], schemas=schemas)
    assert whole["content"] == "word and more\n" * 50
    assert sum(map(len, fed)) <= len(text) // 3  # Llama's marker may begin with white space


def test_a_template_of_a_file(tmp_path):
    template = {
        "start_anchor": "A:",
        "fields": {
            "thinking": {"open": "(", "close": ")"},
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+)\s*", "close_pattern": r";+", "repeats": True,
                "content": "kv-lines", "content_args": {"line_sep": ",", "kv_sep": "="},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content_args": {"strip": False}},
        },
    }  # fmt: skip
    path = tmp_path / "template.json"
    path.write_text(json.dumps({"response_template": template}))
    read = ResponseTemplate.read(str(path))
    text = "x (why) y CALL add a=1, b=x;; z"
    wanted = {"content": "x  y  z", "reasoning": "why", "calls": [("add", ARGUMENTS)]}
    for cuts in all_cuts(text):
        assert parse(read, text, cuts) == wanted
    assert read.begun_in("A: a A:(") == "("
    wrong = [{"open": ""}, {"open_pattern": "("}, {"content": "xml-inline", "content_args": {"tag_pattern": "("}}]
    for field in wrong:
        path.write_text(json.dumps({"fields": {"content": field}}))
        with pytest.raises(InvalidRequest, match="response_template"):
            ResponseTemplate.read(str(path))
    with pytest.raises(InvalidRequest, match="response_template"):
        ResponseTemplate.read(str(tmp_path / "none.json"))


SLOW = r"(?:x|x)+(?:y|y)+!"


@pytest.mark.parametrize("fields", [
    {"tool_calls": {"open_pattern": SLOW, "content": "json"}, "content": {}},
    {"tool_calls": {"open": "CALL", "close_pattern": SLOW, "content": "json"}, "content": {}},
    {"tool_calls": {"open": "CALL", "close": "END", "content": "xml-inline",
                    "content_args": {"tag_pattern": rf"(?P<key>{SLOW})(?P<value>.)"}}, "content": {}},
], ids=["open", "close", "arguments"])  # fmt: skip
def test_a_search_that_takes_long_fails_the_request(fields, caplog, monkeypatch):
    """The event loop is not held up for long, and the text is not read as something else."""
    monkeypatch.setattr("gateway.text.markers.SEARCH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("gateway.text.message_parser.SEARCH_TIMEOUT_S", 0.05, raising=False)
    template = ResponseTemplate({"start_anchor": "A:", "fields": fields}, "test")
    text = "CALL " + "x" * 3000 + " END ok"
    begun_s = time.process_time()
    with pytest.raises(InternalError, match=r"a search for '.*\(\?:x\|x\).* takes longer"):
        parse(template, text, range(7, len(text), 7))
    assert time.process_time() - begun_s < 5
    assert "takes longer" in caplog.text


def test_reading_does_not_depend_on_time(monkeypatch):
    """Where the expressions are ours."""
    monkeypatch.setattr("gateway.text.markers.SEARCH_TIMEOUT_S", 0.0)
    monkeypatch.setattr("gateway.text.message_parser.SEARCH_TIMEOUT_S", -1e9, raising=False)
    for name, form in FORMATS.items():
        assert parse(replies_of(name).template, form.call, begun=form.begun)["calls"] == [("add", ARGUMENTS)]


def test_the_prompt_may_begin_the_answer():
    replies = replies_of("deepseek")
    plan = replies.plan(
        "<｜User｜>hi<｜Assistant｜><think>\n", [], None, {}, parallel=True, wanted=None, end_token_ids=()
    )
    assert plan == ReplyPlan("<think>\n")
    parser = replies.parser(plan)
    delta = parser.feed("so</think>yes")
    assert (delta.reasoning, delta.content) == ("so", "yes")
