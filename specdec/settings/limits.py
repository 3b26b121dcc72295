"""What one request may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specdec.settings.connections import ConnectionSettings
from specdec.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits(ConnectionSettings):
    """What one request may hold, so that no request costs others their speed or the gateway its memory."""

    GROUPS: ClassVar = {"limits of a request": "max_header_bytes"}

    max_header_bytes: int = option(65536, "bytes of a request's line and headers", ge=1)
    max_body_bytes: int | None = option(
        None, "bytes of a body or of a gRPC message; default: 64 a token of the model's context, 1 to 16 MiB", ge=1
    )
    max_buffered_bytes: int = option(32 * 2**20, "bytes of all bodies being read; one more gets 429", ge=1)
    max_json_values: int = option(2**18, "values in a body; never fewer than twice the model's context", ge=1)
    max_json_depth: int = option(64, "levels of lists and objects in a body", ge=1, le=200)
    max_characters_per_token: int = option(128, "characters of a prompt per token of the model's context", ge=1)
    max_messages: int = option(4096, "messages of a chat", ge=1)
    max_content_parts: int = option(4096, "content parts and calls in all messages of a chat", ge=1)
    max_tools: int = option(128, "tools of a chat", ge=0)
    max_stop_strings: int = option(1024, "stop strings of a request", ge=0)
    max_stop_characters: int = option(1024, "characters of a stop string", ge=1)
    max_stop_token_ids: int = option(1024, "stop tokens of a request", ge=0)
    max_bad_words: int = option(256, "bad words, or bad token sequences, of a request", ge=0)
    max_bad_word_characters: int = option(64, "characters of a bad word, or tokens of a bad sequence", ge=1)
    max_logit_bias: int = option(4096, "tokens with a logit bias in a request", ge=0)
    max_grammar_bytes: int = option(65536, "bytes of a schema, grammar, expression or all choices of a request", ge=1)
    max_detokenize_ids: int = option(2**18, "token ids of a call that asks for their text", ge=1)
    tokenizer_pool_size: int = option(1, "processes that read large requests; 0: the gateway's own", ge=0, le=64)
