"""What a 404 says: paths that clients of other servers try, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from specdec.errors import quote

_NO_VECTORS: Final = "this server generates text; it makes no embeddings and scores no pairs of texts"
_NO_MEDIA: Final = "this server reads and writes text only"
_NO_JOBS: Final = "this server keeps no files and no jobs; send the requests themselves, many at once: it batches them"
_NO_THREADS: Final = "POST /v1/responses keeps conversations; continue one with previous_response_id"
_NO_ADAPTERS: Final = "this server has no adapters; merge the adapter into the model and serve that"
_NO_SLEEP: Final = "this server frees no memory while it runs; stop it and start it again"
_NO_CACHE: Final = "there is nothing to empty: what is cached yields to what is in use; cache_salt separates requests"
_NATIVE: Final = "use POST /v1/completions, with max_tokens and stream in the body"
#: What a path begins with, without /v1 → the remedy. The first that fits counts.
_INSTEAD: Final[Mapping[str, str]] = {
    # OpenAI's.
    **dict.fromkeys(("/embeddings", "/moderations", "/engines"), _NO_VECTORS),
    **dict.fromkeys(("/audio", "/images", "/realtime", "/videos"), _NO_MEDIA),
    **dict.fromkeys(("/batches", "/evals", "/files", "/fine_tuning", "/uploads", "/vector_stores"), _NO_JOBS),
    **dict.fromkeys(("/assistants", "/containers", "/conversations", "/threads"), _NO_THREADS),
    # vLLM's and SGLang's.
    **dict.fromkeys(("/classify", "/encode", "/pooling", "/rerank", "/reward", "/score", "/v2/rerank"), _NO_VECTORS),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter"), _NO_ADAPTERS),
    **dict.fromkeys(("/is_sleeping", "/sleep", "/wake_up"), _NO_SLEEP),
    **dict.fromkeys(("/get_model_info", "/get_server_info", "/load", "/server_info"), "use GET /services"),
    **dict.fromkeys(("/health_generate", "/ping"), "use GET /health"),
    **dict.fromkeys(("/reset_prefix_cache", "/flush_cache"), _NO_CACHE),
    **dict.fromkeys(("/start_profile", "/stop_profile"), "profile the processes, with py-spy or perf"),
    "/invocations": "use POST /v1/chat/completions or /v1/completions",
    "/render": "use POST /tokenize with messages",
    # Those of llama.cpp, TGI and vLLM's first server.
    **dict.fromkeys(("/completion", "/generate", "/generate_stream", "/infill"), _NATIVE),
    **dict.fromkeys(("/info", "/props", "/slots"), "use GET /services and GET /v1/models"),
    "/apply-template": "use POST /tokenize with messages",
    # Ollama's.
    "/api/chat": "use POST /v1/chat/completions: this server speaks OpenAI's API, not Ollama's",
    "/api/generate": "use POST /v1/completions: this server speaks OpenAI's API, not Ollama's",
    "/api/embed": _NO_VECTORS,
    **dict.fromkeys(("/api/ps", "/api/show", "/api/tags"), "use GET /v1/models: this server speaks OpenAI's API"),
    "/api/version": "use GET /version",
    "/api": "this server speaks OpenAI's API below /v1, not Ollama's",
    # Anthropic's.
    "/messages/batches": _NO_JOBS,
    "/complete": "use POST /v1/messages or /v1/completions",
}


def say_unknown(path: str, served: Collection[str]) -> str:
    """The text of the error for a path that is not among those served."""
    bare = path.removeprefix("/v1")
    for other, remedy in _INSTEAD.items():
        if (bare + "/").startswith(other + "/"):
            return f"{quote(path)} is not served: {remedy}"
    # With /v1 twice or not at all, or behind a proxy's prefix.
    meant = [each for each in served if each != "/" and (path.endswith(each) or each == f"/v1{path}")]
    if meant:
        return f"there is no {quote(path)} here; did you mean {max(meant, key=len)!r}?"
    return f"there is no {quote(path)} here; /openapi.json lists the paths"
