"""What chat templates do not show: how some families write answers.

The marks were taken from the families' published chat templates. A template that transformers or a file gives comes
before these. What an expression matches has a limit, for it is searched at each character.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.text.call_format import NAMED_CALL, PYTHON_ARGUMENTS, CallFormat

#: gpt-oss: channels of the harmony format.
_GPT_OSS: Final = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "close": ["<|end|>", "<|return|>"],
        },
        "tool_calls": {
            "open_pattern": (
                r"(?:<\|channel\|>(?:commentary|analysis)\s{0,8})?to=functions\.(?P<name>[\w.:/-]{1,128})\s{0,8}"
                r"(?:<\|channel\|>(?:commentary|analysis)\s{0,8})?(?:<\|constrain\|>\s{0,8})?(?:json\s{0,8})?"
                r"<\|message\|>"
            ),
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": NAMED_CALL,
        },
    },
}

#: Gemma 4: keys without quotes, texts in quotes of their own.
_GEMMA: Final = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>\s{0,8}call:(?P<name>[\w.:/-]{1,128})\s{0,8}(?=\{)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED_CALL,
        },
        "content": {},
    },
}

#: What a chat template holds, all of it, and the template of its family. The first that fits counts.
_TEMPLATES: Final = (
    (("<|start|>assistant", "<|channel|>", "functions."), _GPT_OSS),
    (("<|turn>", "<|tool_call>"), _GEMMA),
)
#: What a chat template or the tokenizer holds, and the calls of models whose chat templates write none: LFM2, Granite
#: 3, and what descends from Hermes.
_CALLS: Final = (
    (("<|tool_call_start|>",), CallFormat("<|tool_call_start|>[", "", "]<|tool_call_end|>", ", ", PYTHON_ARGUMENTS)),
    (("<|tool_call|>",), CallFormat('<|tool_call|>[{"name": "', '", "arguments": ', "}]", '}, {"name": "')),
    (
        ("<tool_call>", "</tool_call>"),
        CallFormat(
            '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", '}\n</tool_call>\n<tool_call>\n{"name": "'
        ),
    ),
)


def family_of(chat_template: str) -> Mapping[str, Any] | None:
    """The response template of a chat template's family; None where it can be derived, or is not known."""
    return next((found for marks, found in _TEMPLATES if all(mark in chat_template for mark in marks)), None)


def calls_of(texts: str) -> CallFormat | None:
    """How calls are written, of the texts of a chat template and a tokenizer; None: that is not known."""
    return next((found for marks, found in _CALLS if all(mark in texts for mark in marks)), None)
