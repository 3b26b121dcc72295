"""Tools offline: models that write each family's calls, read and constrained as over REST."""

import json
from dataclasses import replace

import jsonschema
import pytest

from gateway.text.chat_template import ChatTemplate
from specdec.errors import InvalidRequest
from tandem import LLM, SamplingParams
from tests.gateway.text import memories
from tests.gateway.text.formats import ARGUMENTS, FORMATS, TOOLS

QUESTION = [{"role": "user", "content": "add 1 and x"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


#: Calls as JSON, as XML, as Python, in channels and between special tokens. The others differ in their markers.
TRIED = {"hermes", "qwen_xml", "lfm2", "gpt_oss", "kimi_k2", "deepseek_v3_2", "mistral_v13"}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.exhaustive) if name not in TRIED else name for name in FORMATS]
)
def model(request, tmp_path):
    form = FORMATS[request.param]
    prompt = ChatTemplate(form.chat_template, {}).render(QUESTION, variables={"tools": TOOLS})
    with LLM(str(memories.save(form, form.call, prompt, tmp_path)), dtype="float32") as llm:
        yield form, llm


def test_calls_and_thoughts_of_each_family(model):
    form, llm = model

    def chat(**given):
        [output] = llm.chat(QUESTION, GREEDY, tools=TOOLS, use_tqdm=False, **given)
        return output.outputs[0]

    answer = chat()
    assert [(call.type, call.function.name, call.function.arguments) for call in answer.tool_calls] == [
        ("function", "add", ARGUMENTS)
    ]
    assert (answer.content, answer.reasoning) == (
        "Sure." * ("Sure." in form.call),
        "We add." * ("We add." in form.call),
    )
    assert answer.finish_reason == "tool_calls"
    for choice, names in (("required", SCHEMAS), ({"type": "function", "function": {"name": "now"}}, ["now"])):
        answer = chat(tool_choice=choice, parallel_tool_calls=False)
        [call] = answer.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert answer.content == ""
    text = chat(tool_choice="none")
    assert (text.tool_calls, text.finish_reason) == ([], "stop")
    assert not any(mark in text.content for mark in form.special if form.call.count(mark) == 1)  # and is one token
    [output] = llm.chat(QUESTION, replace(GREEDY, detokenize=False), tools=TOOLS, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].content) == ("", None)
    with pytest.raises(InvalidRequest, match="names 'x'"):
        chat(tool_choice={"type": "function", "function": {"name": "x"}})


def test_the_bundled_pair_can_be_made_to_call_tools():
    named = {"type": "function", "function": {"name": "add"}}
    with LLM() as llm:

        def chat(messages, **given):
            [output] = llm.chat(messages, GREEDY, tools=TOOLS, use_tqdm=False, **given)
            return output.outputs[0]

        for choice, names in (("required", set(SCHEMAS)), (named, {"add"})):
            answer = chat(QUESTION, tool_choice=choice)
            [call] = answer.tool_calls
            assert (call.function.name in names, answer.content, answer.finish_reason) == (True, "", "tool_calls")
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        several = chat(QUESTION, tool_choice="required", parallel_tool_calls=True)
        assert several.tool_calls
        assert "<tool" not in several.content
        function = {"name": call.function.name, "arguments": call.function.arguments}
        calls = [{"id": call.id, "type": "function", "function": function}]
        earlier = [{"role": "assistant", "content": None, "tool_calls": calls},
                   {"role": "tool", "tool_call_id": call.id, "content": "2"}]  # fmt: skip
        for messages in (QUESTION, [*QUESTION, *earlier]):
            assert chat(messages).finish_reason in ("stop", "length", "tool_calls")
