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
from gateway.text.chat_template import ChatTemplate
from gateway.text.message import AssistantMessage
from gateway.text.replies import Replies
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools import ToolChoice, read_tools
from specdec.errors import InvalidRequest
from specdec.structured_outputs import StructuredOutputsParams
from tests.gateway.text.formats import ARGUMENTS, FORMATS, TOOLS, config_of, tokenizer_of

JSON_FORMATS = [name for name, form in FORMATS.items() if form.is_json]


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
        likely = {self.tokenizer.token_to_id(text) for text in ('"', "}", "1", "x", "</think>")} | {self.end}
        while not matcher.is_stopped() and len(output) < 600:
            fill_next_token_bitmask(matcher, mask, 0)
            allowed = [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
            preferred = sorted(likely.intersection(allowed))
            output.append(rng.choice(preferred if preferred and rng.random() < 0.8 else allowed))
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


@pytest.mark.parametrize("name", JSON_FORMATS)
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


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_the_grammar_is_what_the_chat_template_writes(models, name):
    """An answer of the template's own form is allowed; other names, other arguments and plain text are not."""
    model = models(name)
    calls = [{"id": "123456789", "function": {"name": "add", "arguments": ARGUMENTS}}]
    message = model.replies.read_message({"role": "assistant", "content": "", "tool_calls": calls})
    given = [{"role": "user", "content": "hi"}]
    variables = {"tools": TOOLS}
    whole = model.chat.render([*given, message], add_generation_prompt=False, variables=variables)
    prompt = model.chat.render(given, variables=variables)
    begun = model.form.begun
    answer = whole[len(prompt) - len(begun) :].removesuffix("\n").removesuffix(model.form.end)
    text = answer if not begun else f"so\n</think>\n\n{answer}"
    text = text.replace("123456789", "call00000")  # which a model would make up
    plan = model.plan()
    assert model.accepts(plan, text)
    assert [(call.name, call.arguments) for call in model.read(plan, text).calls] == [("add", ARGUMENTS)]
    for wrong in ("hello", text.replace("add", "sub"), text.replace('"a": 1', '"a": "1"'), text.replace('"x"', "2")):
        assert not model.accepts(plan, wrong)
    named = model.plan({"type": "function", "function": {"name": "now"}})
    assert not model.accepts(named, text)


def test_one_call_alone(models):
    model = models("hermes")
    calls = FORMATS["hermes"].calls
    assert model.accepts(model.plan(), calls)
    assert not model.accepts(model.plan(parallel=False), calls)


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


def test_a_call_in_no_json_cannot_be_required(models):
    with pytest.raises(InvalidRequest, match="give auto"):
        models("qwen_xml").plan()
    assert models("qwen_xml").plan("auto").schemas is not None


def test_tokens_are_sorted_once():
    class Added(dict):
        num_read = 0

        def __iter__(self):
            self.num_read += 1
            return super().__iter__()

    added = Added({f"<|{i}|>": i for i in range(10)})
    grammar = CallGrammar(CallFormat("<|3|>", "", "<|4|>", None), added)
    tools = read_tools([{"type": "function", "function": {"name": f"f{i}"}} for i in range(20)])
    assert "<[3]>" in grammar.forced(tools, parallel=False)
    assert added.num_read == 1
