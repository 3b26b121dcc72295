"""Grammars of calls: whatever they allow is read as a call whose arguments fit, in every family's format."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import PreTrainedTokenizerFast

from gateway.text.call_format import CallFormat
from gateway.text.call_grammar import CallGrammar
from gateway.text.chat_template import ChatTemplate, TooExpensive
from gateway.text.lark import LarkWriter
from gateway.text.message import AssistantMessage
from gateway.text.replies import Replies
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools import ToolChoice, read_tools
from specdec.errors import InvalidRequest
from specdec.structured_outputs import StructuredOutputsParams
from tests.gateway.text.formats import ARGUMENTS, FORMATS, TOOLS, config_of, tokenizer_of

#: Families whose arguments stand one by one; those that differ from each other in the form of a value.
LISTED = [name for name, form in FORMATS.items() if not form.is_json]
KINDS = {"qwen_xml", "glm", "gemma", "lfm2", "deepseek_v3_2", "minimax_m2"}
ALL_KINDS = [name if name in KINDS else pytest.param(name, marks=pytest.mark.exhaustive) for name in LISTED]


class Model:
    """A family's tokenizer, here and as the target reads it, and its replies."""

    def __init__(self, name):
        form = FORMATS[name]
        self.form = form
        self.tokenizer = tokenizer_of(form)
        self.end = self.tokenizer.token_to_id(form.end)
        self.chat = ChatTemplate(form.chat_template, {})
        self.replies = Replies(self.chat, TextTokenizer(self.tokenizer, config_of(form)), None)
        fast = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, eos_token=form.end)
        self.grammars = from_tokenizer(fast, eos_token=[self.end])

    def plan(self, choice="required", tools=TOOLS, parallel=True, wanted=None, variables=None):
        tools = read_tools(tools)
        given = {"tools": [tool.definition for tool in tools]}
        prompt = self.chat.render([{"role": "user", "content": "hi"}], variables=given)
        return self.replies.plan(
            prompt, tools, ToolChoice.read(choice, tools), variables or {}, parallel=parallel, wanted=wanted,
            end_token_ids=[self.end],
        )  # fmt: skip

    def accepts(self, plan, text):
        """Whether the grammar allows the tokens of a text, and the end after it."""
        matcher = LLMatcher(self.grammars, plan.structured_outputs.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text).ids
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def walk(self, plan, seed):
        """A text of the grammar, by chance."""
        matcher = LLMatcher(self.grammars, plan.structured_outputs.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        rng, output = random.Random(seed), []
        mask = allocate_token_bitmask(1, self.grammars.vocab_size)
        texts = ('"', "}", "1", "x", "</think>", "</arg_value>", '<|"|>')
        likely = {self.tokenizer.token_to_id(text) for text in texts} | {self.end}
        ending = self.tokenizer.encode("\n</parameter").ids  # which chance does not write
        while not matcher.is_stopped() and len(output) < 1500:
            fill_next_token_bitmask(matcher, mask, 0)
            allowed = [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
            preferred = sorted(likely.intersection(allowed))
            chosen = rng.choice(preferred if preferred and rng.random() < 0.8 else allowed)
            if len(output) > 60 and ending and ending[0] in allowed:
                chosen = ending.pop(0)
            output.append(chosen)
            assert matcher.consume_token(output[-1])
        return self.tokenizer.decode([i for i in output if i != self.end], skip_special_tokens=False)

    def read(self, plan, text):
        parser, message = self.replies.parser(plan), AssistantMessage()
        message.add(parser.feed(text))
        message.add(parser.finish())
        return message


@pytest.fixture(scope="module")
def models():
    made = {}
    return lambda name: made.setdefault(name, Model(name))


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_fits_its_schema(models, name):
    model, schemas = models(name), {tool.name: tool.parameters for tool in read_tools(TOOLS)}
    plan = model.plan()
    for seed in range(4):
        text = model.walk(plan, seed)
        message = model.read(plan, text)
        assert message.calls, text
        assert not message.content
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("name", FORMATS)
def test_the_grammar_is_what_the_chat_template_writes(models, name):
    """An answer of the template's own form is allowed; other names, other arguments and plain text are not."""
    model = models(name)
    call_id = model.replies.earlier_calls.id_form.format(name="add", number=0)
    calls = [{"id": call_id, "function": {"name": "add", "arguments": ARGUMENTS}}]
    message = model.replies.read_message({"role": "assistant", "content": "", "tool_calls": calls})
    given = [{"role": "user", "content": "hi"}]
    variables = {"tools": TOOLS}
    whole = model.chat.render([*given, message], add_generation_prompt=False, variables=variables)
    prompt = model.chat.render(given, variables=variables)
    begun = model.form.begun
    answer = whole[len(prompt) - len(begun) :].rstrip("\n").removesuffix(model.form.end).rstrip()
    text = answer if not begun else f"so\n</think>\n\n{answer}"
    plan = model.plan()
    assert model.accepts(plan, text)
    [call] = model.read(plan, text).calls
    assert (call.name, json.loads(call.arguments)) == ("add", json.loads(ARGUMENTS))
    changes = (("add", "sub"), ('"a": 1', '"a": "1"'), ('"x"', "2"), (">1<", ">y<"), ("a:1", "a:y"), ("x", "x" * 9))
    for wrong in ("hello", *(text.replace(*change) for change in changes)):
        assert wrong == text or not model.accepts(plan, wrong)
    named = model.plan({"type": "function", "function": {"name": "now"}})
    assert not model.accepts(named, text)


def test_one_call_alone(models):
    model = models("hermes")
    calls = FORMATS["hermes"].calls
    assert model.accepts(model.plan(parallel=True), calls)
    for parallel in (None, False):
        plan = model.plan(parallel=parallel)
        assert not model.accepts(plan, calls)
        assert (plan.max_calls, len(model.read(plan, calls).calls)) == (1, 1)
    twice = calls.partition('\n<tool_call>\n{"name": "now"')[0]
    for parallel in (None, False, True):
        named = model.plan({"type": "function", "function": {"name": "add"}}, parallel=parallel)
        assert named.max_calls == 1
        assert model.accepts(named, twice)
        assert not model.accepts(named, f"{twice}\n{twice}")
    assert [model.plan("auto", parallel=parallel).max_calls for parallel in (None, True, False)] == [None, None, 1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["", "named"])
def test_a_required_call_ends_the_answer(models, name, choice):
    """The grammar allows nothing but the end after one call, and no text but the call is given."""
    model = models(name)
    plan = model.plan(choice, parallel=None)
    for seed in range(4):
        message = model.read(plan, model.walk(plan, seed))
        assert len(message.calls) == 1
        assert not message.content


def test_strict_tools_bind_calls_and_leave_text_free(models):
    model = models("hermes")
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    plan = model.plan("auto", tools)
    form = FORMATS["hermes"]
    for text in ("hello", form.call, form.calls, '<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>'):
        assert model.accepts(plan, text)
    for text in (form.call.replace('"a": 1', '"a": "1"'), form.call.replace("add", "sub")):
        assert not model.accepts(plan, text)
    assert model.plan("auto").structured_outputs is None


def test_json_or_a_call(models):
    model = models("hermes")
    wanted = StructuredOutputsParams(
        json={"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
    )
    plan = model.plan("auto", wanted=wanted)
    assert model.accepts(plan, '{"k": 1}')
    assert model.accepts(plan, FORMATS["hermes"].calls)
    assert not model.accepts(plan, "hello")
    with pytest.raises(InvalidRequest, match="regex"):
        model.plan("auto", wanted=StructuredOutputsParams(regex="a"))


def argument_of(schema, **more):
    """A tool with one argument."""
    parameters = {"type": "object", "properties": {"k": schema}, "required": ["k"], **more}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


#: Schemas of one argument, and more of the whole.
VALUES = [
    ({"type": "string"}, {}),
    ({}, {}),
    ({"type": "string", "minLength": 2, "maxLength": 3}, {}),
    ({"enum": ["red", "light blue"]}, {}),
    ({"const": "x"}, {}),
    ({"enum": [1, 2]}, {}),
    ({"type": "number", "minimum": 2}, {}),
    ({"type": "boolean"}, {}),
    ({"type": ["integer", "null"]}, {}),
    ({"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}, {}),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {}),
    ({"type": "array", "items": {"type": "string"}, "maxItems": 2}, {}),
    ({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}, {}),
    ({"$ref": "#/$defs/E"}, {"$defs": {"E": {"type": "string", "enum": ["a", "b"]}}}),
    ({"type": "array", "items": {"$ref": "#/$defs/N"}, "maxItems": 2}, {"$defs": {"N": {"type": "integer"}}}),
    (
        {"type": "array", "items": {"$ref": "#/definitions/N"}, "maxItems": 2},
        {"definitions": {"N": {"type": "integer"}}},
    ),
    ({"type": "string"}, {"required": []}),
]


@pytest.mark.parametrize("name", ALL_KINDS)
def test_values_of_all_kinds_fit(models, name):
    """In forms where not all of it is JSON."""
    model = models(name)
    for schema, more in VALUES:
        tools = argument_of(schema, **more)
        plan = model.plan(tools=tools)
        for seed in range(2):
            text = model.walk(plan, seed)
            message = model.read(plan, text)
            assert [call.name for call in message.calls] == ["f"] * len(message.calls) != [], (schema, text)
            for call in message.calls:
                jsonschema.validate(json.loads(call.arguments), tools[0]["function"]["parameters"])


def test_alternatives_may_refer_to_each_other(models):
    one, other = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
    shared = {"A": {"anyOf": [one, other]}, "B": {"anyOf": [one, {"type": "string", "maxLength": 3}]}}
    model = models("glm")
    plan = model.plan(tools=argument_of(one, **{"$defs": shared}))
    [call] = model.read(plan, model.walk(plan, 0)).calls
    assert len(json.loads(call.arguments)["k"]) <= 3


@pytest.mark.parametrize("name", LISTED)
def test_names_that_are_words_of_python(models, name):
    model, limit = models(name), {"type": "string", "maxLength": 2}
    parameters = {"type": "object", "properties": {"from": limit, "1st": limit}, "required": ["from", "1st"]}
    plan = model.plan(tools=[{"type": "function", "function": {"name": "get-it.x", "parameters": parameters}}])
    [call, *_] = model.read(plan, model.walk(plan, 0)).calls
    assert (call.name, list(json.loads(call.arguments))) == ("get-it.x", ["from", "1st"])


@pytest.mark.parametrize("name", LISTED)
def test_arguments_may_be_left_out_where_they_may(models, name):
    model, form = models(name), FORMATS[name]
    function = TOOLS[0]["function"]
    for required, is_allowed in ((["a", "b"], False), (["a"], True), ([], True), (["b"], False)):
        parameters = function["parameters"] | {"required": required}
        plan = model.plan(tools=[{"type": "function", "function": function | {"parameters": parameters}}, TOOLS[1]])
        assert model.accepts(plan, form.written)
        assert model.accepts(plan, form.written_without_b) == is_allowed


@pytest.mark.parametrize(("schema", "more", "words"), [
    ({"type": "string", "pattern": "a+"}, {}, "say pattern of 'k'"),
    ({"type": "string", "format": "date"}, {}, "say format of 'k'"),
    ({"type": "string"}, {"anyOf": [{"required": ["k"]}]}, "say anyOf"),
    ({"type": "string"}, {"required": ["x"]}, "say x"),
    ({"type": "string", "maxLength": "3"}, {}, "lengths of 'k'"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, {}, "lengths of 'k'"),
    ({"type": "string", "minLength": -1}, {}, "lengths of 'k'"),
    ({"enum": 3}, {}, "say enum of 'k'"),
    ({"enum": ["a", 1]}, {}, "texts and other values"),
    ({"$ref": "#/$defs/none"}, {}, "do not define"),
    ({"enum": ["</arg_value>"]}, {}, "be '</arg_value>'"),
])  # fmt: skip
def test_what_no_grammar_grants_is_refused(models, schema, more, words):
    with pytest.raises(InvalidRequest, match=words):
        models("glm").plan(tools=argument_of(schema, **more))
    assert models("glm").plan("auto", argument_of(schema, **more)).schemas is not None


@pytest.mark.parametrize(("name", "is_known"), [("lfm2", True), ("hermes", True), ("llama_3", False)])
def test_a_chat_template_that_writes_no_calls(models, name, is_known):
    """The markers of some families are known all the same."""
    model = models(name)
    template = FORMATS["lfm2"].chat_template.partition("{%- for call")[0] + "{%- endfor %}"
    replies = Replies(ChatTemplate(template, {}), TextTokenizer(model.tokenizer, {}), None)
    given = {"parallel": True, "wanted": None, "end_token_ids": ()}
    if is_known:
        plan = replies.plan("", read_tools(TOOLS), ToolChoice("required"), {}, **given)
        assert model.accepts(plan, FORMATS[name].calls.replace("'", '"'))
        return
    assert replies.template is None
    with pytest.raises(InvalidRequest, match="nothing tells how"):
        replies.check_tools()
    with pytest.raises(InvalidRequest, match="does not show how"):
        replies.plan("", read_tools(TOOLS), ToolChoice("required"), {}, **given)


def test_a_chat_template_is_probed_once_for_its_variables(models, monkeypatch):
    model, given = models("hermes"), {"parallel": None, "wanted": None, "end_token_ids": ()}
    replies = Replies(model.chat, TextTokenizer(model.tokenizer, {}), None)
    render, renders = model.chat.render, []
    monkeypatch.setattr(model.chat, "render", lambda *args, **named: renders.append(1) or render(*args, **named))
    for variables, is_new in (({}, True), ({}, False), ({"a": 1}, True), ({"a": 2}, True), ({"a": 1}, False)):
        before = len(renders)
        replies.plan("", read_tools(TOOLS), ToolChoice("required"), variables, **given)
        assert (len(renders) > before) == is_new
    for number in range(100):
        replies.plan("", read_tools(TOOLS), ToolChoice("required"), {"a": number}, **given)
    before = len(renders)
    replies.plan("", read_tools(TOOLS), ToolChoice("required"), {"a": 1}, **given)
    assert len(renders) > before, "few are kept"


def test_a_template_that_refuses_the_prompt_of_tools_starts(models):
    """Though it writes earlier calls. The answers are read as its family writes them."""
    source = "{% if tools and add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
    chat = ChatTemplate(source + FORMATS["hermes"].chat_template, {})
    replies = Replies(chat, TextTokenizer(models("lfm2").tokenizer, {}), None)
    assert replies.template.reads_calls


def test_a_chat_template_that_takes_too_long_is_probed_once(models, monkeypatch):
    chat, renders = ChatTemplate("{{ messages }}", {}), []

    def render(*args, **named):
        renders.append(1)
        raise TooExpensive("it takes too long", param="messages")

    monkeypatch.setattr(chat, "render", render)
    replies = Replies(chat, TextTokenizer(models("lfm2").tokenizer, {}), None)
    assert replies.template is not None
    assert replies.problem == "it takes too long"
    assert len(renders) == 1


def test_a_chat_template_that_took_too_long_once_is_probed_again(models, monkeypatch):
    model, given = models("hermes"), {"parallel": None, "wanted": None, "end_token_ids": ()}
    replies = Replies(model.chat, TextTokenizer(model.tokenizer, {}), None)
    render, is_slow, renders = model.chat.render, True, []

    def render_slowly(*args, **named):
        renders.append(1)
        if is_slow:
            raise TooExpensive("it takes too long", param="messages")
        return render(*args, **named)

    monkeypatch.setattr(model.chat, "render", render_slowly)
    for _ in range(2):
        replies.plan("", read_tools(TOOLS), ToolChoice("required"), {}, **given)
    assert len(renders) == 2
    is_slow = False
    replies.plan("", read_tools(TOOLS), ToolChoice("required"), {}, **given)
    num_renders = len(renders)
    replies.plan("", read_tools(TOOLS), ToolChoice("required"), {}, **given)
    assert 2 < len(renders) == num_renders


def test_tokens_are_sorted_once():
    class Added(dict):
        num_read = 0

        def __iter__(self):
            self.num_read += 1
            return super().__iter__()

    added = Added({f"<|{i}|>": i for i in range(10)})
    grammar = CallGrammar(CallFormat("<|3|>", "", "<|4|>", None), LarkWriter(added))
    tools = read_tools([{"type": "function", "function": {"name": f"f{i}"}} for i in range(20)])
    assert "<[3]>" in grammar.forced(tools, parallel=False)
    assert added.num_read == 1
